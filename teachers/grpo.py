"""Single-reward teachers: the loop with group-relative policy optimisation.

Flow-GRPO (2505.05470): rollouts by an SDE, advantages relative to the K images of a prompt, the
clipped ratio of PPO at every trained step, and optionally a KL to the base model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowalign import sde
from flowalign.config import GrpoStage
from flowalign.teachers.scored import Credit, Scored, ratio_metrics
from flowalign.training import metrics
from flowalign.training.algorithm import Algorithm, Compared, Keeps, Pairs, Parts
from flowalign.training.losses import kl_factors, policy_loss
from flowalign.training.rollout import schedule_of
from flowalign.types import Gaussian, Rollout, Schedule, StepLoss


class Grpo(Algorithm[Credit]):
    needs_groups = False

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.settings = parts.config.grpo
        self.scored = Scored(parts, self.settings)
        self.on_images = self.scored.on_images

    @classmethod
    def keeps(cls, config: GrpoStage, updates: Sequence[int] | None = None) -> Keeps:
        """Images and actions, and the base where the loss has a KL."""
        return Keeps(
            images=True,
            latents=True,
            actions=True,
            compared=[Compared(None, 1.0)] if config.grpo.kl_weight > 0 else [],
        )

    def plan(self, update: int) -> Schedule:
        return schedule_of(self.config, self.backbone, update)

    def prepare(self, rollout: Rollout, update: int) -> Credit:
        """Score the images. Images without an advantage are dropped, from the KL as well, as in
        Flow-GRPO: otherwise the KL would grow with the number of groups of equal rewards."""
        return self.scored.credit(rollout, update)

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Credit) -> StepLoss:
        """The clipped policy loss, plus kl_weight times the KL to the base."""
        s, x = self.settings, pairs.x
        schedule = prepared.rollout.schedule
        advantage = prepared.advantage[pairs.rows]
        new = sde.scheduled_transition(schedule, x, velocity, pairs.steps)
        x_next, old = pairs.action()
        log_prob = sde.log_prob(new, x_next)
        elements, ratio = policy_loss(log_prob, old, advantage, clip_range=s.clip_range)
        total = elements.mean()
        measured = ratio_metrics(ratio, s.clip_range)
        if s.kl_weight > 0:
            kl = self._kl(pairs, new, schedule)
            measured[metrics.KL] = float(kl.detach().mean())  # the exact one, whatever grpo.kl says
            factors = kl_factors(schedule.sigmas, s.kl).to(kl.device)[pairs.steps]
            total = total + s.kl_weight * (factors * kl).mean()
        return StepLoss(total, measured)

    def drift(self, pairs: Pairs, prepared: Credit) -> dict[str, float]:
        """The exact KL to the base; with a weight the loss has it at all pairs."""
        if self.settings.kl_weight > 0:
            return {}
        schedule = prepared.rollout.schedule
        new = sde.scheduled_transition(schedule, pairs.x, self.velocity(pairs), pairs.steps)
        return {metrics.KL: float(self._kl(pairs, new, schedule).mean())}

    def _kl(self, pairs: Pairs, new: Gaussian, schedule: Schedule) -> Tensor:
        """The KL [b] of the student's transitions to the base's."""
        base = self.velocity_of(None, pairs)
        return sde.kl(new, sde.scheduled_transition(schedule, pairs.x, base, pairs.steps))
