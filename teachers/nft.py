"""DiffusionNFT (2509.16117): a teacher learns from clean images what to move to and away from.

An old policy samples, by any solver. Each image pulls a positive branch of the velocity, and pushes
a negative one, in proportion to how good it is in its group. configs/tiny/teacher_ocr_nft.yaml is a
run.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flowalign import sde
from flowalign.teachers.forward import Forward, Matched
from flowalign.training.algorithm import Pairs
from flowalign.types import Rollout, StepLoss


class Nft(Forward):
    def prepare(self, rollout: Rollout, update: int) -> Matched:
        """An image without an advantage (r = 1/2) has no gradient while the student is the old
        policy: it then only keeps the student near it, and near the base."""
        prepared = super().prepare(rollout, update)
        s = self.settings
        moves = self.old is not None and self.config.optimizer.updates_per_rollout > 1
        keep = (prepared.advantage.cpu() != 0) | moves | self.lags | (s.kl_weight > 0)
        return replace(prepared, keep=keep)

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Matched) -> StepLoss:
        """advantage_clip times the loss of NFT, plus kl_weight times the drift from the base."""
        s = self.settings
        target = prepared.velocity[pairs.rows, pairs.columns]
        r = optimality(prepared.advantage[pairs.rows], s.advantage_clip)
        old = self.old_velocity(pairs, velocity)
        elements = nft_loss(velocity, old, target, pairs.sigma, r, beta=s.beta)
        policy = s.advantage_clip * elements.mean()
        return StepLoss(*self.near_base(policy, pairs, velocity))


# B elements, each one (image, noise level): x_sigma = (1 - sigma) x0 + sigma eps, whose velocity is
# the target eps - x0. The image that a velocity v predicts is x_sigma - sigma v; it is off by
# sigma (target - v), so that the loss does not need x_sigma itself.


def optimality(advantage: Tensor, limit: float) -> Tensor:
    """DiffusionNFT's r [B] in 0..1: A / (2 limit) + 1/2, the probability that an image is optimal.
    0.5 for an advantage of 0."""
    return (advantage / (2 * limit) + 0.5).clamp(0, 1)


def nft_loss(
    velocity: Tensor, old: Tensor, target: Tensor, sigma: Tensor, r: Tensor, *, beta: float
) -> Tensor:
    """The loss [B] of DiffusionNFT (2509.16117, eq. 5 and section 3.3), as its code has it.

        v+ = beta v + (1 - beta) v_old        v- = (1 + beta) v_old - beta v
        loss = (r L(v+) + (1 - r) L(v-)) / beta
        L(v) = mean |x0(v) - x0|^2 / w,   w = max(mean |x0(v) - x0|_1, 1e-5), without gradient

    velocity, old, target [B,C,h,w]; sigma, r [B]; means are over C, h, w. Only velocity carries
    gradient. Where v = v_old both branches agree, and the gradient is (2 r - 1) times that of L:
    matching the images, weighted by their advantages. The authors' code divides by beta, which the
    paper's eq. 5 does not: so the size of a step does not depend on beta there. It also multiplies
    by the limit of the advantages, which the caller does. It computes w in float64; here it has the
    dtype of the velocity.
    """
    old = old.detach().to(velocity.dtype)
    target = target.detach().to(velocity.dtype)
    positive = beta * velocity + (1 - beta) * old
    negative = (1 + beta) * old - beta * velocity
    r = r.to(velocity.dtype)
    good, bad = (x0_error(v, target, sigma) for v in (positive, negative))
    return (r * good + (1 - r) * bad) / beta


def x0_error(velocity: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """L [B]: the squared error of the predicted image over its mean absolute error."""
    error = sigma.to(velocity.dtype)[:, None, None, None] * (target - velocity)
    scale = sde.image_mean(error.detach().abs()).clamp_min(1e-5)
    return sde.image_mean(error**2) / scale
