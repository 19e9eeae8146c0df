"""losses.py: the clipped loss, its gradient, the shapes that it refuses, and the KLs of GRPO."""

import pytest
import torch
from torch.testing import assert_close

from flowalign import sde
from flowalign.training.losses import clip_fraction, kl_factors, policy_loss


def loss_at(ratio, advantage, clip_range=0.2):
    """Loss, ratio, and the gradient of the loss by the log-probability, for rows of ratios."""
    log_prob = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    old = torch.zeros(len(ratio), dtype=torch.float64)
    advantage = torch.tensor(advantage, dtype=torch.float64)
    loss, rho = policy_loss(log_prob, old, advantage, clip_range=clip_range)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss.detach(), rho.detach(), gradient


def test_loss_and_gradient_in_every_region_of_the_clip():
    """No gradient past the clip on the side that the advantage pushes to; all of it elsewhere."""
    rows = [  # ratio, advantage, loss, gradient
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # already far enough up
        (0.5, 2.0, -1.0, -1.0),  # too low: pulled back
        (1.0, -2.0, 2.0, 2.0),
        (0.5, -2.0, 1.6, 0.0),  # already far enough down
        (1.5, -2.0, 3.0, 3.0),  # too high: pushed back
        (1.5, 0.0, 0.0, 0.0),
    ]
    ratio, advantage, expected, slope = (list(column) for column in zip(*rows, strict=True))
    loss, rho, gradient = loss_at(ratio, advantage)
    assert_close(rho, torch.tensor(ratio, dtype=torch.float64))
    assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    assert_close(gradient, torch.tensor(slope, dtype=torch.float64))


def test_the_ratio_of_equal_log_probs_is_exactly_one_and_only_the_new_one_has_a_gradient():
    log_prob = torch.randn(4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    old = log_prob.detach().clone().requires_grad_()
    advantage = torch.tensor([-2.0, -1.0, 1.0, 2.0]).requires_grad_()
    loss, ratio = policy_loss(log_prob, old, advantage, clip_range=1e-5)
    assert torch.equal(ratio, torch.ones(4))
    assert torch.equal(loss, -advantage)
    loss.sum().backward()
    assert log_prob.grad is not None and bool((log_prob.grad != 0).all())
    assert old.grad is None and advantage.grad is None


@pytest.mark.parametrize("position", range(3))
def test_a_column_is_refused_where_it_would_broadcast(position):
    """The published [B,1] advantage times a ratio [B] is [B,B]."""
    given = [torch.zeros(3), torch.zeros(3), torch.zeros(3)]
    given[position] = torch.zeros(3, 1)
    with pytest.raises(ValueError, match=r"must all be \[B\].*\[3, 1\]"):
        policy_loss(*given, clip_range=0.2)


def test_clip_fraction_counts_both_sides():
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.5], requires_grad=True)
    share = clip_fraction(ratio, 0.2)
    assert float(share) == 0.5 and not share.requires_grad


def test_the_published_kl_is_the_exact_one_times_minus_dt_at_every_step():
    """Flow-GRPO and Flow-OPD divide by 2 s^2, where the variance of a transition is s^2 (-dt)."""
    sigmas = sde.sigmas(10, 3.0).double()
    generator = torch.Generator().manual_seed(0)
    x, new, base = torch.randn(3, 10, 2, 3, 3, generator=generator, dtype=torch.float64)
    sigma, following = sigmas[:-1], sigmas[1:]
    p, q = (
        sde.transition(x, v, sigma, following, noise_level=0.7, sigma_max=float(sigmas[1]))
        for v in (new, base)
    )
    s = 0.7 * (sigma / (1 - torch.where(sigma == 1, sigmas[1], sigma))).sqrt()
    theirs = ((p.mean - q.mean) ** 2).mean((1, 2, 3)) / (2 * s**2)
    exact, published = (kl_factors(sigmas, form) * sde.kl(p, q) for form in ("exact", "published"))
    assert_close(published, theirs, rtol=1e-10, atol=0)
    assert_close(published / exact, sigma - following, rtol=1e-10, atol=0)
    assert torch.equal(exact, sde.kl(p, q))
    stronger = (exact / published)[:9]  # at an equal beta, on the steps that are trained
    assert float(stronger.max()) == pytest.approx(25, rel=0.03)
    assert float(stronger.min()) == pytest.approx(3.7, rel=0.03)
