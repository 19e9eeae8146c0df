"""Losses of the policy and of distillation. Pure tensors. B elements, each one (image, step).

There is one formula for a step (`sde.transition`) and one for its KL (`sde.kl`); what follows
from them is here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowalign import sde


def policy_loss(
    log_prob: Tensor, old_log_prob: Tensor | None, advantage: Tensor, *, clip_range: float
) -> tuple[Tensor, Tensor]:
    """The clipped loss of PPO (1707.06347, eq. 7, negated) and the ratio rho, both [B].

    rho = exp(log_prob - old_log_prob); loss = max(-A rho, -A clip(rho, 1 - eps, 1 + eps)).
    Only log_prob carries gradient: old_log_prob and advantage are detached. Without old_log_prob
    the old policy is the new one, and rho is 1. Departure from
    Flow-OPD's code: there the advantage leaks gradient (`published_loss`) and is [B,1], so that
    the loss is [B,B]; here any shape but [B] is refused.
    """
    return _clipped(log_prob, old_log_prob, advantage.detach(), clip_range)


def published_loss(
    distance: Tensor,
    log_prob: Tensor,
    old_log_prob: Tensor | None,
    *,
    clip_range: float,
    advantage_clip: float,
    advantage: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Flow-OPD's own arithmetic (`kl_only`, and `mixed` with a task's advantage) and rho, both [B].

    distance [B] is the velocity distance under the weighting "published"; the advantage
    A = clip(advantage - distance, +- advantage_clip) is NOT detached, which is why it learns: at
    rho = 1 its gradient is that of the distance, plus a score term of expectation zero. Departure:
    the loss is per element; the published code broadcasts [B,1] with [B] to [B,B].
    """
    total = (advantage - distance).clamp(-advantage_clip, advantage_clip)
    return _clipped(log_prob, old_log_prob, total, clip_range)


def _clipped(
    log_prob: Tensor, old_log_prob: Tensor | None, advantage: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    if old_log_prob is None:
        old_log_prob = log_prob
    shapes = [list(t.shape) for t in (log_prob, old_log_prob, advantage)]
    if log_prob.ndim != 1 or shapes != [shapes[0]] * 3:
        raise ValueError(
            f"log_prob, old_log_prob and advantage must all be [B], got {shapes}; "
            "flatten them, or they broadcast to [B,B]"
        )
    ratio = torch.exp(log_prob - old_log_prob.detach())  # of means over C, h, w: near 1
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantage * ratio, -advantage * clipped), ratio


def clip_fraction(ratio: Tensor, clip_range: float) -> Tensor:
    """The share (a scalar) of the ratios [B] that lie outside 1 +- clip_range."""
    return ((ratio.detach() - 1).abs() > clip_range).float().mean()


def velocity_error(velocity: Tensor, target: Tensor) -> Tensor:
    """|v - v_target|^2 [B], the MEAN over C, h, w, in float32; target carries no gradient."""
    return sde.image_mean((velocity - target.detach().to(velocity.dtype)) ** 2)


def kl_factors(sigmas: Tensor, form: str) -> Tensor:
    """Factors [T] that turn `sde.kl` at each step into the KL of that name. sigmas [T+1].

    exact      1
    published  -dt: Flow-GRPO's and Flow-OPD's code divides by 2 s^2, where the variance of a
               transition is std^2 = s^2 (-dt). Their betas belong to it: over ten steps of
               shift 3 (all but the last) it is 3.7 to 25 times smaller.
    """
    return sigmas[:-1] - sigmas[1:] if form == "published" else torch.ones_like(sigmas[1:])


def step_weights(
    sigmas: Tensor, *, weighting: str, kind: str = "sde", noise_level: float = 0.0
) -> Tensor:
    """Weights w [T]: a step's distance is w * |v - v_teacher|^2. sigmas [T+1] of the rollout.

    The mean of a transition is linear in the velocity, mean = .. + slope * v, so with it
        kl         slope^2 / (2 std^2): the exact reverse KL of the two transitions, `sde.kl`
                   (Flow-OPD 2605.08063, on its project page)
        published  kl times (-dt): Flow-OPD's code, see `kl_factors`
        mean       slope^2: the distance of the means (DiffusionOPD, 2605.15055)
        velocity   1 (DanceOPD, 2606.27377)
    A step without noise has no KL: there w is infinite under "kl" and "published".
    """
    count = len(sigmas) - 1
    if weighting == "velocity":
        return torch.ones(count)
    sigma = sigmas[:-1].cpu()
    following = sigmas[1:].cpu()
    sigma_max = float(sigmas[min(1, count - 1)])
    v = torch.ones(count, 1, 1, 1, dtype=sigmas.dtype)
    unit = sde.transition(
        0 * v, v, sigma, following, noise_level=noise_level, kind=kind, sigma_max=sigma_max
    )
    squared = unit.mean.flatten() ** 2  # slope^2: x = 0 and v = 1 leave only the slope
    if weighting == "mean":
        return squared
    exact = squared / (2 * unit.std.flatten() ** 2)
    return exact * kl_factors(sigmas.cpu(), {"kl": "exact", "published": "published"}[weighting])
