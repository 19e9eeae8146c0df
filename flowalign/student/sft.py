"""Cold start by supervised fine-tuning: flow matching on images of the routed teachers.

Every update samples fresh images, each by the teacher of its task. At x_sigma = (1 - sigma) x0 +
sigma eps the student's velocity is fitted to eps - x0 (2210.02747, eq. 23 for this path).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import SftStage
from flowalign.loop import Pairs, Prepared
from flowalign.losses import velocity_error
from flowalign.rollout import Noise, OnImages, Schedule
from flowalign.teachers.bank import Bank
from flowalign.types import Rollout, Source, StepLoss

SFT = 2  # beside (seed, update) in a seed: these draws are not the rollout's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets(Prepared):
    """A rollout whose states are noised images."""

    velocity: Tensor  # [B,S,C,h,w] eps - x0 at the states


class Sft:
    """The algorithm. The teachers of `bank` sample without noise.

    Each image is learnt from at `sft.states` noise levels an update, which all images of the update
    share. They are stratified over the shift of the teachers' schedule:
    sigma = shift u / (1 + (shift - 1) u), u in (0, 1).
    """

    needs_images, needs_latents = False, True
    on_images: OnImages | None = None

    def __init__(self, config: SftStage, backbone: Backbone, bank: Bank) -> None:
        self.bank, self.seed, self.states = bank, config.seed, config.sft.states
        self.guidance, self.shift = config.guidance, backbone.shift
        self.schedule = Schedule(backbone.sigmas(config.rollout.steps), "ode", 0.0, None)

    def plan(self, update: int) -> Schedule:
        """To the end, by Euler steps; no state on the way is kept."""
        return self.schedule

    def sources(self, tasks: list[str]) -> list[Source]:
        """Each image is sampled by its task's teacher."""
        return self.bank.sources(tasks)

    def prepare(self, rollout: Rollout, update: int) -> Targets:
        """Noise the teachers' latents: the states and target velocities of this update."""
        assert rollout.latents is not None
        rng = np.random.default_rng([self.seed, update, SFT])
        u = torch.from_numpy((np.arange(self.states) + rng.random(self.states)) / self.states)
        u = u.flip(0).float()
        sigmas = self.shift * u / (1 + (self.shift - 1) * u)  # [S], falling
        clean = rollout.latents[:, None]  # [B,1,C,h,w]
        own = Noise((self.seed, update, SFT))
        drawn = [
            own.draw(prompt, copy, clean.shape[2:], self.states - 1)
            for prompt, copy in zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True)
        ]
        noise, sigma = torch.stack(drawn).to(clean), sigmas.to(clean)[:, None, None, None]
        noised = dataclasses.replace(
            rollout,
            states=(1 - sigma) * clean + sigma * noise,
            steps=list(range(self.states)),
            sigmas=torch.cat([sigmas, torch.zeros(1)]),  # [S+1], as of a schedule
        )
        return Targets(
            rollout=noised,
            keep=torch.ones(len(rollout), dtype=torch.bool),
            metrics={},
            notes=[""] * len(rollout),
            velocity=noise - clean,
        )

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Targets) -> StepLoss:
        """The mean of |v - (eps - x0)|^2."""
        target = prepared.velocity[pairs.rows, pairs.columns]
        error = velocity_error(velocity, target).mean()
        return StepLoss(total=error, distill=error)

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Nothing."""
        return {}
