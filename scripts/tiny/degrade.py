"""What a picture should not be: seeded ways to spoil a scene, each beside the clean one.

Images are uint8 [64,64,3]. `pair` draws one prompt's scene twice, clean and spoilt in one way, so
that only the damage tells the two apart. The kind "latent" needs an autoencoder and is made by
`preference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cv2
import numpy as np
import prompts
from PIL import Image, ImageDraw

from flowalign.backbone.tiny import scenes
from flowalign.backbone.tiny.scenes import COLORS, OVERSAMPLE, SHAPES, SIZE

Rng = np.random.Generator
Metadata = Mapping[str, Any]


def pair(
    row: Metadata, kind: str, pool: Sequence[Metadata], seed: int, rng: Rng
) -> list[np.ndarray]:
    """The clean scene of a prompt, and the same scene spoilt in the way of `kind`.

    seed fixes the clean scene. pool: the prompts that a scene may be taken from which does not
    match (kind "mismatch"); signs need none.
    """
    clean = scenes.render(row, np.random.default_rng(seed))
    if kind in PIXELS:
        return [clean, PIXELS[kind](clean, rng)]
    if kind == "missing":
        return [clean, missing(row, seed)]
    if kind == "mismatch":
        return [clean, scenes.render(other(row, pool, rng), np.random.default_rng(seed))]
    raise ValueError(f"no kind {kind!r} of damage; possible: {[*PIXELS, 'missing', 'mismatch']}")


def missing(row: Metadata, seed: int) -> np.ndarray:
    """The scene without its last shape; a scene of one shape, or a sign, becomes blank."""
    rng = np.random.default_rng(seed)
    items = [] if "target" in row else scenes.compose(row, rng)
    return scenes.draw_shapes(items[:-1], rng)


def other(row: Metadata, pool: Sequence[Metadata], rng: Rng) -> Metadata:
    """A prompt of the same kind whose scene is another one, but as near as a few draws give."""
    if "target" in row:
        return other_sign(row, rng)
    mine = prompts.facts(row)
    few = [pool[i] for i in rng.integers(len(pool), size=12)]
    found = [r for r in few if prompts.facts(r) != mine]
    found = found or [r for r in pool if prompts.facts(r) != mine]
    return max(found, key=lambda r: len(mine & prompts.facts(r)))


def other_sign(row: Metadata, rng: Rng) -> Metadata:
    """One letter changed, dropped or added, or the board in another colour."""
    word, color = row["target"], row["color"]
    if color and rng.random() < 0.3:
        names = [c for c in scenes.SIGN_COLORS if c != color]
        return dict(row, color=names[rng.integers(len(names))])
    while True:
        letters = list(word)
        at, change = rng.integers(len(letters)), rng.random()
        letter = prompts.LETTERS[rng.integers(len(prompts.LETTERS))]
        if change < 0.6:
            letters[at] = letter
        elif change < 0.8 and len(letters) > 2:
            del letters[at]
        elif len(letters) < 4:
            letters.insert(at, letter)
        new = "".join(letters)
        if new != word and new not in prompts.HELD_OUT:
            return dict(row, target=new)


def blur(image: np.ndarray, rng: Rng) -> np.ndarray:
    """A Gaussian blur, from just visible to heavy."""
    return cv2.GaussianBlur(image, (0, 0), rng.uniform(0.9, 3.0))


def bleed(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Colours that leak over edges, are mottled, or tint the whole picture."""
    way = rng.random()
    if way < 0.45:
        parts = cv2.cvtColor(image, cv2.COLOR_RGB2YCrCb).astype(np.float32)
        shift = np.array([[1, 0, rng.uniform(-4, 4)], [0, 1, rng.uniform(-4, 4)]], np.float32)
        soft = cv2.GaussianBlur(parts[..., 1:], (0, 0), rng.uniform(1.5, 5.0))
        parts[..., 1:] = cv2.warpAffine(soft, shift, (SIZE, SIZE), borderMode=cv2.BORDER_REPLICATE)
        return cv2.cvtColor(_uint8(parts), cv2.COLOR_YCrCb2RGB)
    if way < 0.75:
        return _uint8(image + field(rng, 3, rng.uniform(4, 9)) * rng.uniform(20, 60))
    tint = rng.uniform(0, 255, 3)
    return _uint8(image + (tint - image) * rng.uniform(0.12, 0.5))


def warp(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Wobbly outlines: every pixel moved by a smooth random field."""
    move = field(rng, 2, rng.uniform(2.0, 6.0)) * rng.uniform(1.0, 4.5)
    x, y = np.meshgrid(np.arange(SIZE, dtype=np.float32), np.arange(SIZE, dtype=np.float32))
    x, y = x + move[..., 0], y + move[..., 1]
    return cv2.remap(image, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)


def cut(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Bites out of what is drawn, or a piece of it turned."""
    image = image.copy()
    background = image[0, 0].copy()
    for _ in range(rng.integers(1, 4)):
        x, y = foreground(image, rng)
        half = int(rng.integers(3, 8))
        rows, columns = slice(max(0, y - half), y + half), slice(max(0, x - half), x + half)
        piece = image[rows, columns]
        if rng.random() < 0.5:
            image[rows, columns] = background
        else:
            image[rows, columns] = piece[::-1] if rng.random() < 0.5 else piece[:, ::-1]
    return image


def merge(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Another shape or letter that runs into what is drawn."""
    for _ in range(rng.integers(1, 3)):
        x, y = foreground(image, rng)
        spot = x + rng.uniform(-6, 6), y + rng.uniform(-6, 6)
        image = stamp(image, rng, spot, rng.uniform(10, 24), letters=0.3)
    return image


def malformed(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Warped, cut, or run into something else."""
    return (warp, cut, merge)[rng.integers(3)](image, rng)


def clutter(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Surplus shapes, specks, letters or strokes anywhere."""
    way = rng.random()
    if way < 0.5:
        for _ in range(rng.integers(1, 4)):
            spot = rng.uniform(8, 56), rng.uniform(8, 56)
            image = stamp(image, rng, spot, rng.uniform(9, 25), letters=0.0)
    elif way < 0.7:
        for _ in range(rng.integers(3, 12)):
            spot = rng.uniform(2, 62), rng.uniform(2, 62)
            image = stamp(image, rng, spot, rng.uniform(2.5, 6), letters=0.0)
    elif way < 0.85:
        for _ in range(rng.integers(1, 4)):
            spot = rng.uniform(8, 56), rng.uniform(8, 56)
            image = stamp(image, rng, spot, rng.uniform(10, 20), letters=1.0)
    else:
        image = image.copy()
        for _ in range(rng.integers(1, 4)):
            a, b = rng.integers(0, SIZE, (2, 2)).tolist()
            cv2.line(image, a, b, _color(rng), int(rng.integers(1, 4)), cv2.LINE_AA)
    return image


def faded(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Little contrast, or noise."""
    if rng.random() < 0.5:
        return _uint8(image + (float(rng.uniform(60, 245)) - image) * rng.uniform(0.25, 0.75))
    return _uint8(image + rng.normal(0, rng.uniform(8, 35), image.shape))


def oversaturated(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Colours or contrast driven to the end of their range."""
    pixels, gain = image.astype(np.float32), rng.uniform(1.4, 3.0)
    pivot = pixels.mean(-1, keepdims=True) if rng.random() < 0.6 else rng.uniform(80, 200)
    return _uint8(pivot + (pixels - pivot) * gain)


PIXELS: dict[str, Callable[[np.ndarray, Rng], np.ndarray]] = {
    "blur": blur,
    "bleed": bleed,
    "malformed": malformed,
    "clutter": clutter,
    "faded": faded,
    "oversaturated": oversaturated,
}


def stamp(
    image: np.ndarray, rng: Rng, spot: tuple[float, float], size: float, letters: float
) -> np.ndarray:
    """The image with one shape (or, at a rate of `letters`, a letter) of some colour on it."""
    side = SIZE * OVERSAMPLE
    mask = Image.new("L", (side, side))
    pen, (x, y) = ImageDraw.Draw(mask), spot
    if rng.random() < letters:
        letter = prompts.LETTERS[rng.integers(len(prompts.LETTERS))]
        face = scenes.font(int(size * OVERSAMPLE))
        pen.text((x * OVERSAMPLE, y * OVERSAMPLE), letter, font=face, fill=255, anchor="mm")
    else:
        corners = np.array(scenes.polygon(SHAPES[rng.integers(len(SHAPES))])) - 0.5
        pen.polygon([tuple(p) for p in (corners * size + spot) * OVERSAMPLE], fill=255)
    cover = np.asarray(mask.reduce(OVERSAMPLE))[..., None] / 255
    return _uint8(image + (np.array(_color(rng)) - image) * cover)


def field(rng: Rng, channels: int, scale: float) -> np.ndarray:
    """Smooth noise [64,64,channels] of unit variance; scale: the blur's width in pixels."""
    noise = rng.normal(size=(SIZE, SIZE, channels)).astype(np.float32)
    noise = cv2.GaussianBlur(noise, (0, 0), scale).reshape(SIZE, SIZE, channels)
    return noise / noise.std()


def foreground(image: np.ndarray, rng: Rng) -> tuple[int, int]:
    """x, y of a random pixel that differs from the corner's background."""
    rows, columns = np.nonzero(np.abs(image.astype(int) - image[0, 0]).max(-1) > 60)
    if not len(rows):
        return SIZE // 2, SIZE // 2
    i = rng.integers(len(rows))
    return int(columns[i]), int(rows[i])


def _color(rng: Rng) -> tuple[int, int, int]:
    palette = [*COLORS.values(), (250, 250, 250)]
    return palette[rng.integers(len(palette))]


def _uint8(pixels: np.ndarray) -> np.ndarray:
    return pixels.round().clip(0, 255).astype(np.uint8)
