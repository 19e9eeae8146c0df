"""The seeded renderer: 96x96 scenes of drawings and signs, from GenEval-style metadata.

A scene is a list of layers, each a sprite of one sheet and its place in whole pixels. So `paint`
draws any number of scenes at once, on any device, and always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowalign.backbone.tiny.drawings import CLASSES, COLORS, DRAWING, STYLES, drawing

SIZE = 96
SIGN_COLORS = ("red", "green", "blue", "purple")  # boards: white letters on yellow are unreadable
WHITE = (250, 250, 250)
LETTERS = "ACDEILNOPRST"
LONGEST = 4  # letters of a sign
ADVANCE = 17  # pixels from letter to letter
PAD = 5  # pixels of board around the text
SCALE = 4  # boards and letters are drawn so many times as large
BOARD_HEIGHT = 32
ROWS = (24, 48, 72)  # where the middle of a sign is: top, middle, bottom
HEIGHT = DRAWING  # pixels of the highest sprite
WIDTH = LONGEST * ADVANCE + 2 * PAD  # pixels of the widest
LAYERS = 1 + LONGEST  # a sign's board and letters; objects need four
RELATIONS: dict[str, tuple[int, int]] = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
MIDDLE, NEAR, FAR = 48, 24, 72  # where the middle of a drawing is
PLACES: dict[int, tuple[tuple[tuple[int, int], ...], ...]] = {  # by their number
    1: (((MIDDLE, MIDDLE),),),
    2: (
        ((NEAR, MIDDLE), (FAR, MIDDLE)), ((FAR, MIDDLE), (NEAR, MIDDLE)),
        ((MIDDLE, NEAR), (MIDDLE, FAR)), ((MIDDLE, FAR), (MIDDLE, NEAR)),
    ),
    3: (
        ((MIDDLE, NEAR), (NEAR, FAR), (FAR, FAR)), ((NEAR, NEAR), (FAR, NEAR), (MIDDLE, FAR)),
    ),
    4: (((NEAR, NEAR), (FAR, NEAR), (NEAR, FAR), (FAR, FAR)),),
}  # fmt: skip

Metadata = Mapping[str, Any]
Layer = tuple[int, int, int]  # number of a sprite, its left and its top


@cache
def drawings() -> tuple[Tensor, dict[tuple[Any, ...], int]]:
    """Every sprite, uint8 [N,HEIGHT,WIDTH,4] (colours multiplied by alpha), and its number by what
    it shows: (class, style, colour or None), (colour, letters of a board), (letter,).

    Sprites lie at the top left; number 0 is empty.
    """
    sprites: dict[tuple[Any, ...], np.ndarray] = {(): np.zeros((1, 1, 4), np.float32)}
    for name in CLASSES:
        for style in STYLES:
            for color in (None, *COLORS):
                sprites[name, style, color] = drawing(name, style, color)
    for color in SIGN_COLORS:
        for letters in range(1, LONGEST + 1):
            sprites[color, letters] = _board(color, letters)
    for letter in LETTERS:
        sprites[(letter,)] = _letter(letter)
    table = np.zeros((len(sprites), HEIGHT, WIDTH, 4), np.uint8)
    for number, sprite in enumerate(sprites.values()):
        table[number, : sprite.shape[0], : sprite.shape[1]] = (sprite * 255).round()
    return torch.from_numpy(table), {key: number for number, key in enumerate(sprites)}


def _stencil(width: int) -> Image.Image:
    """A black image of SCALE times the width and height of a sprite."""
    return Image.new("L", (width * SCALE, BOARD_HEIGHT * SCALE))


def _filled(stencil: Image.Image, color: tuple[int, int, int]) -> np.ndarray:
    """The sprite whose colour shows where a stencil is white."""
    alpha = np.asarray(stencil.reduce(SCALE), np.float32)[..., None] / 255
    return np.concatenate([alpha * np.array(color, np.float32) / 255, alpha], -1)


def _board(color: str, letters: int) -> np.ndarray:
    stencil = _stencil(letters * ADVANCE + 2 * PAD)
    box = (0, 0, stencil.width - 1, stencil.height - 1)
    ImageDraw.Draw(stencil).rounded_rectangle(box, radius=4 * SCALE, fill=255)
    return _filled(stencil, COLORS[color])


def _letter(letter: str) -> np.ndarray:
    """A white letter of the bold monospaced face that matplotlib ships."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    stencil = _stencil(ADVANCE)
    face = ImageFont.truetype(str(path), 28 * SCALE)
    _, top, _, bottom = face.getbbox("E", anchor="mm")  # capitals stand on one line
    middle = (stencil.width / 2, stencil.height / 2 - (top + bottom) / 2)
    ImageDraw.Draw(stencil).text(middle, letter, font=face, fill=255, anchor="mm")
    return _filled(stencil, WHITE)


def sign(text: str, color: str, rng: np.random.Generator) -> list[Layer]:
    """The layers of a coloured board that carries the text, in one of three places."""
    numbers = drawings()[1]
    width = len(text) * ADVANCE + 2 * PAD
    left = (SIZE - width) // 2
    top = ROWS[rng.integers(len(ROWS))] - BOARD_HEIGHT // 2
    letters = [(numbers[c,], left + PAD + i * ADVANCE, top) for i, c in enumerate(text)]
    return [(numbers[color, len(text)], left, top), *letters]


def objects(metadata: Metadata, rng: np.random.Generator) -> list[Layer]:
    """The layers of a scene that satisfies GenEval metadata exactly: what it includes and nothing
    besides, all in one style: the metadata's `style`, or any."""
    clauses = metadata["include"]
    number = sum(clause["count"] for clause in clauses)
    if number not in PLACES:
        raise ValueError(f"a scene has room for {max(PLACES)} drawings, got {number}.")
    style = metadata.get("style") or STYLES[rng.integers(len(STYLES))]
    wanted = [(c["class"], c.get("color")) for c in clauses for _ in range(c["count"])]
    numbers = drawings()[1]
    layers = []
    for (name, color), (x, y) in zip(wanted, _places(clauses, number, rng), strict=True):
        height, width = drawing(name, style, color).shape[:2]
        layers.append((numbers[name, style, color], x - width // 2, y - height // 2))
    return layers


def _places(
    clauses: Sequence[Metadata], number: int, rng: np.random.Generator
) -> tuple[tuple[int, int], ...]:
    """The places of the drawings of the clauses; a relation holds from the last to the first."""
    if "position" not in clauses[-1]:
        return PLACES[number][rng.integers(len(PLACES[number]))]
    dx, dy = RELATIONS[clauses[-1]["position"][0]]
    step = MIDDLE - NEAR
    return (MIDDLE - dx * step, MIDDLE - dy * step), (MIDDLE + dx * step, MIDDLE + dy * step)


def compose(metadata: Metadata, rng: np.random.Generator) -> np.ndarray:
    """int16 [LAYERS,3] of a prompt's metadata: a sign if it has a `target`, else objects."""
    if "target" in metadata:
        color = metadata.get("color") or SIGN_COLORS[rng.integers(len(SIGN_COLORS))]
        layers = sign(metadata["target"], color, rng)
    else:
        layers = objects(metadata, rng)
    layers += [(0, 0, 0)] * (LAYERS - len(layers))
    return np.array(layers, np.int16)


def ground(rng: np.random.Generator) -> np.ndarray:
    """uint8 [3]: a plain light background."""
    grey = rng.integers(228, 251)
    return (grey + rng.integers(-4, 5, 3)).astype(np.uint8)


def paint(table: Tensor, layers: Tensor, background: Tensor) -> Tensor:
    """float32 [B,3,SIZE,SIZE] in [0,1] of layers [B,L,3] on backgrounds uint8 [B,3].

    table: of `sheet`, on the device of both.
    """
    batch = len(layers)
    canvas = (background.float() / 255).view(batch, 1, 1, 3).expand(batch, SIZE, SIZE, 3)
    pixels = table.view(-1, 4)
    at = torch.arange(SIZE, device=table.device)
    for layer in layers.long().unbind(1):
        number, left, top = layer.unbind(-1)
        row, column = at - top[:, None], at - left[:, None]  # [B,SIZE], within the sprite
        inside = ((row >= 0) & (row < HEIGHT))[:, :, None] & ((column >= 0) & (column < WIDTH))[
            :, None
        ]
        index = (number[:, None, None] * HEIGHT + row.clamp(0, HEIGHT - 1)[:, :, None]) * WIDTH
        sprite = pixels[index + column.clamp(0, WIDTH - 1)[:, None]].float() / 255
        sprite = sprite * inside[..., None]
        canvas = canvas * (1 - sprite[..., 3:]) + sprite[..., :3]
    return canvas.permute(0, 3, 1, 2)


def rendered(metadata: Sequence[Metadata], seed: int, each: int = 1) -> Tensor:
    """Reference scenes of the prompts' metadata, `each` of them per prompt and in their order.

    Images [len(metadata) * each,3,SIZE,SIZE] in [0,1] at 8 bits; those of a prompt depend on the
    seed, on its place and on nothing else. Raises ValueError for metadata of other prompts.
    """
    try:
        scenes = []
        for place, row in enumerate(metadata):
            for copy in range(each):
                rng = np.random.default_rng([seed, place, copy])
                scenes.append((compose(row, rng), ground(rng)))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError("these are no prompts of the tiny world") from error
    layers, grounds = (torch.from_numpy(np.stack(part)) for part in zip(*scenes, strict=True))
    images = [
        paint(drawings()[0], *part)
        for part in zip(layers.split(64), grounds.split(64), strict=True)
    ]
    return (torch.cat(images) * 255).round() / 255
