"""Fidelity: the Fréchet distance between features of a model's images and of reference images.

The estimate is biased upwards, more so with fewer images, so compare only numbers of equal counts
and features. Use unit vectors, as `flowalign.rewards.clip.Clip.image_features` gives them. On the
tiny world they separate the base model's images from decoded scenes by 25 standard errors,
malformed scenes by 21, blurred ones by 71 (384 images against 1152 scenes); vectors before
normalisation by 28, 21 and 69. Decoding alone moves the distance by less than one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from PIL import ImageOps
from torch import Tensor

from flowalign.backbone.tiny.scenes import rendered
from flowalign.config import ConfigError, EvalStage
from flowalign.eval.stats import FIDELITY, student_t
from flowalign.eval.suite import ImageSet, JudgedImages
from flowalign.rewards.clip import image_encoder
from flowalign.system.images import image_files, read_image, stacked
from flowalign.types import EvalRow, Problem

BATCH = 64  # reference images per forward pass of the features
GROUPS = 20  # of prompts, each left out once for the jackknife error of a distance
SCENES = 4  # tiny reference scenes per prompt: they are cheap, and few of them bias the distance

Features = Callable[[Tensor], Tensor]  # images [B,3,H,W] in [0,1] -> [B,D]


def frechet(features: ArrayLike, reference: ArrayLike) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of the Gaussians of [N,D] and [M,D], in float64.

    As in FID (arXiv 1706.08500). The trace of the root is taken from the eigenvalues of
    C2^(1/2) C1 C2^(1/2), which C1 C2 has, too. All features are finite, and N, M > D, because a
    covariance of fewer is singular.
    """
    a, b = np.asarray(features, np.float64), np.asarray(reference, np.float64)
    c1, c2 = (np.atleast_2d(np.cov(x.T)) for x in (a, b))
    values, vectors = np.linalg.eigh(c2)
    half = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    eigenvalues = np.linalg.eigvalsh(half @ c1 @ half)
    root = np.sqrt(eigenvalues.clip(0)).sum()  # rounding may leave -1e-18
    shift = ((a.mean(0) - b.mean(0)) ** 2).sum()
    return float(shift + np.trace(c1) + np.trace(c2) - 2 * root)


@dataclass(frozen=True)
class Distance:
    value: float
    without: Tensor  # [G]: value without each of G groups of prompts
    n: int  # valid images
    total: int | None = None  # images

    @property
    def row(self) -> EvalRow:
        """The distance and its error over draws of the images; the reference is taken as fixed."""
        freedom = len(self.without) - 1
        # delete-a-group jackknife: sqrt((G-1)/G * sum of squared deviations)
        error = float(self.without.std(correction=0)) * math.sqrt(freedom)
        margin = student_t(freedom) * error
        low = self.value - margin
        high = self.value + margin
        return EvalRow(FIDELITY, "frechet", self.value, error, self.n, low, high, self.total)

    def minus(self, other: Distance) -> Distance:
        """The paired difference: both leave out the images of the same prompts and noise."""
        without = self.without - other.without
        return Distance(self.value - other.value, without, min(self.n, other.n), self.total)


def distance(features: Tensor, prompts: Sequence[str], reference: Tensor) -> Distance:
    """The distance of features [N,D] to a reference [M,D], over all images and without each group
    of prompts.

    Images without finite features are left out. The value is NaN if too few remain for a regular
    covariance. Only the error is NaN if too few remain without a group, or if there is one prompt.
    """
    group = _groups(prompts)
    valid = features.isfinite().all(1)
    total = len(features)
    features, group, count = features[valid], group[valid], int(group.max()) + 1
    unknown = torch.full((count,), math.nan)
    width = features.shape[1]
    if len(features) <= width:
        return Distance(math.nan, unknown, len(features), total)
    value = frechet(features, reference)
    if len(features) - int(group.bincount().max()) <= width:
        return Distance(value, unknown, len(features), total)
    without = torch.tensor([frechet(features[group != g], reference) for g in range(count)])
    return Distance(value, without.double(), len(features), total)


def _groups(prompts: Sequence[str]) -> Tensor:
    """The group [N] of each image: at most GROUPS groups of about equal size. All images of a
    prompt are in one group; otherwise leaving a group out would not leave its prompts out."""
    counts = Counter(prompts)
    sizes = [0] * min(GROUPS, len(counts))
    group: dict[str, int] = {}
    for prompt, count in counts.items():  # the next prompt joins the smallest group
        group[prompt] = sizes.index(min(sizes))
        sizes[group[prompt]] += count
    return torch.tensor([group[prompt] for prompt in prompts])


@dataclass(frozen=True)
class Reference:
    """A feature extractor, and the features [M,D] of the reference images."""

    extract: Features
    features: Tensor

    def distance(self, judged: Iterable[JudgedImages]) -> Distance:
        features = []
        prompts = []
        for images in judged:
            if images.features is not None:
                features.append(images.features)
                prompts += [score.image.prompt for score in images.scores]
        return distance(torch.cat(features), prompts, self.features)


def enough(width: int) -> int:
    """The least number of images for `width` features. A regular covariance needs width + 1, even
    when one of GROUPS is left out."""
    return max(GROUPS, math.ceil((width + 1) * GROUPS / (GROUPS - 1)) + 1)


def load_reference(
    config: EvalStage, sets: Sequence[ImageSet], device: torch.device
) -> Reference | None:
    """The config's reference; None without `fidelity`. Raises ConfigError if there are too few
    images, or if features or reference cannot be loaded."""
    if config.fidelity is None:
        return None
    source, name = config.fidelity.reference, config.fidelity.features
    try:
        extract: Features = image_encoder(name, device)[1]
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError([Problem("fidelity.features", str(error))]) from error
    try:
        if source == "tiny":
            metadata = [row for images in sets for row in images.prompts.metadata]
            batches = rendered(metadata, config.sampling.seed, SCENES).split(BATCH)
        else:
            batches = _pictures(Path(source), *config.model.size)
        features = torch.cat([extract(batch.to(device)).float().cpu() for batch in batches])
    except ValueError as error:
        raise ConfigError([Problem("fidelity.reference", str(error))]) from error
    width = features.shape[1]
    sampled = sum(len(images.prompts) * images.copies for images in sets)
    counts = {"fidelity.reference": len(features), "benchmarks": sampled}
    text = f"images are too few for a distance between {width} features. Use at least"
    text += f" {enough(width)}, better ten times as many, or null."
    if few := {key: count for key, count in counts.items() if count < enough(width)}:
        raise ConfigError([Problem(key, f"{count} {text}") for key, count in few.items()])
    return Reference(extract, features)


def _pictures(folder: Path, height: int, width: int) -> Iterator[Tensor]:
    """Batches of a folder's images [B,3,height,width], centre-cropped and resized."""
    files = image_files(folder)
    for start in range(0, len(files), BATCH):
        pictures = map(read_image, files[start : start + BATCH])
        yield stacked([ImageOps.fit(picture, (width, height)) for picture in pictures])
