"""losses.py: the clipped loss, its gradient, the shapes that it refuses, and the KLs of GRPO."""

import pytest
import torch
from torch.testing import assert_close

from flowalign import sde
from flowalign.training.losses import (
    clip_fraction,
    guard_log_ratio,
    guard_weights,
    kl_factors,
    policy_loss,
)


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


def test_the_ratio_of_equal_log_probs_is_exactly_one():
    log_prob = torch.randn(5, generator=torch.Generator().manual_seed(0))
    advantage = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    loss, ratio = policy_loss(log_prob, log_prob.clone(), advantage, clip_range=1e-5)
    assert torch.equal(ratio, torch.ones(5))
    assert torch.equal(loss, -advantage)


def test_the_gradient_at_ratio_one_is_that_of_the_policy_gradient():
    _, _, gradient = loss_at([1.0] * 3, [0.3, -1.0, 4.0], clip_range=1e-5)
    assert_close(gradient, -torch.tensor([0.3, -1.0, 4.0], dtype=torch.float64))


def test_only_log_prob_carries_gradient():
    log_prob, old, advantage = (torch.full((2,), 0.1, requires_grad=True) for _ in range(3))
    loss, _ = policy_loss(log_prob, old, advantage, clip_range=0.2)
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
    x, new, base = (
        torch.randn(10, 2, 3, 3, generator=generator, dtype=torch.float64) for _ in range(3)
    )
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


def transitions(count, change, noise_level=0.7, dtype=torch.float64):
    """An old and a new policy at every step but the last of a schedule, `count` rows each: sigmas,
    steps, the new one's velocity, its transition, the old one's, and an x_next sampled from that.
    """
    sigmas = sde.sigmas(10, 3.0).to(dtype)
    steps = torch.arange(9).repeat_interleave(count)
    generator = torch.Generator().manual_seed(0)
    x, old, noise = (
        torch.randn(len(steps), 4, 8, 8, generator=generator, dtype=dtype) for _ in range(3)
    )
    shift = torch.randn(len(steps), 4, 8, 8, generator=generator, dtype=dtype)
    new = (old + change * shift).requires_grad_()

    def at(velocity):
        now, after = sigmas[steps], sigmas[steps + 1]
        return sde.transition(
            x, velocity, now, after, noise_level=noise_level, sigma_max=float(sigmas[1])
        )

    before = at(old)
    return sigmas, steps, new, at(new), before, sde.sample(before, noise)


def test_the_guard_ratio_and_its_gradient_are_the_published_ones():
    """Eq. 8 by way of the log-probabilities, evaluated apart: their difference, plus the shift of
    its mean, times the standard deviation."""
    _, _, velocity, new, old, x_next = transitions(2, 0.3)
    found = guard_log_ratio(new, old.mean, x_next)
    std = old.std.flatten()
    shift = ((new.mean - old.mean) ** 2).flatten(1).mean(1) / (2 * std**2)
    published = std * (sde.log_prob(new, x_next) - sde.log_prob(old, x_next) + shift)
    assert_close(found, published, rtol=1e-10, atol=1e-12)
    ours, theirs = (torch.autograd.grad(r.sum(), velocity, retain_graph=True)[0]
                    for r in (found, published))  # fmt: skip
    assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_the_guard_ratio_is_centred_and_of_one_scale_where_the_plain_one_is_neither():
    """The same change of velocity at every step, many draws of the noise."""
    sigmas, steps, _, new, old, x_next = transitions(400, 0.3)
    plain = (sde.log_prob(new, x_next) - sde.log_prob(old, x_next)).reshape(9, 400).detach()
    guard = guard_log_ratio(new, old.mean, x_next).reshape(9, 400).detach()
    error = lambda rows: rows.mean(1) / (rows.std(1) / 20)  # noqa: E731  in standard errors
    assert bool((error(plain) < -2).all())  # its mean is below 0
    assert bool((error(guard).abs() < 3.5).all())
    weighted = guard * guard_weights(sigmas)[:9, None]
    spread = weighted.std(1)[1:]  # from sigma < 1 on, where the slope is dt (1 + a^2 / 2)
    assert float(spread.max() / spread.min()) < 1.15
    assert float(plain.std(1)[1:].max() / plain.std(1)[1:].min()) > 3


def test_the_guard_ratio_of_the_policy_that_sampled_is_exactly_one():
    _, _, _, new, old, x_next = transitions(2, 0.0, dtype=torch.float32)
    assert torch.equal(guard_log_ratio(new, old.mean, x_next).exp(), torch.ones(18))


def test_guard_weights_even_out_the_gradient_by_the_velocity():
    """At the policy that sampled: the gradient of the weighted log-ratio is the noise times
    -(1 + a^2 / 2), whatever the step (the first has -1, as its sigma is 1)."""
    sigmas, steps, velocity, new, old, x_next = transitions(3, 0.0)
    ratio = guard_log_ratio(new, old.mean, x_next) * guard_weights(sigmas)[steps]
    (gradient,) = torch.autograd.grad(ratio.sum(), velocity)
    noise = (x_next - old.mean) / old.std
    slope = torch.where(steps == 0, 1.0, 1 + 0.7**2 / 2).double()[:, None, None, None]
    assert_close(gradient * 4 * 64, -slope * noise, rtol=1e-7, atol=1e-9)


def test_a_step_without_noise_has_no_guard_ratio():
    _, _, _, new, old, x_next = transitions(1, 0.1, noise_level=0.0)
    with pytest.raises(ValueError, match="no log-probability"):
        guard_log_ratio(new, old.mean, x_next)
