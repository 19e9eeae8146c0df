"""Learning from a reward's gradient: MEND's arithmetic, and what a run makes of it."""

import math
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from torch.testing import assert_close

from flowalign import config, rewards
from flowalign.teachers.gradient import candidates, choose, gradient_loss, threshold
from flowalign.training.preflight import Launch, world_problems


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_loss_is_the_distance_of_clean_images() -> None:
    """weight |x0(v) - (x0(v_old) + d)|^2 with x0(v) = x - sigma v and d = sigma shift."""
    x, v, old, d = (drawn(3, 4, 2, 2, seed=seed) for seed in range(4))
    sigma, weight = torch.tensor([0.2, 0.27, 0.5]).double(), torch.tensor([1.0, 10.0, 1.0]).double()
    at = sigma[:, None, None, None]
    expected = weight * ((x - at * v - (x - at * old + d)) ** 2).mean((1, 2, 3))
    v.requires_grad_()
    found = gradient_loss(v, old.requires_grad_(), d / at, sigma, weight)
    assert_close(found, expected)
    found.sum().backward()
    assert v.grad is not None and old.grad is None


def test_moves_have_the_length_that_was_asked_for() -> None:
    slope = drawn(3, 4, 2, 2)
    slope[1] = 0
    moves = candidates(slope, [0.1, 0.4])
    rms = moves.square().mean((2, 3, 4)).sqrt()
    assert_close(rms, torch.tensor([[0.1, 0, 0.1], [0.4, 0, 0.4]]).double())
    assert_close(moves[1, 0] / 0.4, slope[0] / slope[0].square().mean().sqrt())


def test_the_threshold_is_the_quantile_of_the_group_s_valid_rewards() -> None:
    value = torch.tensor([0.0, 1, 2, 3, 4, math.nan, 7]).double()
    group = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    found = threshold(value, group, value.isfinite(), 0.75)
    assert found.tolist() == [3.0] * 5 + [7.0] * 2


@pytest.mark.parametrize(
    ("values", "tau", "index"),
    [
        ([0.1, 0.2, 0.5], 1.0, 2),  # .5 - .08 against .2 - .005
        ([0.1, 0.2, 0.5], 0.1, 1),  # the price of the distance: .5 - .8, .2 - .05
        ([0.1, 0.05, 0.05], 1.0, 0),  # worse: it stays
        ([0.1, 0.9, 1.5], 1.0, 1),  # both reach the threshold .3: the nearer one
        ([0.1, math.nan, 0.5], 1.0, 2),
    ],
)
def test_the_best_candidate_pays_for_its_distance(
    values: list[float], tau: float, index: int
) -> None:
    kappa = 0.6 if max(v for v in values if v == v) <= 0.6 else 0.3
    moves = torch.stack([torch.full((1, 4, 2, 2), eta) for eta in (0.1, 0.4)]).double()
    column = torch.tensor(values)[:, None].double()
    assert choose(column, moves, torch.tensor([kappa]).double(), tau).tolist() == [index]


@pytest.mark.parametrize("size", [64, 96])
def test_a_reward_has_the_gradient_of_its_value(size: int) -> None:
    """By finite differences along it, and nearly the value of 8-bit pixels."""
    reward: Any = rewards.build("pickscore", model="tiny", normalizer=28)
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    prompts, rows = ["a picture of two dogs", "a photo of a red cat"], [{}, {}]
    images.requires_grad_()
    value = reward.with_gradient(images, prompts, rows)
    (slope,) = torch.autograd.grad(value.sum(), images)
    unit, step = slope / slope.norm(), 0.05
    with torch.no_grad():
        up, down = (reward.with_gradient(images + s * unit, prompts, rows) for s in (step, -step))
    assert float((up - down).sum()) / (2 * step) == pytest.approx(float(slope.norm()), rel=0.05)
    plain = reward(images.detach(), prompts, rows).value
    assert_close(value.detach().cpu(), plain, atol=2e-3, rtol=0)


def test_images_follow_the_gradient_and_the_price_is_adapted(
    random_model: str, tmp_path: Path
) -> None:
    loop: Any = fakes.wired(fakes.ascending(random_model, tmp_path / "run", "gradient.tau=1"))
    prepared = loop.algorithm.prepare(rollout := loop.rollout(0), 0)
    assert [*rollout.steps] == [3] and rollout.states.shape[1] == 1  # .9 of 4 steps
    moved = prepared.weight == 1
    assert 0 < moved.sum() < len(moved) and set(prepared.weight.tolist()) == {1.0, 10.0}
    assert not prepared.shift[~moved].any() and prepared.metrics["moved_gain"] > 0
    sigma = float(rollout.schedule.sigmas[3])
    length = (prepared.shift[moved] * sigma).square().mean((1, 2, 3)).sqrt()
    nearest = (length[:, None] - torch.tensor([0.1, 0.2, 0.4])).abs().min(1).values
    assert nearest.max() < 1e-5
    share = prepared.metrics["moved_share"]
    expected = 1 / 1.1 if share > 0.6 else 1.1 if share < 0.3 else 1.0
    assert float(loop.algorithm.tau) == pytest.approx(expected)
    floor = loop.algorithm.floor.clone()
    loop.algorithm.prepare(loop.rollout(1), 1)
    assert (loop.algorithm.floor >= floor).all()  # it only rises


def test_a_reward_without_a_gradient_is_refused_by_name(random_model: str, tmp_path: Path) -> None:
    given = ["tasks.0.reward={name: 'fakes:redness'}"]
    found = fakes.ascending(random_model, tmp_path / "run", *given)
    (text,) = [t for t in world_problems(found, Launch()) if "gradient" in t]
    assert text.startswith("tasks.0.reward") and "pickscore" in text
    with pytest.raises(config.ConfigError, match=r"rollout\.kind"):
        fakes.ascending(random_model, tmp_path / "run", "rollout.kind=sde")


def test_it_trains_towards_its_reward(random_model: str, tmp_path: Path) -> None:
    given = ["train.updates=12", "optimizer.lr=1e-2", "rollout.prompts=4"]
    loop = fakes.wired(fakes.ascending(random_model, tmp_path / "run", *given))
    loop.run()
    reward = [row["reward"] for row in fakes.lines(tmp_path / "run")]
    assert sum(reward[-4:]) > sum(reward[:4])
