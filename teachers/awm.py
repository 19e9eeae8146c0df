"""Advantage weighted matching (2509.25050): GRPO whose likelihood is that of flow matching.

The log-probability of an image is minus its matching error at a noise level, so that any sampler
will do. configs/tiny/teacher_ocr_awm.yaml is a run.
"""

from __future__ import annotations

from torch import Tensor

from flowalign.teachers.forward import Forward, Matched, keeping
from flowalign.training import metrics
from flowalign.training.algorithm import Pairs
from flowalign.training.losses import clip_fraction, policy_loss, velocity_error
from flowalign.training.matching import awm_log_prob
from flowalign.types import Rollout, StepLoss


class Awm(Forward):
    """The algorithm. The student samples."""

    def prepare(self, rollout: Rollout, update: int) -> Matched:
        """Without an advantage only the distances to base and average have a gradient."""
        prepared, s = super().prepare(rollout, update), self.settings
        near = s.kl_weight > 0 or s.ema_kl_weight > 0
        return keeping(prepared, near, prepared.advantage)

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Matched) -> StepLoss:
        """The clipped policy loss on surrogate likelihoods, at the same noise and level, plus
        kl_weight times the drift from the base and ema_kl_weight times that from the average.

        Departure: the authors' code clips advantages to +- 5 and divides them by 5; Flow-Factory's
        clips them to +- 1, as here.
        """
        s = self.settings
        target = prepared.velocity[pairs.rows, pairs.columns]
        new, old = (
            awm_log_prob(v, target, pairs.sigma, weighting=s.weighting, power=s.ghuber_power)
            for v in (velocity, self.old_velocity(pairs, velocity))
        )
        advantage = prepared.advantage[pairs.rows]
        elements, ratio = policy_loss(new, old, advantage, clip_range=s.clip_range)
        policy = elements.mean()
        measured = {
            metrics.CLIP_FRACTION: float(clip_fraction(ratio, s.clip_range)),
            metrics.RATIO_ERROR: float((ratio.detach() - 1).abs().max()),
        }
        total, drift = self.near_base(policy, pairs, velocity)
        measured |= drift
        if s.ema_kl_weight > 0:
            average = self.policies["average"].velocity(pairs, self.guidance)
            total = total + s.ema_kl_weight * velocity_error(velocity, average).mean()
        return StepLoss(total=total, policy=policy, metrics=measured)
