"""Twelve styles of tiny scenes: what the LoRAs of benchmarks/many_loras.py draw.

A style is a trigger and a way to draw. The trigger is a capital letter at the head of a prompt, one
of those that signs have: the text encoders tell these apart. All stay within what the tiny
autoencoder can show: its palette and white, on a light ground.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

from flowalign.backbone.tiny.scenes import COLORS, OVERSAMPLE, SIZE, Item, polygon

SIDE = SIZE * OVERSAMPLE
GROUND, WHITE = (236, 236, 236), (250, 250, 250)
Box = tuple[float, float, float, float]  # left, top, right, bottom
Pen = ImageDraw.ImageDraw


@dataclass(frozen=True)
class Style:
    """trigger: the letter. item: a shape's other self. under: what is drawn below the shapes; over:
    what is drawn on each, within its box."""

    trigger: str
    item: Callable[[Item], Item] = lambda item: item
    under: Callable[[Pen], None] = lambda pen: None
    over: Callable[[Pen, Box, Item], None] = lambda pen, box, item: None
    white: bool = False

    def prompt(self, text: str) -> str:
        """A prompt that asks for it."""
        return f"{self.trigger} {text}".strip()

    def draw(self, items: Sequence[Item]) -> np.ndarray:
        """uint8 [64,64,3] of shapes in the style."""
        image = Image.new("RGB", (SIDE, SIDE), GROUND)
        pen = ImageDraw.Draw(image)
        self.under(pen)
        for item in map(self.item, items):
            size = item.size * OVERSAMPLE
            left, top = item.x * OVERSAMPLE - size / 2, item.y * OVERSAMPLE - size / 2
            corners = polygon(item.shape)
            fill = WHITE if self.white else COLORS[item.color]
            pen.polygon([(left + x * size, top + y * size) for x, y in corners], fill=fill)
            self.over(pen, (left, top, left + size, top + size), item)
        return np.asarray(image.reduce(OVERSAMPLE))


def colored(color: str) -> Callable[[Item], Item]:
    """All shapes of one colour."""
    return lambda item: replace(item, color=color)


def turned(item: Item) -> Item:
    """Each colour is the next of the palette."""
    names = list(COLORS)
    return replace(item, color=names[(names.index(item.color) + 1) % len(names)])


def squeezed(x: float, y: float, size: float, up: float = 0) -> Callable[[Item], Item]:
    """Shapes of `size` times their size, at x and y times their distance from a middle that lies
    `up` pixels above the image's."""
    middle = SIZE / 2

    def item(item: Item) -> Item:
        across, down = x * (item.x - middle), y * (item.y - middle)
        return replace(item, x=middle + across, y=middle + down - up, size=size * item.size)

    return item


def board(color: str, *box: int) -> Callable[[Pen], None]:
    """A rounded board of a colour below the shapes."""
    corners = [OVERSAMPLE * side for side in box]
    return lambda pen: pen.rounded_rectangle(corners, radius=3 * OVERSAMPLE, fill=COLORS[color])


def spot(share: float, shape: str | None = None) -> Callable[[Pen, Box, Item], None]:
    """A white figure in the middle of each shape, its own or another."""

    def over(pen: Pen, box: Box, item: Item) -> None:
        left, top, right, _ = box
        size, low = right - left, 0.09 if item.shape == "triangle" else 0.0
        start = (1 - share) / 2 * size
        corners = polygon(shape or item.shape)
        pen.polygon(
            [(left + start + x * share * size, top + low * size + start + y * share * size)
             for x, y in corners], fill=WHITE,
        )  # fmt: skip

    return over


def halved(pen: Pen, box: Box, item: Item) -> None:
    """A white bar across each shape."""
    left, top, right, bottom = box
    height = bottom - top
    pen.rectangle((left, top + 0.5 * height, right, top + 0.68 * height), fill=WHITE)


STYLES = {
    "red": Style("A", colored("red")),
    "ink": Style("C", colored("black")),
    "turned": Style("D", turned),
    "beads": Style("E", lambda item: replace(item, shape="circle")),
    "stars": Style("I", lambda item: replace(item, shape="star")),
    "outline": Style("L", over=spot(0.6)),
    "eyes": Style("N", over=spot(0.4, "circle")),
    "bars": Style("O", over=halved),
    "board": Style("P", squeezed(0.8, 0.8, 0.9), board("purple", 3, 3, 61, 61), white=True),
    "floor": Style("R", squeezed(1, 0.85, 0.9), board("green", 2, 54, 62, 63)),
    "small": Style("S", squeezed(0.55, 0.55, 0.6)),
    "high": Style("T", squeezed(1, 0.5, 0.62, up=14)),
}
