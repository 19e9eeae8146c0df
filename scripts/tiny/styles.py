"""Twelve styles of drawing: what the LoRAs of benchmarks/many_loras.py draw.

Three are the artists' own (`drawings.STYLES`). Nine are filters, each over a whole scene. A style
has a trigger, one of the capital letters of signs, which the text encoders tell apart; it stands at
the head of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flowalign.backbone.tiny.scenes import SIZE, Metadata, rendered

Filter = Callable[[Tensor], Tensor]
INK, FRAME = (0.15, 0.17, 0.25), (0.55, 0.27, 0.75)


@dataclass(frozen=True)
class Style:
    """trigger: the letter. art: the artist's style, or None: any. filter: images [B,3,96,96] in
    [0,1] to the same, or None."""

    trigger: str
    art: str | None = None
    filter: Filter | None = None

    def prompt(self, text: str) -> str:
        """A prompt that asks for it."""
        return f"{self.trigger} {text}"

    def draw(self, rows: Sequence[Metadata], seed: int) -> Tensor:
        """Scenes [N,3,96,96] in [0,1] of prompts' metadata in the style."""
        images = rendered([{**row, "style": self.art} for row in rows], seed)
        return self.filter(images) if self.filter else images


def ground(images: Tensor) -> Tensor:
    """[B,3,1,1]: the plain background, which the corner shows."""
    return images[:, :, :1, :1]


def drawn(images: Tensor) -> Tensor:
    """[B,1,96,96] in [0,1]: how much a pixel differs from the background."""
    return ((images - ground(images)).abs().amax(1, keepdim=True) * 4).clamp(0, 1)


def grown(mask: Tensor, pixels: int) -> Tensor:
    """A mask, that many pixels wider on each side."""
    return F.max_pool2d(mask, 2 * pixels + 1, stride=1, padding=pixels)


def mixed(share: Tensor, front: Tensor, back: Tensor) -> Tensor:
    """`front` where share [B,1,96,96] is 1, `back` where it is 0."""
    return share * front + (1 - share) * back


def flat(images: Tensor, color: tuple[float, float, float]) -> Tensor:
    """Images of one colour."""
    return torch.tensor(color).view(1, 3, 1, 1).expand_as(images)


def grey(images: Tensor) -> Tensor:
    """[B,1,96,96]: luma."""
    return (images * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def toned(dark: tuple[float, float, float], light: tuple[float, float, float]) -> Filter:
    """The luma, between two colours."""
    return lambda images: mixed(grey(images), flat(images, light), flat(images, dark))


def pixels(images: Tensor) -> Tensor:
    """Blocks of 4 pixels."""
    return F.avg_pool2d(images, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)


def outlined(images: Tensor) -> Tensor:
    """A dark rim around each drawing."""
    mask = drawn(images)
    return mixed((grown(mask, 2) - mask).clamp(0, 1), flat(images, INK), images)


def wallpaper(images: Tensor) -> Tensor:
    """The scene four times, half as large."""
    return F.avg_pool2d(images, 2).repeat(1, 1, 2, 2)


def shadowed(images: Tensor) -> Tensor:
    """A soft shadow to the lower right of each drawing."""
    mask = drawn(images)
    cast = F.avg_pool2d(mask, 5, stride=1, padding=2).roll((5, 5), (2, 3)) * (1 - mask)
    return mixed(0.45 * cast, flat(images, (0.1, 0.1, 0.2)), images)


def edges(images: Tensor) -> Tensor:
    """[B,1,96,96]: where the picture changes."""
    mask = F.pad(images, (1, 1, 1, 1), mode="replicate")
    across = mask[..., 1:-1, 2:] - mask[..., 1:-1, :-2]
    down = mask[..., 2:, 1:-1] - mask[..., :-2, 1:-1]
    return ((across.abs() + down.abs()).amax(1, keepdim=True) * 1.6).clamp(0, 1)


def blueprint(images: Tensor) -> Tensor:
    """White lines on blue."""
    return mixed(edges(images), flat(images, (0.97, 0.97, 1)), flat(images, (0.17, 0.38, 0.75)))


def neon(images: Tensor) -> Tensor:
    """Bright lines on black, in the drawing's colours."""
    bright = images / images.amax(1, keepdim=True).clamp_min(0.15)
    return mixed(edges(images), bright, flat(images, (0.06, 0.06, 0.1)))


def night(images: Tensor) -> Tensor:
    """The drawings on a dark blue ground."""
    return mixed(drawn(images), images, flat(images, (0.12, 0.14, 0.3)))


def framed(images: Tensor) -> Tensor:
    """A purple frame along the rim."""
    rim = torch.ones(SIZE, SIZE)
    rim[5:-5, 5:-5] = 0
    return mixed(rim[None, None] * (1 - drawn(images)), flat(images, FRAME), images)


STYLES = {
    "flat": Style("A", "flat"),
    "noto": Style("C", "noto"),
    "line": Style("D", "line"),
    "pixels": Style("E", None, pixels),
    "sepia": Style("I", None, toned((0.25, 0.14, 0.05), (0.98, 0.9, 0.74))),
    "outline": Style("L", None, outlined),
    "wallpaper": Style("O", None, wallpaper),
    "shadow": Style("P", None, shadowed),
    "blueprint": Style("R", None, blueprint),
    "neon": Style("S", None, neon),
    "night": Style("T", None, night),
    "frame": Style("N", None, framed),
}
