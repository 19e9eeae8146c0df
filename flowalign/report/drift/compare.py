"""How far a model's images have moved from the base's, statistic by statistic. Pure.

The difference of a statistic is taken prompt by prompt, on the same noise, and averaged. Training
is meant to change images, and paired differences detect even negligible changes. So the unit is not
the error of the mean but how far honest training moves the statistic: see SIGMAS. The error counts
too: the alarm uses the end of the interval that is nearer to 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowalign.report.drift.statistics import image_statistics
from flowalign.report.pictures import webp
from flowalign.system.images import pixels_of

ALARM_CONFIDENCE = 0.90  # of the intervals: 95 % on the side that the alarm uses
SHOWN_PROMPTS = 8  # prompts of a check, with their images


class Sigma(NamedTuple):
    """The unit of a statistic's drift: `share` of the standard deviation of the base's images, but
    at least `least`, because the deviation is 0 where the base never varies. meaning: the statistic
    in words."""

    share: float
    least: float
    meaning: str

    def size(self, base: Tensor) -> float:
        """One sigma, from the values of the base's images; NaN is ignored."""
        finite = base[base.isfinite()]
        deviation = float(finite.std(correction=1)) if len(finite) > 1 else 0.0
        return max(self.share * deviation, self.least)


# share: half of the largest drift of honest runs, in standard deviations of the base's images, so
# that an alarm at 3 sigma is 1.5 times this drift. Measured on the three NFT teachers of the tiny
# world, seed 0 (`image_drift/` in their metrics.jsonl). least: 1 % for shares of pixels, otherwise
# the smallest visible change.
SIGMAS: Mapping[str, Sigma] = {
    "brightness": Sigma(0.8, 0.01, "mean luma"),
    "dark": Sigma(0.15, 0.01, "share of dark pixels"),
    "saturated": Sigma(0.55, 0.01, "share of pure, loud colours"),
    "edges": Sigma(0.45, 0.005, "share of neighbours with a step"),
    "entropy": Sigma(1.35, 0.1, "bits of the histogram of colours"),
    "grid": Sigma(0.4, 0.003, "share of the luma's power at the grid of the patches"),
    "diversity": Sigma(2.1, 0.01, "distance of the images of a prompt, in pixels"),
}


@dataclass(frozen=True)
class Drift:
    """The drift of one statistic: its means over n prompts for base and model, their difference in
    sigmas, and the interval of the difference. NaN and infinity if there are too few prompts."""

    name: str
    base: float
    model: float
    sigmas: float
    low: float
    high: float
    n: int

    @property
    def unit(self) -> Sigma:
        """The unit of the statistic. A task's name may precede the statistic's."""
        return SIGMAS[self.name.rpartition("/")[2]]

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def certain(self) -> float:
        """The certain size of the drift: the interval's end that is nearer to 0; 0 if the interval
        contains 0."""
        return max(self.low, -self.high, 0.0) if self.has_interval else 0.0

    def beyond(self, limit: float | None) -> bool:
        """Whether the drift is certainly larger than `limit` sigmas; None = no limit."""
        return limit is not None and self.certain > limit

    def __str__(self) -> str:
        return (
            f"{self.name} by {self.sigmas:+.1f} sigma (90 % {self.low:+.1f} to {self.high:+.1f}), "
            f"from {self.base:.3g} to {self.model:.3g}"
        )


@dataclass(frozen=True)
class Check:
    """The result of a check. rows: the first images of base and model for the prompts with the
    largest drift: prompt, task, drift in sigmas, base and model (WebP in base64)."""

    drifts: Sequence[Drift]
    rows: Sequence[Mapping[str, Any]]

    @property
    def by_size(self) -> list[Drift]:
        return sorted(self.drifts, key=lambda drift: -abs(drift.sigmas))

    @staticmethod
    def from_json(check: Mapping[str, Any]) -> Check:
        """The check that a JSON file holds; null stands for NaN and infinity."""
        rows: list[dict[str, Any]] = [
            {k: math.nan if v is None else v for k, v in row.items()} for row in check["drifts"]
        ]
        return Check([Drift(**row) for row in rows], check["rows"])


def statistic_drift(name: str, base: Tensor, model: Tensor, prompts: Sequence[int]) -> Drift:
    """Drift of one statistic, from its values [B] for the same prompts and noise.

    prompts: the prompt of each image; a prompt's images are averaged first, because they resemble
    each other. NaN values are left out. The interval is over prompts, normal with the variance of
    Student's t, which is a little wider than Student's own: 3 % for 8 prompts, 21 % for 4.
    """
    rows = (base.isfinite() & model.isfinite()).nonzero().flatten().tolist()
    rows_of: dict[int, list[int]] = {}
    for row in rows:
        rows_of.setdefault(prompts[row], []).append(row)
    n = len(rows_of)
    if not n:
        return Drift(name, math.nan, math.nan, math.nan, -math.inf, math.inf, 0)
    sigma = SIGMAS[name.rpartition("/")[2]].size(base[rows])
    gaps = torch.stack([(model - base)[group].mean() for group in rows_of.values()]) / sigma
    mean = float(gaps.mean())
    half = math.inf
    if n > 3:  # t of n - 1 degrees of freedom has the variance (n - 1) / (n - 3)
        reach = NormalDist().inv_cdf((1 + ALARM_CONFIDENCE) / 2) * math.sqrt((n - 1) / (n - 3))
        half = reach * float(gaps.std(correction=1)) / math.sqrt(n)
    means = float(base[rows].mean()), float(model[rows].mean())
    return Drift(name, *means, mean, mean - half, mean + half, n)


class Pair(NamedTuple):
    """Images of base and model for the same prompt and noise, as PNG files. number: the prompt's
    number in its task."""

    base: bytes
    model: bytes
    task: str
    number: int
    prompt: str


def check_drift(pairs: Sequence[Pair], period: int) -> Check:
    """The drift of every statistic that has a value, separately for each task. With several tasks a
    statistic is called TASK/STATISTIC. period: pixels of a patch."""
    drifts: list[Drift] = []
    worst: dict[tuple[str, int], tuple[float, Pair]] = {}  # drift and first images of each prompt
    tasks = sorted({pair.task for pair in pairs})
    for task in tasks:
        of_task = [pair for pair in pairs if pair.task == task]
        numbers = [pair.number for pair in of_task]
        base, model = (
            image_statistics(torch.stack(list(map(pixels_of, files))), period, numbers)
            for files in zip(*(pair[:2] for pair in of_task), strict=True)
        )
        for name in base:
            label = f"{task}/{name}" if len(tasks) > 1 else name
            drifts.append(statistic_drift(label, base[name], model[name], numbers))
            sizes = (model[name] - base[name]).abs() / SIGMAS[name].size(base[name])
            for pair, sigmas in zip(of_task, sizes.nan_to_num(0.0).tolist(), strict=True):
                most, first = worst.get((task, pair.number), (0.0, pair))
                worst[task, pair.number] = max(most, sigmas), first
    rows = []
    for sigmas, pair in sorted(worst.values(), key=lambda entry: -entry[0])[:SHOWN_PROMPTS]:
        base, model = (webp(pixels_of(file)) for file in pair[:2])
        about = {"prompt": pair.prompt, "task": pair.task, "sigmas": sigmas}
        rows.append({**about, "base": base, "model": model})
    return Check([drift for drift in drifts if drift.n], rows)
