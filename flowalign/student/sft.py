"""Cold start by supervised fine-tuning: flow matching on images of the routed teachers.

Every update samples fresh images, each by the teacher of its task, and pulls the student's velocity
at x_sigma = (1 - sigma) x0 + sigma eps towards eps - x0 (2210.02747, eq. 23 for this path).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from flowalign.loop import Pairs, Prepared
from flowalign.losses import velocity_error
from flowalign.rollout import Noise, Schedule, See
from flowalign.teachers.bank import Bank
from flowalign.types import Rollout, Source, StepLoss

SFT = 2  # beside (seed, update): these draws are not the rollout's


class Sft:
    """The algorithm. sigmas [T+1] is the grid that the teachers sample on, without noise.

    Each image is learnt from at `states` noise levels an update, drawn evenly over the grid's own
    shift: sigma = shift u / (1 + (shift - 1) u), u stratified in (0, 1). They are shared by the
    images of an update.
    """

    needs_images, needs_latents = False, True
    see: See | None = None

    def __init__(
        self, bank: Bank, sigmas: Tensor, *, states: int, shift: float, guidance: float, seed: int
    ) -> None:
        self.bank, self.states, self.shift = bank, states, shift
        self.guidance, self.seed = guidance, seed
        self.schedule = Schedule(sigmas, "ode", 0.0, None)
        self.target = torch.empty(0)

    def plan(self, update: int) -> Schedule:
        """To the end, by Euler steps; nothing on the way is kept."""
        return self.schedule

    def sources(self, tasks: list[str]) -> list[Source]:
        """Each image is sampled by its task's teacher."""
        return self.bank.sources(tasks)

    def prepare(self, rollout: Rollout, update: int) -> Prepared:
        """Noise the teachers' latents: the states, and the target velocities, of this update."""
        assert rollout.latents is not None
        sigmas = self._sigmas(update)
        clean = rollout.latents[:, None]
        own = Noise((self.seed, update, SFT))
        drawn = [
            own.draw(prompt, copy, clean.shape[2:], self.states - 1)
            for prompt, copy in zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True)
        ]
        noise, sigma = torch.stack(drawn).to(clean), sigmas.to(clean)[:, None, None, None]
        self.target = noise - clean
        states = dataclasses.replace(
            rollout,
            states=(1 - sigma) * clean + sigma * noise,
            steps=list(range(self.states)),
            sigmas=torch.cat([sigmas, torch.zeros(1)]),
        )
        keep = torch.ones(len(rollout), dtype=torch.bool)
        return Prepared(keep=keep, metrics={}, captions=rollout.batch.prompts, states=states)

    def loss(self, pairs: Pairs, velocity: Tensor) -> StepLoss:
        """The mean of |v - (eps - x0)|^2."""
        error = velocity_error(velocity, self.target[pairs.rows, pairs.columns]).mean()
        return StepLoss(total=error, distill=error)

    def _sigmas(self, update: int) -> Tensor:
        """The noise levels of an update, [states], falling."""
        rng = np.random.default_rng([self.seed, update, SFT])
        u = torch.from_numpy((np.arange(self.states) + rng.random(self.states)) / self.states)
        u = u.flip(0).float()
        return self.shift * u / (1 + (self.shift - 1) * u)
