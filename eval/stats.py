"""What the scores of images say: means with standard errors, paired differences, averages. Pure.

An image is a row of `suite.Judged`: index, prompt, metadata, value (NaN = invalid), parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flowalign.eval import bootstrap
from flowalign.eval.bootstrap import Array, Labels
from flowalign.types import EvalRow

AVERAGE, FIDELITY = "average", "fidelity"  # columns beside the benchmarks
FIELDS = ("index", "copy", "prompt", "metadata", "reason")  # of an image; the rest are its scores
GROUPS = 20  # of images, left out in turn for the error of a distance

Images = Sequence[Mapping[str, Any]]


class Known(Protocol):
    """What is to be known of a benchmark here: its name, and which part is its number."""

    @property
    def name(self) -> str: ...

    @property
    def headline(self) -> str | None: ...


Metric = Callable[[Tensor, Tensor], float]
"""features [N,D], reference [M,D] -> how far apart the two sets are."""


def rows_of(benchmark: Known, images: Images) -> list[EvalRow]:
    """Mean, standard error, interval and count of the value and of every part, over the valid
    images; errors and intervals are over prompts, whose images resemble each other.

    Where the reward has a headline and every prompt a tag, as GenEval's have, "overall" follows,
    the official unweighted mean of the tags' means (its error from theirs), and one row a tag.
    A tag without a valid image is left out of it.
    """
    parts = {key for image in images for key in image if key not in (*FIELDS, "value")}
    parts |= {benchmark.headline} if benchmark.headline else set()
    rows = [_row(benchmark.name, "reward", images, "value")]
    rows += [_row(benchmark.name, part, images, part) for part in sorted(parts)]
    if _tagged(benchmark, images):
        rows += _headline_rows(benchmark, images)
    return rows


def from_json(image: Mapping[str, Any]) -> dict[str, Any]:
    """An image as rows have it: a score that JSON could not hold, null there, is NaN again."""
    return {k: math.nan if v is None and k not in FIELDS else v for k, v in image.items()}


def headline_row(benchmark: Known, rows: Sequence[EvalRow]) -> EvalRow:
    """The number that a benchmark is known by, among its `rows_of` (others' may be there, too)."""
    mine = {row.metric: row for row in rows if row.benchmark == benchmark.name}
    return mine.get("overall") or mine[benchmark.headline or "reward"]


def tag_rows(benchmark: Known, images: Images) -> list[EvalRow]:
    """The headline tag by tag; empty where it has no tags."""
    return _headline_rows(benchmark, images)[1:]


def difference(benchmark: Known, first: Images, second: Images) -> EvalRow:
    """The headline of the second model minus the first's, paired: same prompts, same noise.

    n counts the prompts whose images are valid in both; the standard error is that of the
    differences, so it is smaller than the two models' own errors suggest.
    """
    return _headline_rows(benchmark, _pairs(benchmark, first, second))[0]


def chance(benchmark: Known, first: Images, second: Images) -> float:
    """Two-sided p of `difference`, by flipping the signs of prompts (`bootstrap.sign_flip`)."""
    sums, counts, strata = _prompts(_pairs(benchmark, first, second), benchmark.headline or "value")
    tagged = _tagged(benchmark, second)
    return bootstrap.sign_flip(sums, counts, strata if tagged else np.zeros_like(strata))


def _pairs(benchmark: Known, first: Images, second: Images) -> list[dict[str, Any]]:
    """The second's images with the headline's gain over the first's in its place."""
    part = benchmark.headline or "value"
    a, b = _values(first, part), _values(second, part)
    return [{**row, part: after - before} for row, before, after in zip(second, a, b, strict=True)]


def average(rows: Sequence[EvalRow]) -> EvalRow:
    """The unweighted mean of one row a benchmark: of headlines, or of their differences.

    Its error takes the benchmarks as independent, as their prompts differ. It is NaN as soon as
    one of them is: a mean over fewer benchmarks would not compare with the others'.
    """
    mean = sum(row.mean for row in rows) / len(rows)
    error = math.sqrt(sum(row.stderr**2 for row in rows)) / len(rows)
    total = sum(row.n if row.total is None else row.total for row in rows)
    return _normal(AVERAGE, "mean", mean, error, sum(row.n for row in rows), total)


def lost(benchmark: Known, images: Images, share: float) -> str:
    """Why these images are no result: more than this share of them lacks the benchmark's number,
    or all of a tag do; "" if they are one."""
    part = benchmark.headline or "value"
    known = [math.isfinite(value) for value in _values(images, part)]
    count, reasons = known.count(False), dict[str, None]()
    gone: set[str] = set()
    if _tagged(benchmark, images):
        tags = [image["metadata"]["tag"] for image in images]
        gone = set(tags) - {tag for tag, its in zip(tags, known, strict=True) if its}
    if not gone and (not count or count < len(images) and count <= share * len(images)):
        return ""
    for image, its in zip(images, known, strict=True):
        reasons |= {} if its else {image.get("reason") or "no reason is known": None}
    which = f", all of {', '.join(map(repr, sorted(gone)))} among them" if gone else ""
    return (
        f"{benchmark.name}: {count} of {len(images)} images have no score{which} "
        f"(max_invalid_share = {share:g}): {'; '.join(list(reasons)[:3])}"
    )


@dataclass(frozen=True)
class Distance:
    """How far n images (of `total`) are from a reference, and how far without each of G groups of
    them [G]."""

    value: float
    without: Tensor
    n: int
    total: int | None = None

    @property
    def row(self) -> EvalRow:
        """The distance and its error over draws of the images (the reference is taken as given)."""
        error = _jackknife(self.without)
        return _normal(FIDELITY, "frechet", self.value, error, self.n, self.total)

    def minus(self, other: Distance) -> EvalRow:
        """The paired difference: both leave out the images of the same prompts and noise."""
        gap = self.without - other.without
        n, error = min(self.n, other.n), _jackknife(gap)
        return _normal(FIDELITY, "frechet", self.value - other.value, error, n, self.total)


def distance(features: Tensor, reference: Tensor, metric: Metric) -> Distance:
    """The metric of features [N,D] to a reference [M,D], and without every GROUPS-th image.

    An image without finite features is left out; where too few remain for a regular covariance,
    the distance is NaN.
    """
    place = torch.arange(len(features)) % GROUPS  # each group has images of every benchmark
    known, total = features.isfinite().all(1), len(features)
    features, place = features[known], place[known]
    if len(features) - int(place.bincount(minlength=1).max()) <= features.shape[1]:
        return Distance(math.nan, torch.full((GROUPS,), math.nan), len(features), total)
    without = torch.tensor([metric(features[place != g], reference) for g in range(GROUPS)])
    return Distance(metric(features, reference), without.double(), len(features), total)


def enough(width: int) -> int:
    """The least number of images whose covariance of `width` features is regular, even without
    one of GROUPS."""
    return max(GROUPS, math.ceil((width + 1) * GROUPS / (GROUPS - 1)) + 1)


def _jackknife(without: Tensor) -> float:
    """The delete-a-group jackknife error: sqrt((G-1)/G * sum of squared deviations)."""
    return float(without.std(correction=0)) * math.sqrt(len(without) - 1)


def _tagged(benchmark: Known, images: Images) -> bool:
    has_tags = bool(images) and all("tag" in image["metadata"] for image in images)
    return benchmark.headline is not None and has_tags


def _headline_rows(benchmark: Known, images: Images) -> list[EvalRow]:
    """The benchmark's number, then what it is the mean of: the tags, if there are any."""
    part = benchmark.headline or "value"
    if not _tagged(benchmark, images):
        return [_row(benchmark.name, benchmark.headline or "reward", images, part)]
    tags = sorted({image["metadata"]["tag"] for image in images})
    rows = []
    for tag in tags:
        mine = [image for image in images if image["metadata"]["tag"] == tag]
        rows.append(_row(benchmark.name, tag, mine, part))
    known = [row for row in rows if row.n]
    mean = sum(row.mean for row in known) / len(known) if known else math.nan
    error = math.sqrt(sum(row.stderr**2 for row in known)) / len(known) if known else math.nan
    low, high = bootstrap.interval(*_prompts(images, part))
    n = sum(row.n for row in known)
    return [EvalRow(benchmark.name, "overall", mean, error, n, low, high, len(images)), *rows]


def _normal(
    benchmark: str, metric: str, mean: float, error: float, n: int, total: int | None
) -> EvalRow:
    """A row whose interval takes the error as that of a normal distribution."""
    reach = NormalDist().inv_cdf((1 + bootstrap.CONFIDENCE) / 2) * error
    return EvalRow(benchmark, metric, mean, error, n, mean - reach, mean + reach, total)


def _values(images: Images, part: str) -> list[float]:
    return [image.get(part, math.nan) for image in images]


def _prompts(images: Images, part: str) -> tuple[Array, Array, Labels]:
    """Of each prompt the sum and the count of a part's valid values, and the tag: [P] each."""
    values = np.array(_values(images, part), np.float64)
    known = np.isfinite(values)
    _, place = np.unique([image["index"] for image in images], return_inverse=True)
    tags = [str(image["metadata"].get("tag", "")) for image in images]
    labels = np.zeros(place.max(initial=-1) + 1, np.int64)
    labels[place] = np.unique(tags, return_inverse=True)[1]
    sums, counts = np.zeros(len(labels)), np.zeros(len(labels))
    np.add.at(sums, place, np.where(known, values, 0.0))
    np.add.at(counts, place, known.astype(np.float64))
    return sums, counts, labels


def _row(benchmark: str, metric: str, images: Images, part: str) -> EvalRow:
    """Mean, error and interval over prompts; the error is the cluster-robust one of a ratio,
    which is the usual standard error where every prompt has one image."""
    sums, counts, _ = _prompts(images, part)
    n, prompts, alike = counts.sum(), int((counts > 0).sum()), np.zeros(len(counts), np.int64)
    if not n:
        return EvalRow(benchmark, metric, math.nan, math.nan, 0, total=len(images))
    mean, error = float(sums.sum() / n), math.nan
    if prompts > 1:
        spread = ((sums - mean * counts) ** 2).sum() * prompts / (prompts - 1)
        error = math.sqrt(spread) / float(n)
    low, high = bootstrap.interval(sums, counts, alike)
    return EvalRow(benchmark, metric, mean, error, int(n), low, high, len(images))
