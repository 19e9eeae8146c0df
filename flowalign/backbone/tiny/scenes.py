"""The seeded renderer: 64x64 scenes of shapes and signs, drawn from GenEval-style metadata.

A scene is drawn four times too large and reduced, so that edges are smooth. The same templates
(`shape_mask`) are what the detector compares with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIZE = 64
OVERSAMPLE = 4
SHAPES = ("circle", "square", "triangle", "star")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "yellow": (242, 200, 30),
    "green": (40, 165, 75),
    "blue": (50, 95, 225),
    "purple": (155, 60, 185),
    "black": (30, 30, 30),
}
PROMPT_COLORS = tuple(COLORS)
SIGN_COLORS = ("red", "green", "blue", "purple")  # boards: white letters on yellow are unreadable
RELATIONS: dict[str, tuple[int, int]] = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
CELLS = ((17, 17), (47, 17), (17, 47), (47, 47))  # where shapes stand, give or take two pixels
ROWS = (16, 32, 48)  # where the middle of a sign's text is: top, middle, bottom


@dataclass(frozen=True)
class Item:
    """One shape of a scene: class, colour name, centre and width in pixels."""

    shape: str
    color: str
    x: float
    y: float
    size: float


def polygon(shape: str) -> list[tuple[float, float]]:
    """Corners of a shape in the unit square, y down; the circle is a fine polygon."""
    if shape == "circle":
        turns = [2 * math.pi * i / 48 for i in range(48)]
        return [(0.5 + 0.5 * math.cos(t), 0.5 + 0.5 * math.sin(t)) for t in turns]
    if shape == "square":
        return [(0.03, 0.03), (0.97, 0.03), (0.97, 0.97), (0.03, 0.97)]
    if shape == "triangle":
        return [(0.5, 0.0), (1.0, 1.0), (0.0, 1.0)]
    if shape == "star":
        points = []
        for i in range(10):
            radius = 0.5 if i % 2 == 0 else 0.22
            angle = math.pi * i / 5 - math.pi / 2
            points.append((0.5 + radius * math.cos(angle), 0.5 + radius * math.sin(angle)))
        return points
    raise ValueError(f"no shape {shape!r}; possible: {', '.join(SHAPES)}")


@cache
def shape_mask(shape: str, size: int = 32) -> np.ndarray:
    """Boolean template [size, size] of a shape, stretched to fill its box."""
    points = np.array(polygon(shape))
    points = (points - points.min(0)) / (points.max(0) - points.min(0))
    big = Image.new("L", (size * 8, size * 8))
    ImageDraw.Draw(big).polygon([tuple(p) for p in points * (size * 8 - 1)], fill=255)
    return np.asarray(big.reduce(8)) > 127


@cache
def font(points: int) -> ImageFont.FreeTypeFont:
    """The bold monospaced face that matplotlib ships."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    return ImageFont.truetype(str(path), points)


def _jitter(color: tuple[int, int, int], rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(np.clip(c + rng.integers(-12, 13), 0, 255)) for c in color)


def _canvas(rng: np.random.Generator) -> Image.Image:
    grey = int(rng.integers(222, 250))
    tint = tuple(int(np.clip(grey + rng.integers(-5, 6), 0, 255)) for _ in range(3))
    side = SIZE * OVERSAMPLE
    return Image.new("RGB", (side, side), tint)


def _finish(image: Image.Image) -> np.ndarray:
    return np.asarray(image.reduce(OVERSAMPLE))


def draw_shapes(items: Sequence[Item], rng: np.random.Generator) -> np.ndarray:
    """uint8 [64,64,3] of the given shapes on a light background."""
    image = _canvas(rng)
    pen = ImageDraw.Draw(image)
    for item in items:
        left, top = item.x - item.size / 2, item.y - item.size / 2
        corners = [
            ((left + px * item.size) * OVERSAMPLE, (top + py * item.size) * OVERSAMPLE)
            for px, py in polygon(item.shape)
        ]
        pen.polygon(corners, fill=_jitter(COLORS[item.color], rng))
    return _finish(image)


def draw_sign(text: str, color: str, rng: np.random.Generator) -> np.ndarray:
    """uint8 [64,64,3] of a coloured board that carries the text, in one of three places."""
    image = _canvas(rng)
    pen = ImageDraw.Draw(image)
    face = font(20 * OVERSAMPLE)
    left, top, right, bottom = face.getbbox(text)
    width, height = (right - left) / OVERSAMPLE, (bottom - top) / OVERSAMPLE
    pad = 4.0  # pixels of board around the text
    x = (SIZE - width) / 2 + rng.uniform(-1, 1)
    y = ROWS[rng.integers(len(ROWS))] - height / 2
    board = [(x - pad), (y - pad), (x + width + pad), (y + height + pad)]
    pen.rounded_rectangle(
        [b * OVERSAMPLE for b in board], radius=3 * OVERSAMPLE, fill=_jitter(COLORS[color], rng)
    )
    pen.text((x * OVERSAMPLE - left, y * OVERSAMPLE - top), text, font=face, fill=(250, 250, 250))
    return _finish(image)


def _cells(count: int, relation: str | None, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Distinct cells for `count` shapes; with a relation, the second has it to the first."""
    order = [CELLS[i] for i in rng.permutation(len(CELLS))]
    if relation is None:
        return order[:count]
    dx, dy = RELATIONS[relation]
    for x, y in order:
        other = (x + 30 * dx, y + 30 * dy)  # 30 pixels: from one cell to the next
        if other in CELLS:
            return [(x, y), other]
    raise AssertionError("every relation holds between some two cells")


def compose(metadata: Mapping[str, Any], rng: np.random.Generator) -> list[Item]:
    """Shapes that satisfy GenEval metadata exactly: its includes and nothing besides."""
    clauses = metadata["include"]
    if sum(clause["count"] for clause in clauses) > len(CELLS):
        raise ValueError(f"a scene has room for {len(CELLS)} shapes.")
    shapes = [c["class"] for c in clauses for _ in range(c["count"])]
    colors = []
    for clause in clauses:
        color = clause.get("color") or PROMPT_COLORS[rng.integers(len(PROMPT_COLORS))]
        colors += [color] * clause["count"]
    sizes = rng.uniform(18, 25, len(shapes))
    relation = clauses[1]["position"][0] if "position" in clauses[-1] else None
    cells = _cells(len(shapes), relation, rng)
    spots = [
        (x + dx, y + dy)
        for (x, y), (dx, dy) in zip(cells, rng.uniform(-2, 2, (len(cells), 2)), strict=True)
    ]
    rows = zip(shapes, colors, spots, sizes, strict=True)
    return [Item(shape, color, x, y, size) for shape, color, (x, y), size in rows]


def render(metadata: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    """uint8 [64,64,3] of a prompt's metadata: a sign if it has a `target`, else shapes."""
    if "target" in metadata:
        color = metadata.get("color") or SIGN_COLORS[rng.integers(len(SIGN_COLORS))]
        return draw_sign(metadata["target"], color, rng)
    return draw_shapes(compose(metadata, rng), rng)


def rendered(metadata: Sequence[Mapping[str, Any]], seed: int, each: int = 1) -> Tensor:
    """Reference scenes of the prompts' metadata, `each` of them per prompt and in their order.

    Images [len(metadata) * each,3,64,64] in [0,1]; those of a prompt depend on the seed, on its
    place and on nothing else. Raises ValueError for metadata of other prompts.
    """
    try:
        images = [
            render(row, np.random.default_rng([seed, place, copy]))
            for place, row in enumerate(metadata)
            for copy in range(each)
        ]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError("these are no prompts of the tiny world") from error
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
