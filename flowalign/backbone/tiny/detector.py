"""The detector of the tiny world: opencv, no learning.

It answers in the form that the GenEval judge takes: per class raw boxes with scores, and a
colour for every box. A blob scores by how well it fills the template of its best class, and by
how clearly that class beats the others, so that merged, torn or malformed shapes score low.
"""

from __future__ import annotations

import cv2
import numpy as np
from torch import Tensor

from flowalign.backbone.tiny.scenes import COLORS, SHAPES, shape_mask
from flowalign.system.images import to_uint8
from flowalign.types import Detections

FOREGROUND = 70  # distance from the background, in the channel that differs most
MIN_AREA = 25  # pixels; smaller blobs are specks
SIDE = 32  # templates and blobs are compared at this size
PALETTE = np.array(list(COLORS.values()), np.float32)
NAMES = list(COLORS)
TEMPLATES = {shape: shape_mask(shape, SIDE) for shape in SHAPES}


def _background(image: np.ndarray) -> np.ndarray:
    """The median colour of the light pixels."""
    pixels = image.reshape(-1, 3)
    light = pixels[pixels.min(1) > 190]
    return np.median(light if len(light) else pixels, axis=0)


def blobs(image: np.ndarray) -> list[tuple[np.ndarray, str]]:
    """Connected regions of one palette colour in uint8 [H,W,3]: (mask, colour name).

    Anti-aliased rims fall between colours: a rim pixel takes the colour of its nearest neighbour
    in the core of a region.
    """
    distance = np.abs(image.astype(np.float32) - _background(image)).max(-1)
    foreground = distance > FOREGROUND
    if not foreground.any():
        return []
    error = ((image[..., None, :].astype(np.float32) - PALETTE) ** 2).sum(-1)
    label = np.where(foreground, error.argmin(-1) + 1, 0).astype(np.uint8)
    core = cv2.erode(foreground.astype(np.uint8), np.ones((3, 3), np.uint8)) > 0
    core = core if core.any() else foreground
    outside = np.where(core, 0, 255).astype(np.uint8)
    labels = cv2.distanceTransformWithLabels(
        outside, cv2.DIST_L2, 5, labelType=cv2.DIST_LABEL_PIXEL
    )[1]
    seed = np.asarray(labels, np.int32)  # one number for the core pixel that is nearest
    nearest = np.zeros(int(seed.max()) + 1, np.uint8)
    nearest[seed[core]] = label[core]
    label = np.where(foreground, nearest[seed], 0)
    regions = []
    for index, name in enumerate(NAMES, start=1):
        count, parts = cv2.connectedComponents((label == index).astype(np.uint8), connectivity=4)
        for part in range(1, count):
            mask = parts == part
            if mask.sum() >= MIN_AREA:
                regions.append((mask, name))
    return regions


def fit(mask: np.ndarray) -> tuple[str, float, tuple[int, int, int, int]]:
    """The best class of a blob, its score in [0,1], and its box (x1,y1,x2,y2; x2 exclusive)."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    y1, y2, x1, x2 = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    crop = mask[y1:y2, x1:x2].astype(np.float32)
    crop = cv2.resize(crop, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR) > 0.5
    overlaps = {s: (crop & t).sum() / (crop | t).sum() for s, t in TEMPLATES.items()}
    ranked = sorted(overlaps, key=lambda s: overlaps[s], reverse=True)
    best, margin = overlaps[ranked[0]], overlaps[ranked[0]] - overlaps[ranked[1]]
    aspect = min(x2 - x1, y2 - y1) / max(x2 - x1, y2 - y1)
    score = (
        np.clip((best - 0.62) / 0.14, 0, 1)
        * np.clip(margin / 0.06, 0, 1)
        * np.clip((aspect - 0.55) / 0.2, 0, 1)
    )
    return ranked[0], float(score), (int(x1), int(y1), int(x2), int(y2))


class TinyDetector:
    """Detector of shapes in 64x64 scenes; images [B,3,H,W] in [0,1] -> one Detections an image."""

    name, classes, palette = "flowalign tiny detector 1", SHAPES, NAMES

    def __call__(self, images: Tensor) -> list[Detections]:
        """Boxes {class: [[x1,y1,x2,y2,score], ...]} and colours {class: [name, ...]}."""
        return [self.detect(to_uint8(image)) for image in images]

    def detect(self, image: np.ndarray) -> Detections:
        """The same for one uint8 [H,W,3] image."""
        boxes: dict[str, list[list[float]]] = {}
        colors: dict[str, list[str]] = {}
        for mask, color in blobs(image):
            shape, score, box = fit(mask)
            boxes.setdefault(shape, []).append([*box, score])
            colors.setdefault(shape, []).append(color)
        return Detections(boxes=boxes, colors=colors)
