"""Advantage weighted matching (2509.25050): GRPO whose likelihood is that of flow matching.

The log-probability of an image is minus its matching error at a noise level, so that any sampler
will do. configs/tiny/teacher_ocr_awm.yaml is a run.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flowalign import sde
from flowalign.teachers.forward import Forward, Matched
from flowalign.teachers.scored import ratio_metrics
from flowalign.training.algorithm import Pairs
from flowalign.training.losses import policy_loss, velocity_error
from flowalign.types import Rollout, StepLoss

ROOT_FLOOR = 1e-10  # keeps the roots of the weightings differentiable at an error of 0


class Awm(Forward):
    """The algorithm. The student samples."""

    def prepare(self, rollout: Rollout, update: int) -> Matched:
        """Without an advantage only the distances to base and average have a gradient."""
        prepared = super().prepare(rollout, update)
        s = self.settings
        near = s.kl_weight > 0 or s.ema_kl_weight > 0
        return replace(prepared, keep=prepared.keep | near)

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Matched) -> StepLoss:
        """The clipped policy loss on surrogate likelihoods, at the same noise and level, plus
        kl_weight times the drift from the base and ema_kl_weight times that from the average.

        Departure: the authors' code divides the advantages by advantage_clip; see there.
        """
        s = self.settings
        target = prepared.velocity[pairs.rows, pairs.columns]
        new, old = (
            awm_log_prob(v, target, pairs.sigma, weighting=s.weighting, power=s.ghuber_power)
            for v in (velocity, self.old_velocity(pairs, velocity))
        )
        advantage = prepared.advantage[pairs.rows]
        elements, ratio = policy_loss(new, old, advantage, clip_range=s.clip_range)
        total, drift = self.near_base(elements.mean(), pairs, velocity)
        if s.ema_kl_weight > 0:
            average = self.velocity_of("average", pairs)
            total = total + s.ema_kl_weight * velocity_error(velocity, average).mean()
        return StepLoss(total, {**ratio_metrics(ratio, s.clip_range), **drift})


def awm_log_prob(
    velocity: Tensor, target: Tensor, sigma: Tensor, *, weighting: str, power: float = 0.25
) -> Tensor:
    """The surrogate log-likelihood [B] of AWM (2509.25050): minus the matching error, weighted.

    m = mean |v - target|^2 over C, h, w, and t = sigma:
        uniform  -m           (the paper's choice)
        t, t2    -t m, -t^2 m
        huber    -t (sqrt(m + 1e-10) - 1e-5)
        ghuber   -t ((m + 1e-10)^power - 1e-10^power) / power   (the default of the authors' code)
    Departure: the code computes in float64 and stores float32; here it has the velocity's dtype,
    so that a ratio is exactly 1 where the weights are those that sampled.
    """
    error = sde.image_mean((velocity - target.detach().to(velocity.dtype)) ** 2)
    t = sigma.to(error.dtype)
    if weighting == "uniform":
        return -error
    if weighting in ("t", "t2"):
        return -(t if weighting == "t" else t**2) * error
    if weighting == "huber":
        return -t * ((error + ROOT_FLOOR).sqrt() - ROOT_FLOOR**0.5)
    return -t * ((error + ROOT_FLOOR) ** power - ROOT_FLOOR**power) / power
