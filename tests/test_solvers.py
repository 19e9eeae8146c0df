"""Solvers of rollouts without noise: their order, their noise levels, and the images they make."""

from collections.abc import Callable

import fakes
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowalign.backbone import Backbone
from flowalign.training.rollout import Noise, Schedule, places, sample
from flowalign.training.solvers import Dpm2
from flowalign.types import Rollout

MEAN, WIDTH = 0.4, 1.5  # of Gaussian data: its velocity field and its flow are known


def velocity(x: Tensor, sigma: float) -> Tensor:
    """E[eps - x0 | x] for x0 ~ N(MEAN, WIDTH^2): d/dsigma of x(sigma) below."""
    variance = (1 - sigma) ** 2 * WIDTH**2 + sigma**2
    return -MEAN + (x - (1 - sigma) * MEAN) * (sigma - (1 - sigma) * WIDTH**2) / variance


def solve(sigmas: Tensor, x: Tensor, field: Callable[[Tensor, float], Tensor]) -> Tensor:
    """As a rollout does."""
    solver = Dpm2(sigmas)
    for sigma in sigmas[:-1].tolist():
        x = solver.advance(x, field(x, sigma))
    return x


def test_dpm2_is_the_formula_of_dpm_solver_plus_plus() -> None:
    """2211.01095, algorithm 2, for alpha = 1 - sigma, written out in float64."""
    sigmas = torch.tensor([1.0, 0.9, 0.7, 0.45, 0.2, 0.0])
    start = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    s, x, before = sigmas.double(), start.double(), None
    log_snr = ((1 - s) / s).log()
    for i in range(5):
        clean = x - s[i] * velocity(x, float(s[i]))
        target = clean
        if before is not None and 1 < i < 4:  # from sigma = 1 on r is infinite
            r = (log_snr[i] - log_snr[i - 1]) / (log_snr[i + 1] - log_snr[i])
            target = (1 + 1 / (2 * r)) * clean - 1 / (2 * r) * before
        decay = (s[i + 1] / s[i]) * ((1 - s[i]) / (1 - s[i + 1]))  # exp(-h)
        x = s[i + 1] / s[i] * x - (1 - s[i + 1]) * (decay - 1) * target
        before = clean
    assert_close(solve(sigmas, start, velocity), x.float(), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def backbone(random_model: str) -> Backbone:
    return fakes.adapted(random_model)


def run(
    backbone: Backbone, solver: str = "dpm2", *, steps: int = 5, batch_size: int = 32,
    prompts: slice = slice(0, 4), window: tuple[int, int] | None = None, finish: bool = True,
) -> Rollout:  # fmt: skip
    schedule = Schedule(backbone.sigmas(steps), "ode", 0.0, window, actions=False, solver=solver)
    where = places(4, 2)[2 * prompts.start : 2 * prompts.stop]
    batch = fakes.batch(4).select([prompt for prompt, _ in where])
    options = {"batch_size": batch_size, "decode": finish, "finish": finish}
    noise = Noise((7, 0))
    return sample(backbone, batch, schedule, guidance=2.0, noise=noise, places=where, **options)


def latents(rollout: Rollout) -> Tensor:
    assert rollout.latents is not None
    return rollout.latents


@pytest.fixture
def asked(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The noise levels of all forward passes, in order."""
    levels: list[float] = []
    real = backbone.velocity

    def noted(x: Tensor, sigma: float, *rest: object, **options: object) -> Tensor:
        levels.append(sigma)
        return real(x, sigma, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(backbone, "velocity", noted)
    return levels


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_forward_passes_are_at_the_noise_levels_of_the_model(
    backbone: Backbone, asked: list[float], solver: str, steps: int
) -> None:
    run(backbone, solver, steps=steps)
    assert asked == backbone.sigmas(steps).tolist()[:-1]


def test_images_do_not_depend_on_batches_and_processes(backbone: Backbone) -> None:
    whole = run(backbone)
    assert torch.isfinite(latents(whole)).all()
    other = run(backbone, batch_size=3)
    assert_close(latents(other), latents(whole), rtol=0, atol=1e-5)
    shares = [run(backbone, prompts=slice(a, a + 2)) for a in (0, 2)]
    joined = torch.cat([latents(share) for share in shares])
    assert_close(joined, latents(whole), rtol=0, atol=1e-5)
    assert torch.equal(latents(run(backbone)), latents(whole))  # nothing is left over


def test_trained_states_are_those_between_the_solvers_steps(backbone: Backbone, asked: list[float]):
    whole = run(backbone, window=(0, 5))
    assert whole.states.shape[:2] == (8, 5) and whole.next_states is None
    asked.clear()
    part = run(backbone, window=(1, 3), finish=False)  # stops at the last trained state
    assert torch.equal(part.states, whole.states[:, 1:3]) and part.latents is None
    assert len(asked) == 2
    x, own = whole.states[:, 0], backbone.sigmas(5)
    first = backbone.velocity(x, 1.0, whole.conditioning, guidance=2.0)
    ahead = x + (own[1] - own[0]) * first
    assert_close(whole.states[:, 1], ahead, rtol=0, atol=1e-5)


def test_one_step_is_an_euler_step() -> None:
    x = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    found = solve(torch.tensor([1.0, 0.0]), x, velocity)
    assert_close(found, x - velocity(x, 1.0), rtol=1e-6, atol=1e-6)
