"""Intervals cover as often as they say, over prompts; the paired test is honest under no effect."""

import math

import numpy as np
import pytest
from scipy.stats import t

from flowalign.eval import stats


def coverage(shares: list[float], prompts: int, images: int, tries: int = 1000) -> float:
    """How often the interval of simulated verdicts holds the mean of the strata's true shares."""
    rng, hits = np.random.default_rng(0), 0
    strata = np.repeat(np.arange(len(shares)), prompts)
    for attempt in range(tries):
        sums = rng.binomial(images, np.repeat(shares, prompts)).astype(float)
        counts = np.full(len(sums), float(images))
        low, high = stats.bootstrap_interval(sums, counts, strata, seed=attempt)
        hits += low <= np.mean(shares) <= high
    return hits / tries


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "prompts", "images"),
    [
        ([0.7], 120, 4), ([0.5], 400, 1), ([0.2], 400, 1), ([0.9, 0.5, 0.3, 0.2], 100, 1),
    ],
)  # fmt: skip
def test_the_interval_covers_the_truth_as_often_as_it_says(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], prompts: int, images: int
):
    monkeypatch.setattr(stats, "DRAWS", 500)  # enough for the quantiles, and quick
    assert 0.935 <= coverage(shares, prompts, images) <= 0.965


def test_images_of_one_prompt_are_no_news():
    """Four equal images of a prompt say no more than one."""
    sums = np.random.default_rng(1).binomial(1, 0.4, 200).astype(float)
    strata = np.zeros(200, np.int64)
    one = stats.bootstrap_interval(sums, np.ones(200), strata)
    four = stats.bootstrap_interval(4 * sums, np.full(200, 4.0), strata)
    assert one == pytest.approx(four)


def test_prompts_without_a_valid_image_leave():
    sums, counts = np.array([1.0, 0.0, 1.0]), np.array([1.0, 0.0, 1.0])
    assert float(stats.prompts_mean(sums, counts, np.zeros(3, np.int64))) == 1.0
    assert float(stats.prompts_mean(sums, counts, np.array([0, 1, 2]))) == 1.0
    assert np.isnan(stats.bootstrap_interval(sums * 0, counts * 0, np.zeros(3, np.int64))).all()


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 11, 19, 39, 400, 30_000])
def test_the_quantile_of_t_is_that_of_scipy(freedom: int):
    assert stats.student_t(freedom) == pytest.approx(t.ppf(0.975, freedom), rel=1e-5)


def test_there_is_no_quantile_without_a_degree_of_freedom():
    assert math.isnan(stats.student_t(0))
