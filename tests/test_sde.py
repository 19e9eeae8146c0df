"""sde.py against the published code's numbers, diffusers, torch.distributions and itself."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from safetensors.torch import load_file
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from flowalign import sde
from flowalign.types import Gaussian

GOLDEN = Path(__file__).parent / "golden"
VECTORS = json.loads((GOLDEN / "sde_step.json").read_text())
TENSORS = load_file(GOLDEN / "sde_step.safetensors")
SCHEDULES = json.loads((GOLDEN / "scheduler.json").read_text())["by_num_steps"]

# Tolerances of a mean and of a log-probability: rounding of the arithmetic they were recorded in.
# The recorded float64 log-probabilities hold a float32 constant, off by 1.6e-8.
PRECISIONS = {
    "f32": (torch.float32, {"atol": 2e-6, "rtol": 1e-6}, {"atol": 1e-7, "rtol": 1e-6}),
    "f64": (torch.float64, {"atol": 1e-12, "rtol": 1e-12}, {"atol": 1e-7, "rtol": 0}),
}


def toy(batch=3, dtype=torch.float64, shape=(4, 6, 6), seed=0):
    """x, velocity and noise [B,C,h,w]."""
    generator = torch.Generator().manual_seed(seed)
    x, velocity, noise = torch.randn(3, batch, *shape, generator=generator, dtype=dtype)
    return x, velocity, noise


def step_of(case, x, velocity):
    """The transition of a recorded case; its sigmas are floats, or [B] where steps are mixed."""
    sigma, sigma_next = case["sigma"], case["sigma_next"]
    if isinstance(sigma, list):
        sigma, sigma_next = torch.tensor(sigma), torch.tensor(sigma_next)
    grid = SCHEDULES[str(case["num_steps"])]["sigmas"]
    options = {"noise_level": case["noise_level"], "kind": case["sde_type"], "sigma_max": grid[1]}
    return sde.transition(x, velocity, sigma, sigma_next, **options)


def test_transition_and_log_prob_are_the_published_ones():
    for case, precision in itertools.product(VECTORS["cases"], PRECISIONS):
        assert_published(case, precision)


def assert_published(case, precision):
    """Mean, std, log-probability and its gradient of a recorded case; names it if one differs."""

    def assert_close(*pair, **tolerance):
        torch.testing.assert_close(
            *pair, **tolerance, msg=lambda text: f"{case[precision]['prefix']}: {text}"
        )

    dtype, mean_close, log_close = PRECISIONS[precision]
    x, velocity, x_next = (
        TENSORS[f"{case['inputs']}.{name}"].to(dtype)
        for name in ("sample", "model_output", "prev_sample")
    )
    velocity.requires_grad_()
    expected = case[precision]
    step = step_of(case, x, velocity)
    std = torch.tensor(expected["std_dev_t"], dtype=dtype)
    if case["sde_type"] == "sde":  # theirs is s, without the sqrt(-dt)
        std = std * torch.tensor(expected["sqrt_dt"], dtype=dtype)
    assert step.mean.dtype == dtype
    assert_close(step.mean, TENSORS[f"{expected['prefix']}.prev_sample_mean"], **mean_close)
    assert_close(step.std.flatten(), std, **mean_close)

    theirs = [float(v) for v in expected["log_prob"]]
    if not bool((std > 0).all()):  # theirs is NaN (sde) or has no variance (cps)
        with pytest.raises(ValueError, match="deterministic"):
            sde.log_prob(step, x_next)
        return
    ours = sde.log_prob(step, x_next)
    if case["sde_type"] == "cps":  # theirs is -mean((x_next - mean)^2): an affine map of ours
        var = step.std.flatten() ** 2
        ours = 2 * var * (ours + torch.log(step.std.flatten()) + 0.5 * math.log(2 * math.pi))
    assert_close(ours, torch.tensor(theirs, dtype=dtype), **log_close)

    recorded = TENSORS.get(f"{expected['prefix']}.grad_logprob_sum_wrt_model_output")
    if recorded is not None:
        (gradient,) = torch.autograd.grad(ours.sum(), velocity)
        assert_close(gradient, recorded, atol=1e-12, rtol=1e-9)


def test_sample_is_the_published_draw():
    for case in VECTORS["sampling"]:
        grid = SCHEDULES[str(case["num_steps"])]["sigmas"]
        at = case["step_index"]
        case = case | {"sigma": grid[at], "sigma_next": grid[at + 1]}
        x, velocity, noise, x_next = (
            TENSORS[f"{case['prefix']}.{name}"]
            for name in ("sample", "model_output", "noise", "prev_sample")
        )
        step = step_of(case, x, velocity)
        assert_close(sde.sample(step, noise), x_next, atol=2e-6, rtol=1e-6, msg=case["prefix"])
        if case["noise_level"]:
            ours, recorded = sde.log_prob(step, x_next), torch.tensor(case["log_prob"])
            assert_close(ours, recorded, atol=5e-7, rtol=1e-6, msg=case["prefix"])
        generator = torch.Generator().manual_seed(case["generator_seed"])
        assert torch.equal(torch.randn(noise.shape, generator=generator), noise), case["prefix"]


def test_sigmas_are_the_recorded_ones():
    for num_steps, recorded in SCHEDULES.items():
        assert sde.sigmas(int(num_steps), 3.0).tolist() == recorded["sigmas"], num_steps


def test_sigmas_are_diffusers():
    shifts: list[float] = [1.0, 1.1, 3.0, 7.3]
    terminals: list[Any] = [None, 0.02, 0.1]
    cases = [(*case, 1000) for case in itertools.product(shifts, terminals, (2, 3, 10, 28, 50))]
    for shift, terminal, steps, train in [*cases, (3.0, None, 1, 1000), (3.0, None, 5, 100)]:
        scheduler = FlowMatchEulerDiscreteScheduler(
            shift=shift, shift_terminal=terminal, num_train_timesteps=train
        )
        scheduler.set_timesteps(steps)
        ours = sde.sigmas(steps, shift, terminal=terminal, num_train_timesteps=train)
        assert torch.equal(ours, torch.as_tensor(scheduler.sigmas))


@pytest.mark.parametrize(("kind", "level"), [("ode", 0.7), ("sde", 0.0), ("cps", 0.0)])
def test_no_noise_is_the_euler_step_to_the_bit(kind, level):
    x, v, noise = toy(dtype=torch.float32)
    step = sde.transition(x, v, 0.7, 0.5, noise_level=level, kind=kind, sigma_max=0.96)
    euler = x + (torch.tensor(0.5) - torch.tensor(0.7)) * v
    assert torch.equal(step.mean, euler)
    assert torch.equal(step.std, torch.zeros(3, 1, 1, 1))
    assert torch.equal(sde.sample(step, noise), euler)


@pytest.mark.parametrize("kind", ["sde", "cps", "ode"])
def test_mixed_steps_equal_row_by_row(kind):
    x, v, noise = toy(batch=4, dtype=torch.float32)
    grid = sde.sigmas(10, 3.0)
    at = torch.tensor([0, 3, 7, 8])
    options = {"noise_level": 0.7, "kind": kind, "sigma_max": grid[1]}
    mixed = sde.transition(x, v, grid[at], grid[at + 1], **options)
    for row, i in enumerate(at.tolist()):
        one = slice(row, row + 1)
        for sigma, sigma_next in ((grid[i], grid[i + 1]), (float(grid[i]), float(grid[i + 1]))):
            alone = sde.transition(x[one], v[one], sigma, sigma_next, **options)
            assert torch.equal(alone.mean, mixed.mean[one])
            assert torch.equal(alone.std, mixed.std[one])
        if kind != "ode":
            both = sde.log_prob(mixed, noise)[row], sde.log_prob(alone, noise[one])[0]
            assert torch.equal(*both)


def test_log_prob_does_not_depend_on_the_batch_split():
    """At the size of 512 px: a sum over all axes at once splits one image over two threads."""
    x, v, noise = toy(batch=16, dtype=torch.float32, shape=(16, 64, 64))
    step = sde.transition(x, v, 0.7, 0.5, noise_level=0.7, kind="sde", sigma_max=0.96)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = sde.log_prob(step, noise)
        rows = [
            sde.log_prob(Gaussian(step.mean[i : i + 1], step.std[i : i + 1]), noise[i : i + 1])
            for i in range(16)
        ]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, torch.cat(rows))


def test_half_precision_is_computed_in_float32():
    x, v, noise = (t.bfloat16() for t in toy(dtype=torch.float32))
    options = {"noise_level": 0.7, "kind": "sde", "sigma_max": 0.96}
    step = sde.transition(x, v, 0.7, 0.5, **options)
    same = sde.transition(x.float(), v.float(), 0.7, 0.5, **options)
    assert step.mean.dtype == sde.sample(step, noise).dtype == torch.float32
    assert torch.equal(step.mean, same.mean)
    assert torch.equal(sde.log_prob(step, noise), sde.log_prob(same, noise.float()))


def test_log_prob_and_kl_are_those_of_torch():
    x, v, noise = toy()
    options = {"noise_level": 0.7, "kind": "sde", "sigma_max": 0.96}
    p, q = (sde.transition(x, u, 1.0, 0.96, **options) for u in (v, v + 0.3 * noise))
    normal_p, normal_q = (Normal(g.mean, g.std.expand_as(g.mean)) for g in (p, q))
    assert_close(sde.log_prob(p, noise), normal_p.log_prob(noise).mean((1, 2, 3)))
    assert_close(sde.kl(p, q), kl_divergence(normal_p, normal_q).mean((1, 2, 3)))
    assert torch.equal(sde.kl(p, p), torch.zeros(3, dtype=torch.float64))


def test_a_kl_of_unequal_noise_and_what_has_no_noise_are_refused():
    x, v, _ = toy()
    p, q, sure = (
        sde.transition(x, v, 0.7, 0.5, noise_level=level, kind=kind, sigma_max=0.96)
        for level, kind in ((0.7, "sde"), (0.6, "sde"), (0.7, "ode"))
    )
    with pytest.raises(ValueError, match="equal std"):
        sde.kl(p, q)
    for refused in (lambda: sde.kl(sure, sure), lambda: sde.log_prob(sure, x)):
        with pytest.raises(ValueError, match="deterministic"):
            refused()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "euler"}, "unknown kind 'euler'; take one of sde, cps, ode"),
        ({"noise_level": -0.1}, "noise_level is -0.1"),
        ({"noise_level": math.nan}, "noise_level is nan"),
        ({"noise_level": 1.5, "kind": "cps"}, "noise_level is 1.5"),
        ({"sigma_max": 1.0}, "sigma_max is 1.0; take the second point"),
        ({"sigma": torch.full((2,), 0.7)}, r"sigma must be a number or \[3\], got \[2\]"),
        ({"sigma_next": 0.8}, "needs 1 >= sigma > sigma_next >= 0"),
        ({"velocity": torch.zeros(3, 1)}, r"x \[3, 4, 6, 6\] and velocity \[3, 1\]"),
    ],
)
def test_bad_arguments_are_named(change, message):
    x, v, _ = toy()
    given = {"velocity": v, "sigma": 0.7, "sigma_next": 0.5, "noise_level": 0.7, "kind": "sde"}
    with pytest.raises(ValueError, match=message):
        sde.transition(x, **({"sigma_max": 0.96} | given | change))
