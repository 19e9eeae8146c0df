"""A teacher from the gradient of a reward: MEND (2610.05954).

An image moves in latent space along the gradient of its reward, as far as that pays. The velocity
at one late state of its trajectory is corrected so that it leads there. The targets are clean
images, so that models of few steps stay so. configs/tiny/teacher_preference_gradient.yaml is a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowalign import sde
from flowalign.config import GradientStage
from flowalign.rewards import as_reward
from flowalign.teachers.forward import WithPolicies, differing_share
from flowalign.teachers.scored import Credit
from flowalign.training import metrics
from flowalign.training.algorithm import STUDENT, Compared, Keeps, Pairs, Parts
from flowalign.training.rollout import clean_schedule
from flowalign.training.run.processes import Means
from flowalign.types import Rollout, Schedule, StepLoss

FACTOR = 1.1  # by which tau changes after a rollout


@dataclass(frozen=True, kw_only=True)
class Moved(Credit):
    """A rollout with what its images moved by."""

    shift: Tensor  # [B,C,h,w] (y - x) / sigma: what the old policy's velocity has too much
    weight: Tensor  # [B]


class Gradient(WithPolicies[Moved]):
    """The algorithm. Images of a prompt have one threshold, so that groups stay whole."""

    needs_groups = needs_gradients = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        vae = parts.backbone.pipe.vae
        if self.config.model.gradient_checkpointing and vae._supports_gradient_checkpointing:
            vae.enable_gradient_checkpointing()
        self.rewards = {name: as_reward(reward) for name, reward in parts.rewards.items()}
        self.names = sorted(self.rewards)
        self.tau = torch.full((1,), self.settings.tau, dtype=torch.float64)
        self.floor = torch.full((len(self.names),), -torch.inf, dtype=torch.float64)  # by task

    @classmethod
    def keeps(cls, config: GradientStage, updates: Sequence[int] | None = None) -> Keeps:
        """Images, their latents, one state each, and the shift of the velocity there."""
        updates = range(config.train.updates) if updates is None else updates
        shares = [differing_share(config, old, updates) for old in config.policies.values()]
        base = [Compared(None, 1.0)] * (config.forward.kl_weight > 0)
        return Keeps(
            images=True,
            latents=True,
            targets=["float32"],
            policies=list(config.policies),
            compared=base + [Compared(STUDENT, share) for share in shares],
            ascended=config.gradient.batch,
            candidates=len(config.gradient.lengths),
        )

    @classmethod
    def trained_steps(cls, config: GradientStage, update: int) -> tuple[int, ...]:
        return (config.trained_step,)

    def plan(self, update: int) -> Schedule:
        rollout, step = self.config.rollout, self.config.trained_step
        schedule = clean_schedule(self.backbone, rollout.steps, rollout.solver)
        return replace(schedule, window=(step, step + 1))

    def prepare(self, rollout: Rollout, update: int) -> Moved:
        """Move the images whose reward is below the threshold of their prompt."""
        credit, x = self.scored.credit(rollout, update), rollout.latents
        assert x is not None
        value, slope = self._value(rollout, x, slope=True)
        valid = value.isfinite() & slope.isfinite().flatten(1).all(1)
        task = torch.tensor([self.names.index(name) for name in rollout.batch.tasks])
        kappa = threshold(value, rollout.group, valid, self.settings.threshold)
        kappa = kappa.maximum(self.floor[task])
        below = valid & (value < kappa)
        index, gain = torch.zeros(len(x), dtype=torch.long), torch.zeros_like(value)
        moves = candidates(slope, self.settings.lengths)  # [J,B,C,h,w]
        if below.any():
            rows = below.nonzero().flatten()
            moved = [self._value(rollout, x + move.to(x), rows)[0] for move in moves]
            values, moves_of = torch.stack([value[rows], *moved]), moves[:, rows]
            chosen = choose(values, moves_of, kappa[rows], float(self.tau))
            index[rows] = chosen
            gain[rows] = values.gather(0, chosen[None])[0] - value[rows]
        still = torch.zeros_like(moves[:1])
        shift = torch.cat([still, moves])[index, torch.arange(len(x))]
        weight = torch.where(index > 0, 1.0, self.settings.kept_weight)
        sigma = float(rollout.schedule.sigmas[self.config.trained_step])
        measured = self._adapt(index > 0, gain, valid, kappa, task)
        return Moved(
            **vars(replace(credit, keep=valid, metrics={**credit.metrics, **measured})),
            shift=(shift / sigma).to(x),
            weight=weight.to(x),
        )

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Moved) -> StepLoss:
        """That of MEND, plus kl_weight times the drift from the base."""
        old = self.old_velocity(pairs, velocity)
        shift, weight = prepared.shift[pairs.rows], prepared.weight[pairs.rows]
        elements = gradient_loss(velocity, old, shift, pairs.sigma, weight)
        return StepLoss(*self.near_base(elements.mean(), pairs, velocity))

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """With the price of the distance and the floors, which earlier rollouts made."""
        return {**super().tensors(), "gradient": [self.tau, self.floor]}

    def _value(
        self, rollout: Rollout, x: Tensor, rows: Tensor | None = None, slope: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The rewards [n] (float64, on the CPU) of the images of latents x [B,C,h,w], of some rows;
        and with `slope` their gradients [n,C,h,w]. NaN where a reward fails."""
        rows = torch.arange(len(x)) if rows is None else rows
        values, slopes = [], []
        for part in rows.split(self.settings.batch):
            at = x[part].detach().requires_grad_(slope)
            with torch.set_grad_enabled(slope):
                value = self._reward(rollout, at, part)
            values.append(value.detach().double().cpu())
            if slope:
                (each,) = torch.autograd.grad(value.sum(), at)
                slopes.append(each.float().cpu())
        return torch.cat(values), torch.cat(slopes) if slope else torch.empty(0)

    def _reward(self, rollout: Rollout, x: Tensor, rows: Tensor) -> Tensor:
        """The rewards [b] of the images of latents x [b,C,h,w], each by that of its task."""
        images, batch = self.backbone.decoded(x), rollout.batch.select(rows.tolist())
        value = images.new_zeros(len(x))
        for name in dict.fromkeys(batch.tasks):
            own = [i for i, task in enumerate(batch.tasks) if task == name]
            part = batch.select(own)
            found = self.rewards[name].with_gradient(images[own], part.prompts, part.metadata)
            value = value.index_put((torch.tensor(own, device=value.device),), found.to(value))
        return value

    def _adapt(
        self, moved: Tensor, gain: Tensor, valid: Tensor, kappa: Tensor, task: Tensor
    ) -> dict[str, float]:
        """After a rollout: tau, so that a share of the images moves that the config says; and the
        floors, which follow the thresholds upward. The same on every process. Returns what is
        logged."""
        means = Means()
        means.add_sum(metrics.MOVED_SHARE, float(moved.sum()), int(valid.sum()))
        means.add_sum(metrics.MOVED_GAIN, float(gain[moved].sum()), int(moved.sum()))
        for number, name in enumerate(self.names):
            own = kappa[valid & (task == number)]
            means.add_sum(f"kappa/{name}", float(own.sum()), len(own))
        found, (low, high) = means.over_processes(), self.settings.moved
        if found[metrics.MOVED_SHARE] > high:
            self.tau /= FACTOR
        elif found[metrics.MOVED_SHARE] < low:
            self.tau *= FACTOR
        for number, name in enumerate(self.names):
            now, floor = found.pop(f"kappa/{name}"), float(self.floor[number])
            if math.isfinite(now) and floor == -torch.inf:  # its first rollout: from below
                self.floor[number] = now - abs(now) * self.settings.rise
            elif now > floor:
                self.floor[number] += self.settings.rise * (now - floor)
        return {**found, metrics.TAU: float(self.tau)}


def threshold(value: Tensor, group: Tensor, valid: Tensor, share: float) -> Tensor:
    """MEND's threshold [B]: of each image's group the quantile of its valid rewards [B]; NaN for a
    group without one."""
    found = torch.full_like(value, torch.nan)
    for number in group.unique():
        rows = group == number
        if (own := value[rows & valid]).numel():
            found[rows] = own.quantile(share)
    return found


def candidates(slope: Tensor, lengths: Sequence[float]) -> Tensor:
    """MEND's moves [J,B,C,h,w]: eta g / rms(g) of gradients g [B,C,h,w], for each length eta. 0
    where the gradient is 0."""
    rms = sde.image_mean(slope**2).sqrt()[:, None, None, None]
    unit = slope / rms.where(rms > 0, 1.0)
    return torch.stack([eta * unit for eta in lengths])


def choose(values: Tensor, moves: Tensor, kappa: Tensor, tau: float) -> Tensor:
    """The candidate [B] of each image by MEND's min(R(y), kappa) - mean |y - x|^2 / (2 tau): 0 = it
    stays. values [1+J,B]: of the images themselves, then of the candidates; moves [J,B,C,h,w].
    Of equals the nearer one."""
    distance = torch.stack([sde.image_mean(move.double() ** 2) for move in moves])
    distance = torch.cat([torch.zeros_like(distance[:1]), distance])
    merit = values.minimum(kappa) - distance / (2 * tau)
    return merit.nan_to_num(-torch.inf).argmax(0)


def gradient_loss(
    velocity: Tensor, old: Tensor, shift: Tensor, sigma: Tensor, weight: Tensor
) -> Tensor:
    """The loss [B] of MEND: weight |x0(v) - (x0(v_old) + d)|^2, with x0(v) = x - sigma v and the
    move d = sigma shift: weight sigma^2 mean |v - (v_old - shift)|^2.

    velocity, old, shift [B,C,h,w]; sigma, weight [B]. Only velocity carries gradient.
    """
    target = (old - shift.to(old.dtype)).detach()
    error = sde.image_mean((velocity - target.to(velocity.dtype)) ** 2)
    return weight * sigma.to(error.dtype) ** 2 * error
