"""A new algorithm, from outside the library: flow matching on the best image of every group.

Its package names the config class in the entry point group `flowalign.algorithms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flowalign.config import AdvantageConfig, RewardStage
from flowalign.teachers.scored import Credit, Scored
from flowalign.training.algorithm import Algorithm, Keeps, Pairs, Parts
from flowalign.training.losses import velocity_error
from flowalign.training.noising import noised, stratified
from flowalign.types import Rollout, StepLoss


class ToyConfig(AdvantageConfig):
    """How rewards become advantages, and at how many noise levels an image is learnt from."""

    noise_levels: int = 3
    """Noise levels."""


class ToyStage(RewardStage):
    """Imitate the best image of every group."""

    algorithm = "toy_algorithm:Toy"
    stage: Literal["toy"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from the best."""
    toy: ToyConfig = ToyConfig()

    @property
    def needs_actions(self) -> bool:
        """No ratio of policies."""
        return False


@dataclass(frozen=True, kw_only=True)
class Best(Credit):
    """Noised images, of which the best of each group are kept."""

    velocity: Tensor  # [B,S,C,h,w] eps - x0


class Toy(Algorithm[Best]):
    """The algorithm."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.scored = Scored(parts, self.config.toy)
        self.on_images = self.scored.on_images

    @classmethod
    def keeps(cls, config: ToyStage, updates: Sequence[int] | None = None) -> Keeps:
        """Images, their latents, and the velocity to match at each noise level."""
        return Keeps(
            images=True, latents=True, noise_levels=config.toy.noise_levels, targets=["float32"]
        )

    def prepare(self, rollout: Rollout, update: int) -> Best:
        """Score the images, keep the best of each group, add noise."""
        credit = self.scored.credit(rollout, update)
        best = torch.zeros(len(rollout), dtype=torch.bool)
        for group in rollout.group.unique():
            rows = (rollout.group == group).nonzero().flatten()
            best[rows[credit.advantage.cpu()[rows].argmax()]] = True
        key = (self.config.seed, update, 99)
        shift = self.backbone.shift(self.config.rollout.steps)
        states, target = noised(rollout, stratified(shift, self.config.toy.noise_levels, key), key)
        credit = replace(credit, rollout=states, keep=best)
        return Best(**vars(credit), velocity=target)

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Best) -> StepLoss:
        """The mean of |v - (eps - x0)|^2."""
        error = velocity_error(velocity, prepared.velocity[pairs.rows, pairs.columns]).mean()
        return StepLoss(error)
