"""The drawings of the tiny world: 24 of GenEval's objects, each by three designers, in any colour.

One atlas (drawings.png, made by scripts/tiny/artwork.py) holds Fluent Emoji Flat and High Contrast
(Microsoft, MIT) and Noto Emoji (Google, Apache-2.0); LICENSES.md beside it has their notices.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

ATLAS = Path(__file__).parent / "drawings.png"
DRAWING = 36  # pixels of a drawing's longer side: one size on fixed places is learnt fastest
CLASSES = (
    "dog", "cat", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "bird",
    "car", "bus", "train", "truck", "bicycle", "airplane", "boat",
    "apple", "banana", "orange", "pizza", "cake", "chair", "clock",
)  # fmt: skip
STYLES = ("flat", "noto", "line")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (222, 45, 45),
    "orange": (248, 140, 25),
    "yellow": (246, 210, 40),
    "green": (50, 160, 70),
    "blue": (45, 105, 225),
    "purple": (140, 70, 190),
    "pink": (248, 130, 185),
    "brown": (125, 80, 50),
    "black": (38, 38, 40),
}


@cache
def atlas() -> np.ndarray:
    """float32 [styles,2,classes,DRAWING,DRAWING,4] in [0,1], each drawing at the top left.

    The first of two tiles is a drawing in its own colours: red, green and blue, multiplied by
    alpha, and alpha. The second is for other colours: what stays, red, green and blue, and how much
    of the new colour is added to it.
    """
    with Image.open(ATLAS) as image:
        pixels = np.asarray(image, np.float32) / 255
    grid = pixels.reshape(len(STYLES), 2, DRAWING, len(CLASSES), DRAWING, 4)
    return grid.transpose(0, 1, 3, 2, 4, 5)


@cache
def drawing(name: str, style: str, color: str | None) -> np.ndarray:
    """float32 [h,w,4] of an object, the longer side DRAWING pixels: colours in [0,1], multiplied by
    the alpha behind them."""
    tiles = atlas()[STYLES.index(style), :, CLASSES.index(name)]
    alpha = tiles[0, ..., 3]
    plain, other = tiles[:, : np.count_nonzero(alpha.any(1)), : np.count_nonzero(alpha.any(0))]
    if color is None:
        return plain
    tinted = other[..., :3] + other[..., 3:] * np.array(COLORS[color], np.float32) / 255
    return np.concatenate([tinted, plain[..., 3:]], -1)
