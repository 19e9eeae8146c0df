"""Bootstrap intervals and sign-flip tests over prompts.

Prompts are drawn, not images, because the images of one prompt resemble each other. Strata are
GenEval's tags (all 0 where there are none): prompts are drawn within their stratum, and the number
is the unweighted mean over strata of (sum of scores / count of scores).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
CONFIDENCE = 0.95
Array = NDArray[np.float64]
Labels = NDArray[np.int64]


class PromptScores(NamedTuple):
    """Sum and count of the valid scores of each of P prompts, and its stratum: [P] each."""

    sums: Array
    counts: Array
    strata: Labels


def mean(sums: Array, counts: Array, strata: Labels) -> Array:
    """The number [...] of sums and counts [..., P]; a stratum without any count is left out."""
    totals = np.stack([sums[..., strata == s].sum(-1) for s in np.unique(strata)], -1)
    sizes = np.stack([counts[..., strata == s].sum(-1) for s in np.unique(strata)], -1)
    known = sizes > 0
    means = np.where(known, totals / np.maximum(sizes, 1), 0)
    return np.where(known.any(-1), means.sum(-1) / np.maximum(known.sum(-1), 1), np.nan)


def interval(sums: Array, counts: Array, strata: Labels, seed: int = 0) -> tuple[float, float]:
    """The percentile bootstrap interval of `mean` at CONFIDENCE; NaN for fewer than two prompts.

    tests/test_bootstrap.py measures its coverage for shares. It is too short for a few prompts.
    """
    if int((counts > 0).sum()) < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    times = np.zeros((DRAWS, len(strata)))  # how often each draw takes each prompt
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        size = len(members)
        drawn = rng.integers(size, size=(DRAWS, size))
        drawn += np.arange(DRAWS)[:, None] * size  # one range of bins per draw
        counted = np.bincount(drawn.ravel(), minlength=DRAWS * size)
        times[:, members] = counted.reshape(DRAWS, size)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(mean(times * sums, times * counts, strata), [tail, 1 - tail])
    return float(low), float(high)


def sign_flip(sums: Array, counts: Array, strata: Labels, seed: int = 0) -> float:
    """Two-sided p of paired differences: how likely so large a mean is if signs are random.

    It is the share of random flips of the prompts' signs whose |mean| is at least the observed one.
    The observed one is counted among them, so p is never 0.
    """
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=(DRAWS, len(sums)))
    observed = abs(float(mean(sums, counts, strata)))
    flipped = np.abs(mean(signs * sums, np.broadcast_to(counts, signs.shape), strata))
    return float((1 + (flipped >= observed - 1e-12).sum()) / (1 + DRAWS))  # 1e-12: rounding
