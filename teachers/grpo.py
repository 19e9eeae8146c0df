"""Single-reward teachers: the loop with group-relative policy optimisation.

Flow-GRPO (2505.05470): rollouts by an SDE, advantages relative to the K images of a prompt, the
clipped ratio of PPO at every trained step, and optionally a KL to the base model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign import sde
from flowalign.backbone import Backbone
from flowalign.config import GrpoStage, OpdStage
from flowalign.teachers.scored import Credit, Scored
from flowalign.training import metrics
from flowalign.training.algorithm import Pairs, Stateless
from flowalign.training.losses import (
    clip_fraction,
    guard_log_ratio,
    guard_weights,
    kl_factors,
    policy_loss,
)
from flowalign.training.rollout import Schedule, window_of
from flowalign.types import Reward, Rollout, StepLoss


class Grpo(Stateless):
    """The algorithm. rewards: by task name."""

    needs_images = needs_latents = True

    def __init__(
        self,
        config: GrpoStage | OpdStage,
        backbone: Backbone,
        accelerator: Accelerator,
        rewards: Mapping[str, Reward],
    ) -> None:
        self.settings, self.backbone = config.grpo, backbone
        self.guidance = config.rollout.guidance
        self.schedules, self.seed = Schedule.each(config, backbone), config.seed
        self.rollout = config.rollout
        self.kl_factors = [kl_factors(s.sigmas, config.grpo.kl) for s in self.schedules]
        self.scored = Scored(config, config.grpo, accelerator, rewards)
        self.on_images = self.scored.on_images
        self.guard_weights = [guard_weights(s.sigmas) for s in self.schedules]

    def plan(self, update: int, bucket: int = 0) -> Schedule:
        """All steps of the update's window, which is a function of (seed, update)."""
        return replace(self.schedules[bucket], window=window_of(self.rollout, self.seed, update))

    def tensors(self) -> dict[str, list[Tensor]]:
        """What the advantages remember of earlier rollouts."""
        return self.scored.tensors()

    def sources(self, tasks: list[str]) -> None:
        """The student samples."""

    def prepare(self, rollout: Rollout, update: int) -> Credit:
        """Score the images. Without an advantage only the KL has a gradient."""
        credit = self.scored.credit(rollout, update)
        return replace(credit, keep=credit.keep | (self.settings.kl_weight > 0))

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Credit) -> StepLoss:
        """The clipped policy loss, plus kl_weight times the KL to the base. With the ratio of
        GRPO-Guard, the policy loss of a step is weighted by `losses.guard_weights`."""
        s, x, sigma, cond = self.settings, pairs.x, pairs.sigma, pairs.conditioning
        bucket = prepared.rollout.batch.bucket
        schedule = self.schedules[bucket]
        new = schedule.transition(x, velocity, pairs.steps)
        advantage = prepared.advantage[pairs.rows]
        x_next, old = pairs.action()
        if s.ratio == "guard":
            assert pairs.mean is not None
            log_ratio = guard_log_ratio(new, pairs.mean, x_next)
            elements, ratio = policy_loss(
                log_ratio, torch.zeros_like(log_ratio), advantage, clip_range=s.clip_range
            )
            elements = self.guard_weights[bucket].to(elements.device)[pairs.steps] * elements
        else:
            log_prob = sde.log_prob(new, x_next)
            elements, ratio = policy_loss(log_prob, old, advantage, clip_range=s.clip_range)
        policy = total = elements.mean()
        measured = {
            metrics.CLIP_FRACTION: float(clip_fraction(ratio, s.clip_range)),
            metrics.RATIO_ERROR: float((ratio.detach() - 1).abs().max()),
        }
        if s.kl_weight > 0 or pairs.first:  # without a weight one micro-batch is enough for the log
            with torch.no_grad(), self.backbone.base():
                reference = self.backbone.velocity(
                    x, sigma, cond, guidance=self.guidance, rows=pairs.size
                )
            kl = sde.kl(new, schedule.transition(x, reference, pairs.steps))
            measured[metrics.KL] = float(kl.detach().mean())  # the exact one, whatever grpo.kl says
            if s.kl_weight > 0:
                factors = self.kl_factors[bucket].to(kl.device)[pairs.steps]
                total = total + s.kl_weight * (factors * kl).mean()
        return StepLoss(total=total, policy=policy, metrics=measured)
