"""benchmarks/seeds.py: the error of a mean over seeds and prompts (tests/test_errors.py measures
it)."""

import sys

import numpy as np
import pytest
from fakes import ROOT

from flowalign.eval.compare import Column
from flowalign.eval.stats import headline_rows

sys.path.append(str(ROOT / "benchmarks"))
import seeds  # noqa: E402  # pyright: ignore[reportMissingImports]


def test_equal_seeds_have_the_error_of_their_prompts() -> None:
    values = np.random.default_rng(1).random(50)
    images = [{"prompt": str(i), "metadata": {}, "value": value} for i, value in enumerate(values)]
    row = headline_rows(Column("x", None), images)[0]
    mean, error = seeds.crossed([row] * 3)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / 50**0.5)
    assert seeds.crossed([row]) == pytest.approx((mean, error))
