"""Draw the atlas of the tiny world from three sets of emoji: `python artwork.py FOLDER`.

FOLDER holds the npm packages, unpacked by `npm pack @iconify-json/NAME && tar xzf`, one folder each
by the package's NAME. Writes drawings.png: one row a style, one column a class, SIDE pixels each.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import cairosvg
import numpy as np
from drawings import ATLAS, CLASSES, SIDE, STYLES
from PIL import Image

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
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    image = image.crop(image.getbbox())
    scale = SIDE / max(image.size)
    image = image.resize(
        (max(1, round(image.width * scale)), max(1, round(image.height * scale))),
        Image.Resampling.LANCZOS,
    )
    canvas = Image.new("RGBA", (SIDE, SIDE))
    canvas.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    return canvas


def main() -> None:
    """Write the atlas."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the unpacked npm packages")
    folder = parser.parse_args().folder
    atlas = Image.new("RGBA", (SIDE * len(CLASSES), SIDE * len(STYLES)))
    for row, style in enumerate(STYLES):
        icons = json.loads((folder / SETS[style] / "package" / "icons.json").read_text())
        for column, name in enumerate(CLASSES):
            image = drawing(icons, NAMES.get(name, name))
            atlas.paste(image, (column * SIDE, row * SIDE))
    pixels = np.asarray(atlas).copy()
    pixels[pixels[..., 3] == 0] = 0
    Image.fromarray(pixels).save(ATLAS, optimize=True)


if __name__ == "__main__":
    main()
