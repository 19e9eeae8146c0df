"""DiffusionNFT (2509.16117): a teacher learns from clean images what to move to and away from.

An old policy samples, by any solver. Each image pulls a positive branch of the velocity, and pushes
a negative one, in proportion to how good it is in its group. configs/tiny/teacher_ocr_nft.yaml is a
run.
"""

from __future__ import annotations

from torch import Tensor

from flowalign.teachers.forward import Forward, Matched, keeping
from flowalign.training.algorithm import Pairs
from flowalign.training.matching import chosen_advantage, nft_loss, optimality
from flowalign.types import Rollout, StepLoss


class Nft(Forward):
    """The algorithm."""

    def prepare(self, rollout: Rollout, update: int) -> Matched:
        """An image without an advantage (r = 1/2) has no gradient while the student is the old
        policy: it then only keeps the student near it, and near the base."""
        prepared, s = super().prepare(rollout, update), self.settings
        several = self.config.optimizer.updates_per_rollout > 1
        moved = self.old is not None and (several or not self.old.is_student)
        advantage = chosen_advantage(prepared.advantage, s.adv_mode)
        return keeping(prepared, moved or s.kl_weight > 0, advantage)

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Matched) -> StepLoss:
        """advantage_clip times the loss of NFT, plus kl_weight times the drift from the base."""
        s = self.settings
        target = prepared.velocity[pairs.rows, pairs.columns]
        r = optimality(prepared.advantage[pairs.rows], s.advantage_clip)
        old = self.old_velocity(pairs, velocity)
        elements = nft_loss(velocity, old, target, pairs.sigma, r, beta=s.beta)
        policy = s.advantage_clip * elements.mean()
        total, measured = self.near_base(policy, pairs, velocity)
        return StepLoss(total=total, policy=policy, metrics=measured)
