"""teachers/awm.py: the surrogate ratio, and the distances to base and average. What it shares with
nft is in test_nft.py."""

from pathlib import Path

import fakes
import pytest
import torch
from fakes import gradient
from torch import Tensor
from torch.testing import assert_close

from flowalign.teachers.awm import Awm, awm_log_prob
from flowalign.teachers.forward import Matched
from flowalign.training.algorithm import STUDENT, Pairs, pairs_of
from flowalign.training.loop import Loop


def ready(model: str, folder: Path, *overrides: str) -> tuple[Loop, Matched, Pairs]:
    """A run whose adapter matters, its first rollout, and all its pairs."""
    loop = fakes.wired(fakes.forward(model, folder, *overrides, stage="awm"), moved=True)
    found = loop.algorithm.prepare(loop.rollout(0), 0)
    assert isinstance(loop.algorithm, Awm) and isinstance(found, Matched)
    (pairs,) = pairs_of(found.rollout, torch.ones(8, dtype=torch.bool), 100)
    return loop, found, pairs


def velocity(loop: Loop, pairs: Pairs, adapter: str | None) -> Tensor:
    with loop.backbone.adapter(adapter):
        return loop.backbone.velocity(pairs.x, pairs.sigma, pairs.conditioning, guidance=1.0)


@pytest.mark.parametrize("weighting", ["ghuber", "uniform", "t", "t2", "huber"])
def test_at_ratio_one_it_is_advantage_weighted_matching(random_model, tmp_path, weighting: str):
    """-A times the slope of the log-likelihood; with uniform weights, A |v - target|^2."""
    loop, found, pairs = ready(random_model, tmp_path / "run", f"awm.weighting={weighting}")
    step = loop.algorithm.loss(pairs, loop.algorithm.velocity(pairs), found)
    assert step.metrics["ratio_error"] == 0 and step.metrics["clip_fraction"] == 0
    advantage = found.advantage[pairs.rows]
    assert float(step.total.detach()) == pytest.approx(-float(advantage.mean()), abs=1e-6)
    target = found.velocity[pairs.rows, pairs.columns]
    log_prob = awm_log_prob(
        loop.algorithm.velocity(pairs), target, pairs.sigma, weighting=weighting, power=0.25
    )
    expected = gradient(loop, -(advantage * log_prob).mean())
    if weighting == "uniform":
        error = ((loop.algorithm.velocity(pairs) - target) ** 2).mean((1, 2, 3))
        assert_close(expected, gradient(loop, (advantage * error).mean()))
    scale = float(expected.abs().max())
    assert_close(gradient(loop, step.total), expected, rtol=1e-4, atol=1e-6 * scale)


def test_the_ratio_is_to_the_weights_that_sampled(random_model: str, tmp_path: Path) -> None:
    """The second optimizer step of a rollout has moved from them, by as much as is logged."""
    loop, found, pairs = ready(random_model, tmp_path / "run", "optimizer.updates_per_rollout=2",
                               "awm.weighting=uniform", "awm.clip_range=0.05")  # fmt: skip
    old = velocity(loop, pairs, "old")
    assert isinstance(loop.algorithm, Awm)
    assert loop.algorithm.old and not loop.algorithm.old.is_student  # as after a step
    step = loop.algorithm.loss(pairs, loop.algorithm.velocity(pairs), found)
    target = found.velocity[pairs.rows, pairs.columns]
    mine = velocity(loop, pairs, STUDENT)
    new, before = (((v - target) ** 2).mean((1, 2, 3)) for v in (mine, old))
    ratio, advantage = (before - new).exp(), found.advantage[pairs.rows]
    expected = -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.95, 1.05)).mean()
    assert float(step.total.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    error = float((ratio - 1).detach().abs().max())
    assert step.metrics["ratio_error"] == pytest.approx(error, abs=1e-6)


def test_base_and_average_hold_the_student_back(random_model: str, tmp_path: Path) -> None:
    given = ["awm.kl_weight=0.7", "awm.ema_kl_weight=0.3"]
    loop, found, pairs = ready(random_model, tmp_path / "run", *given)
    assert found.keep.all()
    plain, same, _ = ready(random_model, tmp_path / "plain")
    step = loop.algorithm.loss(pairs, loop.algorithm.velocity(pairs), found)
    alone = plain.algorithm.loss(pairs, plain.algorithm.velocity(pairs), same)
    v = velocity(loop, pairs, STUDENT)
    base, average = (((v - velocity(loop, pairs, name)) ** 2).mean() for name in (None, "average"))
    assert min(float(base.detach()), float(average.detach())) > 1e-4  # of before the shake
    more = float((0.7 * base + 0.3 * average).detach())
    assert float((step.total - alone.total).detach()) == pytest.approx(more, rel=1e-3)
    assert step.metrics["velocity_drift"] == pytest.approx(float(base.detach()), rel=1e-4)
