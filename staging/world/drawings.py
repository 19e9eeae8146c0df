"""The drawings of the tiny world: 24 of GenEval's objects, each by three designers, in any colour.

One atlas (drawings.png) holds Fluent Emoji Flat and High Contrast (Microsoft, MIT) and Noto Emoji
(Google, Apache-2.0); LICENSES.md beside it has their notices.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

ATLAS = Path(__file__).parent / "drawings.png"
SIDE = 80  # pixels of a drawing in the atlas
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
    """uint8 [styles,classes,SIDE,SIDE,4], RGBA."""
    with Image.open(ATLAS) as image:
        pixels = np.asarray(image.convert("RGBA"))
    grid = pixels.reshape(len(STYLES), SIDE, len(CLASSES), SIDE, 4)
    return grid.transpose(0, 2, 1, 3, 4)


WHOLE = ("bus", "train", "bicycle", "airplane", "boat", "clock")  # of too many colours for one


@cache
def drawing(name: str, style: str, color: str | None, size: int) -> np.ndarray:
    """float32 [h,w,4] of an object, the longer side `size` pixels: colours in [0,1], multiplied by
    the alpha behind them."""
    if style == "line":
        color = color or "black"
    paint, rest = layers(name, style, color is not None, size)
    if color is None:
        return rest
    target = np.float32([*COLORS[color], 0]) / 255
    return rest + paint * target


@cache
def layers(name: str, style: str, tint: bool, size: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [h,w,1] and [h,w,4]: a drawing is the first, times its colour, plus the second."""
    paint, rest = _layers(name, style, tint)
    scale = size / max(paint.shape[:2])
    shape = round(paint.shape[1] * scale), round(paint.shape[0] * scale)
    small = [cv2.resize(part, shape, interpolation=cv2.INTER_AREA) for part in (paint, rest)]
    return small[0][..., None], small[1]


@cache
def _layers(name: str, style: str, tint: bool) -> tuple[np.ndarray, np.ndarray]:
    """The layers as large as in the atlas."""
    pixels = atlas()[STYLES.index(style), CLASSES.index(name)].astype(np.float32) / 255
    rgb, alpha = pixels[..., :3], pixels[..., 3:]
    paint = np.zeros_like(alpha)
    if style == "line":  # one colour
        paint, rgb = np.ones_like(alpha), np.zeros_like(rgb)
    elif tint:
        paint, rgb = tintable(rgb, alpha[..., 0] > 0.5, whole=name in WHOLE)
    rows, columns = np.flatnonzero(alpha.any((1, 2))), np.flatnonzero(alpha.any((0, 2)))
    cut = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return (paint * alpha)[cut], np.concatenate([rgb * alpha, alpha], -1)[cut]


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
