"""NFT and AWM are the published arithmetic, and that of the papers' own formulas."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from flowalign.teachers.awm import awm_log_prob
from flowalign.teachers.nft import nft_loss, optimality
from flowalign.training.losses import policy_loss, velocity_error

GOLDEN = Path(__file__).parent / "golden"
VECTORS = json.loads((GOLDEN / "forward_process.json").read_text())
TENSORS = load_file(GOLDEN / "forward_process.safetensors")
NAMES = {"Uniform": "uniform", "t**2": "t2"}
# the authors' choices of advantages, of which ours is the first
CHOSEN = {"all": lambda a: a, "positive_only": lambda a: a.clamp(min=0), "binary": torch.sign}
WEIGHTINGS = ("ghuber", "uniform", "t", "t2", "huber")


def cases(method: str) -> list[dict]:
    return [case for case in VECTORS["cases"] if case["method"] == method]


def inputs(case: dict) -> dict[str, Tensor]:
    names = ("x0", "noise", "sigma", "v", "v_old", "v_ref", "advantage")
    return {name: TENSORS[f"{case['inputs']}.{name}"] for name in names}


def ours(case: dict) -> tuple[Tensor, Tensor, Tensor]:
    """r and the loss with its KL of an NFT case, and its gradient by the velocity."""
    given = inputs(case)
    limit = case["adv_clip"]
    r = optimality(CHOSEN[case["adv_mode"]](given["advantage"].clamp(-limit, limit)), limit)
    v = given["v"].requires_grad_()
    target = given["noise"] - given["x0"]
    policy = limit * nft_loss(v, given["v_old"], target, given["sigma"], r, beta=case["beta"])
    total = policy.mean() + case["kl_weight"] * velocity_error(v, given["v_ref"]).mean()
    (gradient,) = torch.autograd.grad(total, v)
    return r, total.detach(), gradient


@pytest.mark.parametrize("case", cases("nft"), ids=lambda case: str(case["id"]))
def test_nft_is_the_published_arithmetic(case: dict) -> None:
    """Its `policy_loss` holds the KL, too: the code adds it in place."""
    r, loss, gradient = ours(case)
    assert_close(r, torch.tensor(case["r"], dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(loss) == pytest.approx(case["loss"], rel=1e-9)
    expected = TENSORS[f"{case['prefix']}.grad_v"]
    assert_close(gradient, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
def test_at_the_old_policy_nft_is_advantage_weighted_matching(beta: float) -> None:
    """There its gradient is (2 r - 1) times that of L, whatever beta is."""
    draw = torch.Generator().manual_seed(0)
    v, target = (torch.randn(5, 2, 4, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    sigma = torch.tensor([0.1, 0.4, 0.6, 0.9, 1.0], dtype=torch.float64)
    r = torch.tensor([0.0, 0.2, 0.5, 0.7, 1.0], dtype=torch.float64)
    v.requires_grad_()
    (gradient,) = torch.autograd.grad(nft_loss(v, v, target, sigma, r, beta=beta).sum(), v)
    # L = mean |sigma (target - v)|^2 / w, by hand
    error = v.detach() - target
    weight = (sigma[:, None, None, None] * error).abs().mean((1, 2, 3))
    slope = 2 * sigma**2 / (error[0].numel() * weight)
    expected = ((2 * r - 1) * slope)[:, None, None, None] * error
    assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert not gradient[2].abs().gt(1e-12).any()  # r = 1/2: the image has no say


def test_a_perfect_prediction_has_a_finite_gradient() -> None:
    v = torch.zeros(1, 1, 4, 4).requires_grad_()
    for loss in (
        nft_loss(v, v, v.detach(), torch.ones(1), torch.ones(1), beta=1.0),
        *(awm_log_prob(v, v.detach(), torch.ones(1), weighting=w) for w in WEIGHTINGS),
    ):
        (gradient,) = torch.autograd.grad(loss.sum(), v)
        assert float(loss.detach()) == pytest.approx(0, abs=1e-7) and not gradient.any()


def test_optimality_is_clipped() -> None:
    found = optimality(torch.tensor([-9.0, -5.0, 0.0, 2.5, 9.0]), 5.0)
    assert found.tolist() == [0, 0, 0.5, 0.75, 1]


@pytest.mark.parametrize("case", cases("awm"), ids=lambda case: str(case["id"]))
def test_awm_is_the_published_arithmetic(case: dict) -> None:
    given, target = inputs(case), inputs(case)["noise"] - inputs(case)["x0"]
    weighting = str(NAMES.get(case["weighting"], case["weighting"]))
    v, old = (
        awm_log_prob(
            velocity, target, given["sigma"], weighting=weighting, power=case["ghuber_power"]
        )
        for velocity in (given["v"].requires_grad_(), given["v_old"])
    )
    assert_close(v.detach(), torch.tensor(case["log_prob"], dtype=v.dtype), rtol=1e-6, atol=1e-7)
    assert_close(old, torch.tensor(case["old_log_prob"], dtype=v.dtype), rtol=1e-6, atol=1e-7)
    advantage = given["advantage"].clamp(-case["adv_clip"], case["adv_clip"])
    loss = policy_loss(v, old, advantage, clip_range=case["clip_range"])[0].mean()
    assert float(loss.detach()) == pytest.approx(case["policy_loss"], rel=1e-6, abs=1e-7)
    (gradient,) = torch.autograd.grad(loss, given["v"])
    expected = TENSORS[f"{case['prefix']}.grad_v"]
    assert_close(gradient, expected, rtol=1e-6, atol=2e-7 * float(expected.abs().max()))
