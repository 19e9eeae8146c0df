"""Cold start by supervised fine-tuning: flow matching on images of the routed teachers.

Every update samples fresh images, each by the teacher of its task. At x_sigma = (1 - sigma) x0 +
sigma eps the student's velocity is fitted to eps - x0 (2210.02747, eq. 23 for this path).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from flowalign.config import SftStage
from flowalign.training.algorithm import Algorithm, Keeps, Pairs, Prepared
from flowalign.training.losses import velocity_error
from flowalign.training.noising import noised, stratified
from flowalign.training.rollout import Stream
from flowalign.types import Rollout, Source, StepLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets(Prepared):
    """A rollout whose states are noised images."""

    velocity: Tensor  # [B,S,C,h,w] eps - x0 at the states

    @staticmethod
    def of(states: Rollout, velocity: Tensor) -> Targets:
        """Targets in which all images carry gradient, without notes."""
        keep = torch.ones(len(states), dtype=torch.bool)
        notes = [""] * len(states)
        return Targets(rollout=states, keep=keep, metrics={}, notes=notes, velocity=velocity)


class Sft(Algorithm[Targets]):
    """The algorithm. The teachers sample without noise.

    Each image is learnt from at `sft.noise_levels` levels an update, which all images of the update
    share. They are stratified over the shift of the teachers' schedule:
    sigma = shift u / (1 + (shift - 1) u), u in (0, 1).
    """

    needs_groups = False

    @classmethod
    def keeps(cls, config: SftStage, updates: Sequence[int] | None = None) -> Keeps:
        """It keeps the teachers' latents, and noised states with the velocity to match."""
        count = config.sft.noise_levels
        return Keeps(latents=True, noise_levels=count, targets=["float32"], taught_images=True)

    def sources(self, tasks: list[str]) -> list[Source]:
        assert self.teachers
        return self.teachers.sources(tasks)

    def prepare(self, rollout: Rollout, update: int) -> Targets:
        key = (self.config.seed, update, Stream.SFT)
        shift = self.backbone.shift(self.config.rollout.steps)
        levels = stratified(shift, self.config.sft.noise_levels, key)
        return Targets.of(*noised(rollout, levels, key))

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Targets) -> StepLoss:
        """The mean of |v - (eps - x0)|^2."""
        target = prepared.velocity[pairs.rows, pairs.columns]
        return StepLoss(velocity_error(velocity, target).mean())
