"""losses.py, distillation: its weights are the KL's, its gradients those that are claimed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from flowalign import sde
from flowalign.training.losses import kl_factors, published_loss, step_weights, velocity_error
from flowalign.types import Gaussian

GOLDEN = Path(__file__).parent / "golden"
VECTORS = json.loads((GOLDEN / "opd_loss.json").read_text())
TENSORS = load_file(GOLDEN / "opd_loss.safetensors")
SIGMAS = sde.sigmas(10, 3.0).double()


def latents(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def step(x: Tensor, velocity: Tensor, steps: Tensor, kind: str, noise_level: float) -> Gaussian:
    sigma, following, largest = SIGMAS[steps], SIGMAS[steps + 1], float(SIGMAS[1])
    options: Any = {"noise_level": noise_level, "kind": kind, "sigma_max": largest}
    return sde.transition(x, velocity, sigma, following, **options)


@pytest.mark.parametrize(("kind", "noise_level"), [("sde", 0.7), ("sde", 1.0), ("cps", 0.6)])
def test_kl_weights_give_the_written_kl_and_its_gradient(kind: str, noise_level: float) -> None:
    steps = torch.arange(9)
    x, student, teacher = (latents(9, 2, 3, 3, seed=seed) for seed in range(3))
    student.requires_grad_()
    weight = step_weights(SIGMAS, weighting="kl", kind=kind, noise_level=noise_level)[steps]
    ours = weight * velocity_error(student, teacher)
    written = sde.kl(
        step(x, student, steps, kind, noise_level), step(x, teacher, steps, kind, noise_level)
    )
    assert_close(ours, written, rtol=1e-10, atol=0)
    (gradient,) = torch.autograd.grad(ours.sum(), student)
    (expected,) = torch.autograd.grad(written.sum(), student)
    assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", ["sde", "cps", "ode"])
def test_the_other_weightings_are_what_their_papers_match(kind: str) -> None:
    steps, noise = torch.arange(9), 0.0 if kind == "ode" else 0.7
    x, student, teacher = (latents(9, 2, 3, 3, seed=seed) for seed in range(3))
    a, b = (step(x, v, steps, kind, noise).mean for v in (student, teacher))
    mean, plain = (
        step_weights(SIGMAS, weighting=name, kind=kind, noise_level=noise)[steps]
        for name in ("mean", "velocity")
    )
    error = velocity_error(student, teacher)
    assert_close(mean * error, ((a - b) ** 2).mean((1, 2, 3)), rtol=1e-10, atol=1e-15)
    assert_close(plain * error, ((student - teacher) ** 2).mean((1, 2, 3)))


def test_the_published_weights_lie_on_one_step() -> None:
    """FACTS 10: without dt, 76 % of the weight is on step 8 of 10 and 1.2 % on the first five."""
    share = step_weights(SIGMAS, weighting="published", noise_level=0.7)[:9]
    share = share / share.sum()
    assert float(share[8]) == pytest.approx(0.76, abs=0.005)
    assert float(share[:5].sum()) == pytest.approx(0.012, abs=0.0005)


@pytest.mark.parametrize("mode", ["gkd", "kl_only", "mixed"])
def test_the_published_loss_and_gradient(mode: str) -> None:
    cases = [case for case in VECTORS["cases"] if case["train"]["reward_mode"] == mode]
    assert cases
    for case in cases:
        given, train = VECTORS["inputs"][case["inputs"]], case["train"]
        name, label = f"in.{case['inputs']}", f"{case['inputs']} {case['config']}"
        x, teacher, base, x_next, old, task = (
            TENSORS[f"{name}.{key}"]
            for key in ("x", "v_teacher", "v_base", "next_latents", "old_log_prob",
                        "task_advantage")
        )  # fmt: skip
        velocity = TENSORS[f"{name}.v_theta"].clone().requires_grad_()
        steps, noise = torch.tensor(given["step_index"]), given["noise_level"]
        weight = step_weights(SIGMAS, weighting="published", noise_level=noise)[steps]
        distance = weight * velocity_error(velocity, teacher)
        recorded = pytest.approx(given["kl_code"], rel=1e-6, abs=1e-12)
        assert distance.detach().tolist() == recorded, label
        if mode == "gkd":  # pathwise, in our words
            loss = distance.mean()
        else:
            log_prob = sde.log_prob(step(x, velocity, steps, "sde", noise), x_next)
            mixed, reward = task if mode == "mixed" else 0.0, -distance
            clips = {"clip_range": train["clip_range"], "advantage_clip": train["adv_clip_max"]}
            reward = train["kl_scale"] * reward
            loss = published_loss(reward, log_prob, old, advantage=mixed, **clips)[0].mean()
        loss = loss + train["beta"] * (weight * velocity_error(velocity, base)).mean()  # MAR
        assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-6, abs=1e-12), label
        (gradient,) = torch.autograd.grad(loss, velocity)
        expected = TENSORS[f"{case['prefix']}.grad_v_theta"]
        largest = float(expected.abs().max())
        assert_close(gradient, expected, rtol=1e-6, atol=1e-6 * largest, msg=label)


def test_the_published_kl_of_grpo() -> None:
    """Without any advantage their loss is beta times the KL to the base."""
    cases = [case for case in VECTORS["cases"] if case["config"] == "kl_only_scale0"]
    assert cases
    for case in cases:
        given, name = VECTORS["inputs"][case["inputs"]], f"in.{case['inputs']}"
        x, velocity, base = (TENSORS[f"{name}.{key}"] for key in ("x", "v_theta", "v_base"))
        steps, noise = torch.tensor(given["step_index"]), given["noise_level"]
        exact = sde.kl(step(x, velocity, steps, "sde", noise), step(x, base, steps, "sde", noise))
        ours = case["train"]["beta"] * (kl_factors(SIGMAS, "published")[steps] * exact).mean()
        assert float(ours) == pytest.approx(case["expected"]["loss"], rel=1e-6), name


def test_the_exact_kl_is_that_of_the_project_page() -> None:
    """Theirs sums over the dimensions of a latent, ours is the mean."""
    for name, given in VECTORS["inputs"].items():
        velocity, teacher = TENSORS[f"in.{name}.v_theta"], TENSORS[f"in.{name}.v_teacher"]
        steps = torch.tensor(given["step_index"])
        weight = step_weights(SIGMAS, weighting="kl", noise_level=given["noise_level"])[steps]
        ours = weight * velocity_error(velocity, teacher) * velocity[0].numel()
        if (steps > 0).all():  # on the first step the page's formula has 1 - sigma = 0
            recorded = pytest.approx(given["kl_page_formula"], rel=1e-6, abs=1e-12)
            assert ours.tolist() == recorded, name
