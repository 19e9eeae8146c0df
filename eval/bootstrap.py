"""Intervals and tests over prompts: what a number would be with other prompts of the same kind.

P prompts, each with the sum and the count of its valid scores; strata [P] are GenEval's tags (all 0
where there are none): prompts are drawn within their stratum, and the number is the unweighted
mean of the strata's means, each the sum of its scores over their count. Prompts are drawn, not
images, because the images of one prompt resemble each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
CONFIDENCE = 0.95
Array = NDArray[np.float64]
Labels = NDArray[np.int64]


def mean(sums: Array, counts: Array, strata: Labels) -> Array:
    """The number [...] of sums and counts [..., P]; a stratum without any count is left out."""
    totals = np.stack([sums[..., strata == s].sum(-1) for s in np.unique(strata)], -1)
    found = np.stack([counts[..., strata == s].sum(-1) for s in np.unique(strata)], -1)
    known = found > 0
    means = np.where(known, totals / np.maximum(found, 1), 0)
    return np.where(known.any(-1), means.sum(-1) / np.maximum(known.sum(-1), 1), np.nan)


def interval(sums: Array, counts: Array, strata: Labels, seed: int = 0) -> tuple[float, float]:
    """The percentile bootstrap interval of `mean` at CONFIDENCE; NaN for fewer than two prompts.

    Its coverage for shares is tested (tests/test_bootstrap.py); it is too short for a few prompts.
    """
    if int((counts > 0).sum()) < 2:
        return float("nan"), float("nan")
    times = _times(strata, np.random.default_rng(seed))
    found = mean(times * sums, times * counts, strata)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(found, [tail, 1 - tail])
    return float(low), float(high)


def sign_flip(sums: Array, counts: Array, strata: Labels, seed: int = 0) -> float:
    """Two-sided p of paired differences, were it chance which model a prompt's difference favours.

    The share of random flips of the prompts' signs whose |mean| is at least that seen, the seen
    one counted among them, so it is never 0.
    """
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=(DRAWS, len(sums)))
    seen = abs(float(mean(sums, counts, strata)))
    flipped = np.abs(mean(signs * sums, np.broadcast_to(counts, signs.shape), strata))
    return float((1 + (flipped >= seen - 1e-12).sum()) / (1 + DRAWS))


def _times(strata: Labels, rng: np.random.Generator) -> Array:
    """[DRAWS,P]: how often each draw takes each prompt, as many of a stratum as it has."""
    times = np.zeros((DRAWS, len(strata)))
    for stratum in np.unique(strata):
        place = np.flatnonzero(strata == stratum)
        drawn = rng.integers(len(place), size=(DRAWS, len(place)))
        drawn += np.arange(DRAWS)[:, None] * len(place)
        found = np.bincount(drawn.ravel(), minlength=DRAWS * len(place))
        times[:, place] = found.reshape(DRAWS, len(place))
    return times
