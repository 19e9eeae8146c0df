"""The Fréchet distance is the formula's, rises with damage, and refuses what it cannot measure."""

import numpy as np
import pytest

from flowalign.eval.fidelity import frechet

RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=(500, 4))


def exact(features: np.ndarray) -> np.ndarray:
    """The same rows moved so that their mean is 0 and their covariance is 1, to rounding."""
    centred = features - features.mean(0)
    root = np.linalg.cholesky(np.cov(centred.T))
    return centred @ np.linalg.inv(root).T


def test_gaussians_with_a_known_distance():
    unit = exact(NORMAL)
    shift, scale = np.array([1.0, 0, -2, 0]), np.array([1.0, 2, 3, 0.5])
    assert frechet(unit, unit) == pytest.approx(0, abs=1e-9)
    assert frechet(unit + shift, unit) == pytest.approx(5)
    # equal axes: the sum of (s1 - s2)^2
    assert frechet(unit * scale, unit) == pytest.approx(((scale - 1) ** 2).sum())
    assert frechet(unit, unit * scale + shift) == pytest.approx(5 + ((scale - 1) ** 2).sum())


def test_axes_that_are_turned_agree_with_the_matrix_root():
    """tr (C1 C2)^(1/2) by the eigenvalues of the product itself, which is not symmetric."""
    a, b = NORMAL @ RNG.normal(size=(4, 4)), RNG.normal(size=(300, 4)) @ RNG.normal(size=(4, 4))
    c1, c2 = np.cov(a.T), np.cov(b.T)
    root = np.sqrt(np.linalg.eigvals(c1 @ c2).real).sum()
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(c1 + c2) - 2 * root
    assert frechet(a, b) == pytest.approx(wanted)
    assert frechet(b, a) == pytest.approx(wanted)
    assert frechet(a[::-1], b) == pytest.approx(wanted)
