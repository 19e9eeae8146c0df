"""What the scores of images say: means with standard errors, paired differences, averages. Pure.

An image is a row of `suite.Judged`: index, prompt, metadata, value (NaN = invalid), parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowalign.types import EvalRow

if TYPE_CHECKING:
    from flowalign.eval.suite import Benchmark

AVERAGE, FIDELITY = "average", "fidelity"  # columns beside the benchmarks
FIELDS = ("index", "copy", "prompt", "metadata", "reason")  # of an image; the rest are its scores
GROUPS = 20  # of images, left out in turn for the error of a distance

Images = Sequence[Mapping[str, Any]]
Metric = Callable[[Tensor, Tensor], float]
"""features [N,D], reference [M,D] -> how far apart the two sets are."""


def rows_of(benchmark: Benchmark, images: Images) -> list[EvalRow]:
    """Mean, standard error and count of the value and of every part, over the valid images.

    Where the reward has a headline and every prompt a tag, as GenEval's have, "overall" follows,
    the official unweighted mean of the tags' means (its error from theirs), and one row a tag.
    A tag without a valid image is left out of it.
    """
    parts = {key for image in images for key in image if key not in (*FIELDS, "value")}
    parts |= {benchmark.headline} if benchmark.headline else set()
    rows = [_row(benchmark.name, "reward", _values(images, "value"))]
    rows += [_row(benchmark.name, part, _values(images, part)) for part in sorted(parts)]
    if _tagged(benchmark, images):
        rows += _headline_rows(benchmark, images)
    return rows


def headline_row(benchmark: Benchmark, rows: Sequence[EvalRow]) -> EvalRow:
    """The number that a benchmark is known by, among its `rows_of` (others' may be there, too)."""
    mine = {row.metric: row for row in rows if row.benchmark == benchmark.name}
    return mine.get("overall") or mine[benchmark.headline or "reward"]


def tag_rows(benchmark: Benchmark, images: Images) -> list[EvalRow]:
    """The headline tag by tag; empty where it has no tags."""
    return _headline_rows(benchmark, images)[1:]


def difference(benchmark: Benchmark, first: Images, second: Images) -> EvalRow:
    """The headline of the second model minus the first's, paired: same prompts, same noise.

    n counts the prompts whose images are valid in both; the standard error is that of the
    differences, so it is smaller than the two models' own errors suggest.
    """
    part = benchmark.headline or "value"
    a, b = _values(first, part), _values(second, part)
    pairs = [{**row, part: after - before} for row, before, after in zip(second, a, b, strict=True)]
    return _headline_rows(benchmark, pairs)[0]


def average(rows: Sequence[EvalRow]) -> EvalRow:
    """The unweighted mean of one row a benchmark: of headlines, or of their differences.

    Its error takes the benchmarks as independent, as their prompts differ. It is NaN as soon as
    one of them is: a mean over fewer benchmarks would not compare with the others'.
    """
    mean = sum(row.mean for row in rows) / len(rows)
    error = math.sqrt(sum(row.stderr**2 for row in rows)) / len(rows)
    return EvalRow(AVERAGE, "mean", mean, error, sum(row.n for row in rows))


@dataclass(frozen=True)
class Distance:
    """How far n images are from a reference, and how far without each of G groups of them [G]."""

    value: float
    without: Tensor
    n: int

    @property
    def row(self) -> EvalRow:
        """The distance and its error over draws of the images (the reference is taken as given)."""
        return EvalRow(FIDELITY, "frechet", self.value, _jackknife(self.without), self.n)

    def minus(self, other: Distance) -> EvalRow:
        """The paired difference: both leave out the images of the same prompts and noise."""
        gap = self.without - other.without
        n = min(self.n, other.n)
        return EvalRow(FIDELITY, "frechet", self.value - other.value, _jackknife(gap), n)


def distance(features: Tensor, reference: Tensor, metric: Metric) -> Distance:
    """The metric of features [N,D] to a reference [M,D], and without every GROUPS-th image.

    An image without finite features is left out; where too few remain for a regular covariance,
    the distance is NaN.
    """
    place = torch.arange(len(features)) % GROUPS  # each group has images of every benchmark
    known = features.isfinite().all(1)
    features, place = features[known], place[known]
    if len(features) - int(place.bincount(minlength=1).max()) <= features.shape[1]:
        return Distance(math.nan, torch.full((GROUPS,), math.nan), len(features))
    without = [metric(features[place != group], reference) for group in range(GROUPS)]
    return Distance(metric(features, reference), torch.tensor(without).double(), len(features))


def enough(width: int) -> int:
    """The least number of images whose covariance of `width` features is regular, even without
    one of GROUPS."""
    return max(GROUPS, math.ceil((width + 1) * GROUPS / (GROUPS - 1)) + 1)


def _jackknife(without: Tensor) -> float:
    """The delete-a-group jackknife error: sqrt((G-1)/G * sum of squared deviations)."""
    return float(without.std(correction=0)) * math.sqrt(len(without) - 1)


def _tagged(benchmark: Benchmark, images: Images) -> bool:
    has_tags = bool(images) and all("tag" in image["metadata"] for image in images)
    return benchmark.headline is not None and has_tags


def _headline_rows(benchmark: Benchmark, images: Images) -> list[EvalRow]:
    """The benchmark's number, then what it is the mean of: the tags, if there are any."""
    part = benchmark.headline or "value"
    if not _tagged(benchmark, images):
        return [_row(benchmark.name, benchmark.headline or "reward", _values(images, part))]
    tags = sorted({image["metadata"]["tag"] for image in images})
    rows = []
    for tag in tags:
        mine = [image for image in images if image["metadata"]["tag"] == tag]
        rows.append(_row(benchmark.name, tag, _values(mine, part)))
    known = [row for row in rows if row.n]
    mean = sum(row.mean for row in known) / len(known) if known else math.nan
    error = math.sqrt(sum(row.stderr**2 for row in known)) / len(known) if known else math.nan
    return [EvalRow(benchmark.name, "overall", mean, error, sum(row.n for row in known)), *rows]


def _values(images: Images, part: str) -> list[float]:
    return [image.get(part, math.nan) for image in images]


def _row(benchmark: str, metric: str, values: Sequence[float]) -> EvalRow:
    known = torch.tensor([v for v in values if math.isfinite(v)], dtype=torch.float64)
    n = len(known)
    mean = float(known.mean()) if n else math.nan
    error = float(known.std() / math.sqrt(n)) if n > 1 else math.nan
    return EvalRow(benchmark, metric, mean, error, n)
