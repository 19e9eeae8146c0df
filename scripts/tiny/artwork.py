"""Draw the atlas of the tiny world from three sets of emoji: `python artwork.py FOLDER`.

FOLDER holds the npm packages, unpacked by `npm pack @iconify-json/NAME && tar xzf`, one folder each
by the package's NAME. Writes drawings.png, as `flowalign.backbone.tiny.drawings.atlas` reads it.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import cairosvg  # pyright: ignore[reportMissingImports]
import cv2
import numpy as np
from PIL import Image

from flowalign.backbone.tiny.drawings import ATLAS, CLASSES, COLORS, DRAWING, STYLES

SIDE = 80  # pixels of a drawing while its colours are parted
WHOLE = ("bus", "train", "bicycle", "airplane", "boat", "clock")  # of too many colours for one
SETS = {"flat": "fluent-emoji-flat", "noto": "noto", "line": "fluent-emoji-high-contrast"}
NAMES = {  # where a set calls a class of GenEval by another name
    "sheep": "ewe", "car": "automobile", "train": "locomotive", "truck": "delivery-truck",
    "boat": "sailboat", "apple": "red-apple", "orange": "tangerine", "cake": "shortcake",
    "clock": "alarm-clock",
}  # fmt: skip


def drawing(icons: dict, name: str) -> Image.Image:
    """One icon of a set, cut to what is drawn, in the middle of SIDE x SIDE pixels."""
    icon = icons["icons"].get(name) or icons["icons"][icons["aliases"][name]["parent"]]
    width = icon.get("width", icons.get("width", 16))
    height = icon.get("height", icons.get("height", 16))
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' viewBox="0 0 {width} {height}" color="#000">{icon["body"]}</svg>'
    )
    size = 4 * SIDE
    png = cairosvg.svg2png(svg.encode(), output_width=size, output_height=size)
    image = Image.open(io.BytesIO(png or b"")).convert("RGBA")
    image = image.crop(image.getbbox())
    scale = SIDE / max(image.size)
    image = image.resize(
        (max(1, round(image.width * scale)), max(1, round(image.height * scale))),
        Image.Resampling.LANCZOS,
    )
    canvas = Image.new("RGBA", (SIDE, SIDE))
    canvas.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    return canvas


def tiles(pixels: np.ndarray, name: str, style: str) -> list[np.ndarray]:
    """The two float32 [DRAWING,DRAWING,4] of the atlas, of RGBA pixels uint8 [SIDE,SIDE,4]."""
    rgb, alpha = np.split(pixels.astype(np.float32) / 255, [3], -1)
    if style == "line":  # one colour
        paint, rest = np.ones_like(alpha), np.zeros_like(rgb)
        rgb = rest + np.array(COLORS["black"], np.float32) / 255
    else:
        paint, rest = tintable(rgb, alpha[..., 0] > 0.5, whole=name in WHOLE)
    rows, columns = np.flatnonzero(alpha.any((1, 2))), np.flatnonzero(alpha.any((0, 2)))
    cut = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    found = []
    for color, last in ((rgb, np.ones_like(alpha)), (rest, paint)):
        large = (np.concatenate([color, last], -1) * alpha)[cut]
        scale = DRAWING / max(large.shape[:2])
        shape = round(large.shape[1] * scale), round(large.shape[0] * scale)
        small = cv2.resize(large, shape, interpolation=cv2.INTER_AREA)
        tile = np.zeros((DRAWING, DRAWING, 4), np.float32)
        tile[: small.shape[0], : small.shape[1]] = small
        found.append(tile)
    return found


def tintable(rgb: np.ndarray, inside: np.ndarray, whole: bool) -> tuple[np.ndarray, np.ndarray]:
    """float32 [H,W,1] and [H,W,3]: a drawing in another main colour is the first, times that
    colour, plus the second.

    The pixels of the main colour's hue (or of any, if `whole`) take the new hue. The main colour's
    lightness becomes the new one; lighter and darker pixels run to white and to black.
    inside: bool [H,W], the drawing without its rim.
    """
    lab = cv2.cvtColor(np.ascontiguousarray(rgb), cv2.COLOR_RGB2LAB)
    chroma, hue = np.hypot(lab[..., 1], lab[..., 2]), np.arctan2(lab[..., 2], lab[..., 1])
    cells = (lab[inside] // 12).astype(int)
    common, counts = np.unique(cells, axis=0, return_counts=True)
    main = lab[inside][(cells == common[counts.argmax()]).all(1)].mean(0)
    if whole:
        main[0] = np.percentile(lab[inside][:, 0], 60)
        own = np.ones_like(inside)
    elif np.hypot(*main[1:]) > 20:  # a colour: its hue in any strength, and no greys
        turn = np.abs(np.angle(np.exp(1j * (hue - np.arctan2(main[2], main[1])))))
        own = (turn < 0.7) & (chroma > 12)
    else:  # a grey: all greys
        own = np.hypot(lab[..., 1] - main[1], lab[..., 2] - main[2]) < 20
    level = lab[..., :1] / max(main[0], 1)
    light = ((lab[..., :1] - main[0]) / max(100 - main[0], 1)).clip(0)
    own = own[..., None]
    paint = np.where(own, np.where(level <= 1, level, 1 - light), 0)
    rest = np.where(own, np.where(level <= 1, 0, light), rgb)
    return paint.astype(np.float32), rest.astype(np.float32)


def main() -> None:
    """Write the atlas."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the unpacked npm packages")
    folder = parser.parse_args().folder
    rows: list[np.ndarray] = []
    for style in STYLES:
        icons = json.loads((folder / SETS[style] / "package" / "icons.json").read_text())
        images = [(drawing(icons, NAMES.get(name, name)), name) for name in CLASSES]
        pairs = [tiles(np.asarray(image), name, style) for image, name in images]
        rows += [np.concatenate(row, 1) for row in zip(*pairs, strict=True)]
    pixels = (np.concatenate(rows) * 255).round().astype(np.uint8)
    Image.fromarray(pixels).save(ATLAS, optimize=True)


if __name__ == "__main__":
    main()
