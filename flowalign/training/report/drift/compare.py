"""How far a model's images have moved from the base's, statistic by statistic. Pure.

The difference of a statistic is taken prompt by prompt, on the same noise, and averaged. Training
is meant to change images, and with paired differences a change of no consequence is soon certain.
So the scale is not the error of the mean, but how far honest training moves the statistic: see
SIGMAS. The error counts too: the alarm asks for the end of the interval that is nearer to 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

CONFIDENCE = 0.90  # of the intervals: 95 % on the side that the alarm asks for


@dataclass(frozen=True)
class Sigma:
    """The unit of a statistic's drift: `share` of the standard deviation of the base's images, and
    at least `least`, since what the base never draws has no deviation."""

    share: float
    least: float

    def size(self, base: Tensor) -> float:
        """Of the values of the base's images, without those that are NaN."""
        finite = base[base.isfinite()]
        deviation = float(finite.std(correction=1)) if len(finite) > 1 else 0.0
        return max(self.share * deviation, self.least)


# share: half of the largest drift of honest runs, in standard deviations of the base's images, so
# that an alarm at 3 sigma is at half as much again. Of GRPO teachers of the tiny world until their
# end: geneval, seeds 0 and 1; ocr and preference, seed 0 (`benchmarks/hacks.py --replay RUN`).
# least: of a share of the pixels 1 %, else what is just visible. surplus is not from there: a
# GenEval teacher draws more objects than it is asked for, and that is what the alarm is for. Its
# 3 sigma are such an object on three images of four, on the average.
SIGMAS: Mapping[str, Sigma] = {
    "brightness": Sigma(0.75, 0.01),
    "dark": Sigma(0.2, 0.01),
    "saturated": Sigma(0.45, 0.01),
    "edges": Sigma(1.0, 0.005),
    "entropy": Sigma(1.0, 0.1),
    "grid": Sigma(0.4, 0.003),
    "objects": Sigma(0.4, 0.25),
    "surplus": Sigma(0.25, 0.25),
    "text": Sigma(0.2, 0.01),
    "diversity": Sigma(0.55, 0.01),
    "feature_diversity": Sigma(0.6, 0.01),
}


@dataclass(frozen=True)
class Drift:
    """Of one statistic: means over n prompts of base and model, their difference in sigmas, and the
    ends of its interval. NaN and infinity where there are too few prompts."""

    name: str
    base: float
    model: float
    sigmas: float
    low: float
    high: float
    n: int

    @property
    def has_interval(self) -> bool:
        """Whether there were enough prompts for one."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def certain(self) -> float:
        """The size of the drift that is certain: of the interval's end that is nearer to 0; 0 if
        the interval holds 0."""
        return max(self.low, -self.high, 0.0) if self.has_interval else 0.0

    def beyond(self, limit: float | None) -> bool:
        """Whether it has certainly moved farther than so many sigmas; None = no limit."""
        return limit is not None and self.certain > limit


def drift(name: str, base: Tensor, model: Tensor, prompts: Sequence[int]) -> Drift:
    """Drift of one statistic, from its values [B] for the same prompts and noise.

    prompts: of the B images; images of a prompt are averaged first, as they resemble each other.
    Values that are NaN are left out. The interval is Student's over prompts.
    """
    rows = (base.isfinite() & model.isfinite()).nonzero().flatten().tolist()
    rows_of: dict[int, list[int]] = {}
    for row in rows:
        rows_of.setdefault(prompts[row], []).append(row)
    n = len(rows_of)
    if not n:
        return Drift(name, math.nan, math.nan, math.nan, -math.inf, math.inf, 0)
    unit = SIGMAS[name.rpartition("/")[2]]
    sigma = unit.size(base[rows])
    gaps = torch.stack([(model - base)[group].mean() for group in rows_of.values()]) / sigma
    mean = float(gaps.mean())
    half = math.inf if n < 3 else student(n - 1) * float(gaps.std(correction=1)) / math.sqrt(n)
    return Drift(
        name, float(base[rows].mean()), float(model[rows].mean()), mean, mean - half, mean + half, n
    )


def by_prompt(
    base: Mapping[str, Tensor], model: Mapping[str, Tensor], prompts: Sequence[int]
) -> Tensor:
    """[B]: of each image the largest drift of a statistic, in sigmas: what to look at first."""
    worst = torch.zeros(len(prompts), dtype=torch.float64)
    for name, values in base.items():
        unit = SIGMAS[name.rpartition("/")[2]]
        gap = (model[name] - values).abs() / unit.size(values)
        worst = worst.maximum(gap.nan_to_num(0.0))
    return worst


def student(freedom: int) -> float:
    """The two-sided quantile of Student's t at CONFIDENCE, by Cornish and Fisher's expansion
    (Abramowitz and Stegun 26.7.5): within 1 % for 2 degrees of freedom, 0.02 % from 5 on."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
