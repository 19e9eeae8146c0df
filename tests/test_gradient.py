"""Learning from a reward's gradient: MEND's arithmetic, and what a run makes of it."""

import json
import math
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from torch.testing import assert_close

from flowalign import config, rewards
from flowalign.checks import Launch, stage_problems
from flowalign.rewards.gradient import gradient_problems
from flowalign.teachers.gradient import candidates, choose, gradient_loss, raised, threshold
from flowalign.training.algorithm import TrainingError


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
    kappas, taus = torch.tensor([kappa]).double(), torch.tensor([tau]).double()
    assert choose(column, moves, kappas, taus).tolist() == [index]


def test_the_floor_follows_the_mean_quartile_and_not_itself() -> None:
    """400 rollouts of a model that does not change: 48 prompts x 24 images, rewards of mean .2."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(48).repeat_interleave(24)
    floor = -math.inf
    quartiles = []
    for _ in range(400):
        of_prompt = 0.2 + 0.2 * torch.randn(48, generator=generator, dtype=torch.float64)
        noise = 0.15 * torch.randn(48 * 24, generator=generator, dtype=torch.float64)
        value = of_prompt[group] + noise
        quartile = threshold(value, group, torch.ones(len(value), dtype=torch.bool), 0.75)
        quartiles.append(float(quartile.mean()))
        floor = raised(floor, quartiles[-1], 0.05)
    assert floor == pytest.approx(sum(quartiles) / 400, abs=0.05)


def test_the_floor_rises_only_and_waits_for_its_task() -> None:
    assert raised(-math.inf, -2.0, 0.05) == pytest.approx(-2.1)
    assert raised(1.0, 0.5, 0.05) == 1.0
    assert raised(1.0, 2.0, 0.05) == pytest.approx(1.05)
    assert raised(1.0, math.nan, 0.05) == 1.0
    assert raised(-math.inf, math.nan, 0.05) == -math.inf


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
    given = ["gradient.tau=1", "gradient.rise=0.5"]
    loop: Any = fakes.wired(fakes.ascending(random_model, tmp_path / "run", *given))
    prepared = loop.algorithm.prepare(rollout := loop.rollout(0), 0)
    assert [*rollout.steps] == [3] and rollout.states.shape[1] == 1  # .9 of 4 steps
    moved = prepared.weight == 1
    assert 0 < moved.sum() < len(moved) and set(prepared.weight.tolist()) == {1.0, 10.0}
    assert not prepared.shift[~moved].any() and prepared.metrics["moved_gain/red"] > 0
    sigma = float(rollout.schedule.sigmas[3])
    length = (prepared.shift[moved] * sigma).square().mean((1, 2, 3)).sqrt()
    nearest = (length[:, None] - torch.tensor([0.1, 0.2, 0.4])).abs().min(1).values
    assert nearest.max() < 1e-5
    share = prepared.metrics["moved_share/red"]
    expected = 1 / 1.1 if share > 0.6 else 1.1 if share < 0.3 else 1.0
    assert float(loop.algorithm.tau) == pytest.approx(expected)
    quartile = prepared.metrics["quartile/red"]
    for update in range(1, 12):  # of one rollout: the floor comes to the quartiles' mean
        loop.algorithm.prepare(rollout, update)
    assert float(loop.algorithm.floor) == pytest.approx(quartile, rel=1e-3)


def test_each_task_has_its_own_price(random_model: str, tmp_path: Path) -> None:
    """Of rewards of two scales, none of the one's images move, and too many of the other's."""
    prompts = fakes.ascending(random_model, tmp_path / "run").tasks[0].prompts
    tasks = [
        {"name": name, "prompts": prompts, "reward": {"name": f"fakes:{reward}"}}
        for name, reward in {"a": "Graded", "b": "Vivid"}.items()
    ]
    given = [f"tasks={json.dumps(tasks)}", "rollout.prompts=4", "gradient.tau=0.01"]
    run = fakes.ascending(random_model, tmp_path / "run", *given, "evaluation=null")
    loop: Any = fakes.wired(run)
    measured = loop.algorithm.prepare(loop.rollout(0), 0).metrics
    assert measured["moved_share/a"] < 0.3 and measured["moved_share/b"] > 0.6
    assert measured["tau/a"] == pytest.approx(0.011) and measured["tau/b"] == pytest.approx(
        0.01 / 1.1
    )


# Rewards of users --------------------------------------------------------------------------------


class Right(fakes.Graded):
    pass


class NoGrad(fakes.Graded):
    @torch.no_grad()
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return super().with_gradient(images, prompts, metadata)


class Raises(fakes.Graded):
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        raise OSError("no file")


class Numpy(fakes.Graded):
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return super().with_gradient(images, prompts, metadata).detach().numpy()


class Rounded(fakes.Graded):
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return super().with_gradient((images * 255).round() / 255, prompts, metadata)


class Column(fakes.Graded):
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return super().with_gradient(images, prompts, metadata)[:, None]


class Mean(fakes.Graded):
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return super().with_gradient(images, prompts, metadata).mean()


class OfBatch(fakes.Graded):
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        value = super().with_gradient(images, prompts, metadata)
        return value - 1e-3 * value.sum()


class Loss(fakes.Graded):
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return -super().with_gradient(images, prompts, metadata)


class Downhill(fakes.Graded):
    """The value of `__call__`, and the gradient of its opposite."""

    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        value = super().with_gradient(images, prompts, metadata)
        return 2 * value.detach() - value


class NanGradient(fakes.Graded):
    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        zero = (images[:, 0] - images[:, 0].detach()).abs().sqrt().mean((1, 2))
        return super().with_gradient(images, prompts, metadata) + zero


@pytest.mark.parametrize(
    "kind", [NoGrad, Raises, Numpy, Rounded, Column, Mean, OfBatch, Loss, Downhill, NanGradient]
)
def test_a_wrong_gradient_is_seen_at_two_images(kind: type[fakes.Graded]) -> None:
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    images[:, 0] += 0.1 * torch.tensor([1.0, 0.5])[:, None, None]
    asked = images, ["a red dog", "a cat"], [{}, {}]
    assert list(gradient_problems(Right(), *asked)) == []
    assert len(list(gradient_problems(kind(), *asked))) == 1


def test_a_wrong_gradient_ends_the_run_before_it_learns(random_model: str, tmp_path: Path) -> None:
    given = ["tasks.0.reward={name: 'test_gradient:Downhill'}"]
    loop = fakes.wired(fakes.ascending(random_model, tmp_path / "run", *given))
    with pytest.raises(config.ConfigError) as error:
        loop.run()
    assert str(error.value.problems[0]).startswith("tasks.0.reward: ")
    assert loop.update == 0


class Breaks(fakes.Graded):
    """Its gradient, or a call of it, fails from the third call on."""

    def __init__(self, how: str, calls: int = 2) -> None:
        self.how, self.calls = how, calls

    def with_gradient(self, images: Any, prompts: Any, metadata: Any) -> Any:
        self.calls -= 1
        kind = {"nan": NanGradient, "error": Raises}[self.how] if self.calls < 0 else fakes.Graded
        return kind().with_gradient(images, prompts, metadata)


@pytest.mark.parametrize("how", ["nan", "error"])
def test_images_without_a_gradient_are_invalid(random_model: str, tmp_path: Path, how: str) -> None:
    reward = f"tasks.0.reward={{name: 'test_gradient:Breaks', options: {{how: {how}}}}}"
    given = [reward, "train.max_invalid_share=0.99", "gradient.batch=4"]
    loop: Any = fakes.wired(fakes.ascending(random_model, tmp_path / "run", *given))
    rollout = loop.rollout(0)  # the check is the first call, the first batch the second
    prepared = loop.algorithm.prepare(rollout, 0)
    assert prepared.keep.tolist() == [True] * 4 + [False] * (len(rollout) - 4)
    assert prepared.metrics["invalid_share"] == pytest.approx(1 - 4 / len(rollout))
    strict = [reward, "gradient.batch=4", "train.max_invalid_share=0.1"]
    with pytest.raises(TrainingError):
        fakes.wired(fakes.ascending(random_model, tmp_path / "two", *strict)).run()


def test_a_reward_without_a_gradient_is_refused_by_name(random_model: str, tmp_path: Path) -> None:
    given = ["tasks.0.reward={name: 'fakes:redness'}"]
    found = fakes.ascending(random_model, tmp_path / "run", *given)
    (problem,) = [p for p in stage_problems(found, Launch()) if "gradient" in p.text]
    assert problem.key == "tasks.0.reward" and "pickscore" in problem.text
    with pytest.raises(config.ConfigError, match=r"rollout\.kind"):
        fakes.ascending(random_model, tmp_path / "run", "rollout.kind=sde")


@pytest.mark.slow
def test_it_trains_towards_its_reward(random_model: str, tmp_path: Path) -> None:
    given = ["train.updates=12", "optimizer.lr=1e-2", "rollout.prompts=4"]
    loop = fakes.wired(fakes.ascending(random_model, tmp_path / "run", *given))
    loop.run()
    reward = [row["reward"] for row in fakes.lines(tmp_path / "run")]
    assert sum(reward[-4:]) > sum(reward[:4])
