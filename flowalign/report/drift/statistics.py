"""Statistics of images, without a reward model. Pure.

They detect common ways to hack a reward: OCR rewards that blank the scene (dark pixels, entropy of
the colours), artefacts in the grid of the patches, and groups whose images become identical.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # Rec. 601
DARK = 0.25  # luma below which a pixel is dark
VIVID = 0.75  # difference of the largest and the smallest channel above which it is saturated
EDGE_STEP = 0.1  # luma difference of neighbours, to the right and below, that is an edge
COLOUR_LEVELS = 8  # a channel's levels in the colour histogram


def image_statistics(images: Tensor, period: int, prompts: Sequence[int]) -> dict[str, Tensor]:
    """{statistic: [B] in float64 on the CPU} of images [B,3,H,W] in [0,1]; the names are those of
    `compare.SIGMAS`. period: pixels of a patch. prompts: the group of each image. NaN for images
    that are not finite."""
    pixels = images.detach().float().cpu()
    finite = pixels.isfinite().flatten(1).all(1)
    images = pixels.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
    light = (images * torch.tensor(LUMA)[:, None, None]).sum(1)  # [B,H,W]
    across, down = ((light.diff(dim=dim).abs() > EDGE_STEP).float().mean((1, 2)) for dim in (2, 1))
    columns = {
        "brightness": light.mean((1, 2)),
        "dark": (light < DARK).float().mean((1, 2)),
        "saturated": (images.amax(1) - images.amin(1) > VIVID).float().mean((1, 2)),
        "edges": (across + down) / 2,
        "entropy": entropy(images),
        "grid": edge_grid(light, period),
    }
    values = {k: column.double().where(finite, torch.nan) for k, column in columns.items()}
    return values | {"diversity": diversity(pixels, prompts)}


def entropy(images: Tensor) -> Tensor:
    """Shannon entropy [B] in bits of the joint histogram of colours, LEVELS a channel."""
    level = (images * COLOUR_LEVELS).long().clamp(0, COLOUR_LEVELS - 1)
    color = (level[:, 0] * COLOUR_LEVELS + level[:, 1]) * COLOUR_LEVELS + level[:, 2]
    counts = torch.stack(
        [torch.bincount(row, minlength=COLOUR_LEVELS**3) for row in color.flatten(1)]
    )
    share = counts.double() / counts.sum(1, keepdim=True)
    return (share * -share.clamp(min=1e-12).log2()).sum(1)


def edge_grid(light: Tensor, period: int) -> Tensor:
    """The share [B] of the power of a luma [B,H,W] (without its mean) that repeats with the
    patches: at frequencies that are multiples of 1 / period along both axes. 0 for a plain image, 1
    for one tile in all patches."""
    height, width = (side // period * period for side in light.shape[1:])
    power = torch.fft.fft2(light.double()[:, :height, :width]).abs().square()
    power[:, 0, 0] = 0
    lattice = power[:, :: height // period, :: width // period].sum((1, 2))
    total = power.sum((1, 2))
    share = lattice / total.clamp(min=1e-12)
    return torch.where(total > 1e-9 * (height * width) ** 2, share, 0.0)


def diversity(vectors: Tensor, groups: Sequence[int]) -> Tensor:
    """The mean distance [B] of each vector to the others of its group, divided by the square root
    of their length: for pixels, the root mean square difference. vectors [B,...]; groups: the group
    of each of the B images. NaN in a group of one."""
    distances = torch.full((len(vectors),), torch.nan, dtype=torch.float64)
    flat = vectors.detach().cpu().double().flatten(1)
    group_of = torch.tensor(list(groups))
    for group in group_of.unique():
        rows = (group_of == group).nonzero().flatten()
        if len(rows) > 1:
            between = (flat[rows, None] - flat[None, rows]).square().mean(2).sqrt()
            distances[rows] = between.sum(1) / (len(rows) - 1)
    return distances
