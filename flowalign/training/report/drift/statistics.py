"""What images look like, in a few numbers that no reward model takes part in. Pure.

They see what rewards of the field are hacked with: OCR rewards that blank the scene (dark pixels,
entropy of the colours), artefacts in the grid of the patches, a group whose images become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # Rec. 601
DARK = 0.25  # luma below which a pixel is dark
VIVID = 0.75  # difference of the largest and the smallest channel above which it is saturated
STEP = 0.1  # luma difference of neighbours, to the right and below, that is an edge
LEVELS = 8  # a channel's levels in the colour histogram
SIDE = 64  # pixels to which images are reduced for `objects` and `text`
REGION = 0.3  # distance from the median colour of what stands out, in the channel farthest off
SMALLEST = 1 / 256  # share of the image that a region has at least
STROKE = 0.25  # luma range of a cell of text


@dataclass(frozen=True)
class ImageStatistics:
    """What is measured of images. period: pixels of a patch. text: the tasks that an OCR engine
    scores."""

    period: int
    text: frozenset[str] = frozenset()

    @staticmethod
    def of(family: Any, rewards: Mapping[str, Any]) -> ImageStatistics:
        text = frozenset(name for name, reward in rewards.items() if hasattr(reward, "engine"))
        return ImageStatistics(family.factor * family.patch, text)

    def measure(
        self,
        images: Tensor,
        task: str,
        metadata: Sequence[Mapping[str, Any]],
        prompts: Sequence[int],
    ) -> dict[str, Tensor]:
        """{statistic: [B] in float64 on the CPU} of images [B,3,H,W] in [0,1] of a task, as
        `compare.SIGMAS` names them. prompts: the group of each. NaN for an image that is not
        finite, and where a statistic says nothing of an image."""
        given = images.detach().float().cpu()
        finite = given.isfinite().flatten(1).all(1)
        images = given.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
        light = (images * torch.tensor(LUMA)[:, None, None]).sum(1)  # [B,H,W]
        across, down = ((light.diff(dim=dim).abs() > STEP).float().mean((1, 2)) for dim in (2, 1))
        small = _reduced(images)
        columns = {
            "brightness": light.mean((1, 2)),
            "dark": (light < DARK).float().mean((1, 2)),
            "saturated": (images.amax(1) - images.amin(1) > VIVID).float().mean((1, 2)),
            "edges": (across + down) / 2,
            "entropy": entropy(images),
            "grid": grid(light, self.period),
            "objects": torch.tensor([objects(image) for image in small]),
        }
        if task in self.text:
            columns["text"] = torch.tensor([text(image) for image in small], dtype=torch.float64)
        values = {k: column.double().where(finite, torch.nan) for k, column in columns.items()}
        wanted = torch.tensor([asked(row) for row in metadata])
        values["surplus"] = (values["objects"] - wanted).clamp(min=0)  # NaN stays
        values["objects"] = values["objects"].where(wanted.isnan(), torch.nan)
        return values | {"diversity": diversity(given, prompts)}


def entropy(images: Tensor) -> Tensor:
    """Shannon entropy [B] in bits of the joint histogram of colours, LEVELS a channel."""
    level = (images * LEVELS).long().clamp(0, LEVELS - 1)
    color = (level[:, 0] * LEVELS + level[:, 1]) * LEVELS + level[:, 2]
    counts = torch.stack([torch.bincount(row, minlength=LEVELS**3) for row in color.flatten(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    return (share * -share.clamp(min=1e-12).log2()).sum(1)


def grid(light: Tensor, period: int) -> Tensor:
    """Share [B] of the power of a luma [B,H,W], without its mean, that repeats with the patches: at
    frequencies that are multiples of 1 / period along both axes, the VAE's factor among them. 0 for
    a plain image, 1 for one tile in all patches."""
    height, width = (side // period * period for side in light.shape[1:])
    power = torch.fft.fft2(light.double()[:, :height, :width]).abs().square()
    power[:, 0, 0] = 0
    lattice = power[:, :: height // period, :: width // period].sum((1, 2))
    total = power.sum((1, 2))
    share = lattice / total.clamp(min=1e-12)
    return torch.where(total > 1e-9 * (height * width) ** 2, share, 0.0)


def objects(image: np.ndarray) -> int:
    """Number of regions that stand out from the median colour of an image [h,w,3]: connected, of
    one rough colour, and at least SMALLEST of the image."""
    mask = np.abs(image - np.median(image.reshape(-1, 3), axis=0)).max(-1) > REGION
    # colours are told apart by which channels are above the middle
    kind = ((image > 0.5) @ np.array([1, 2, 4])).astype(np.int32)
    count = 0
    for value in np.unique(kind[mask]):
        part = (mask & (kind == value)).astype(np.uint8)
        _, _, stats, _ = cv2.connectedComponentsWithStats(part, connectivity=4)
        count += int((stats[1:, cv2.CC_STAT_AREA] >= SMALLEST * mask.size).sum())
    return count


def text(image: np.ndarray) -> float:
    """Share of an image [h,w,3] that looks like text, a cheap stand-in for the boxes of an OCR
    engine: cells of 8x8 pixels that hold both light and dark and cross their mean at least twice in
    half of their rows."""
    light = image @ np.array(LUMA, np.float32)
    rows, columns = light.shape[0] // 8 * 8, light.shape[1] // 8 * 8
    cells = light[:rows, :columns].reshape(rows // 8, 8, columns // 8, 8).swapaxes(1, 2)
    span = cells.max((2, 3)) - cells.min((2, 3))
    above = cells > cells.mean((2, 3), keepdims=True)
    crossings = (above[..., 1:] != above[..., :-1]).sum(-1)
    return float(((span > STROKE) & ((crossings >= 2).mean(-1) >= 0.5)).mean())


def diversity(vectors: Tensor, groups: Sequence[int]) -> Tensor:
    """[B]: mean distance of a vector to the others of its group, over the root of their length: of
    pixels, the root mean square difference. vectors [B,...]; groups: of the B images. NaN in a
    group of one."""
    distances = torch.full((len(vectors),), torch.nan, dtype=torch.float64)
    flat = vectors.detach().cpu().double().flatten(1)
    group_of = torch.tensor(list(groups))
    for group in group_of.unique():
        rows = (group_of == group).nonzero().flatten()
        if len(rows) > 1:
            between = (flat[rows, None] - flat[None, rows]).square().mean(2).sqrt()
            distances[rows] = between.sum(1) / (len(rows) - 1)
    return distances


def asked(metadata: Mapping[str, Any]) -> float:
    """How many objects GenEval's metadata asks for; NaN for other prompts."""
    clauses = metadata.get("include")
    if not isinstance(clauses, list) or not clauses:
        return torch.nan
    counts = [clause.get("count", 1) for clause in clauses if isinstance(clause, Mapping)]
    return float(sum(count for count in counts if isinstance(count, (int, float))))


def _reduced(images: Tensor) -> list[np.ndarray]:
    """float32 [h,w,3] each, the longer side at most SIDE."""
    pictures = [np.ascontiguousarray(image.permute(1, 2, 0).numpy()) for image in images]
    height, width = pictures[0].shape[:2]
    scale = SIDE / max(height, width)
    if scale >= 1:
        return pictures
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return [cv2.resize(picture, size, interpolation=cv2.INTER_AREA) for picture in pictures]
