"""Cold start by supervised fine-tuning: flow matching on images of the routed teachers.

Every update samples fresh images, each by the teacher of its task. At x_sigma = (1 - sigma) x0 +
sigma eps the student's velocity is fitted to eps - x0 (2210.02747, eq. 23 for this path).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import SftStage
from flowalign.teachers.bank import Bank
from flowalign.training.algorithm import Pairs, Prepared, Stateless
from flowalign.training.losses import velocity_error
from flowalign.training.noising import noised, stratified
from flowalign.training.rollout import OnImages, Schedule
from flowalign.types import Rollout, Source, StepLoss

SFT = 2  # beside (seed, update) in a seed: these draws are not the rollout's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets(Prepared):
    """A rollout whose states are noised images."""

    velocity: Tensor  # [B,S,C,h,w] eps - x0 at the states


class Sft(Stateless):
    """The algorithm. The teachers of `bank` sample without noise.

    Each image is learnt from at `sft.states` noise levels an update, which all images of the update
    share. They are stratified over the shift of the teachers' schedule:
    sigma = shift u / (1 + (shift - 1) u), u in (0, 1).
    """

    needs_images, needs_latents = False, True
    on_images: OnImages | None = None

    def __init__(self, config: SftStage, backbone: Backbone, bank: Bank) -> None:
        self.bank, self.seed, self.states = bank, config.seed, config.sft.states
        self.guidance, self.backbone, self.rollout = config.guidance, backbone, config.rollout

    def plan(self, update: int, bucket: int = 0) -> Schedule:
        """To the end, without noise; no state on the way is kept."""
        return Schedule.clean(self.backbone, self.rollout.steps, bucket, self.rollout.solver)

    def sources(self, tasks: list[str]) -> list[Source]:
        """Each image is sampled by its task's teacher."""
        return self.bank.sources(tasks)

    def prepare(self, rollout: Rollout, update: int) -> Targets:
        """Noise the teachers' latents: the states and target velocities of this update."""
        key = (self.seed, update, SFT)
        shift = self.backbone.shift(self.rollout.steps, rollout.batch.bucket)
        states = noised(rollout, stratified(shift, self.states, key), key)
        return Targets(
            rollout=states.rollout,
            keep=torch.ones(len(rollout), dtype=torch.bool),
            metrics={},
            notes=[""] * len(rollout),
            velocity=states.velocity,
        )

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Targets) -> StepLoss:
        """The mean of |v - (eps - x0)|^2."""
        target = prepared.velocity[pairs.rows, pairs.columns]
        error = velocity_error(velocity, target).mean()
        return StepLoss(total=error, distill=error)

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Nothing."""
        return {}
