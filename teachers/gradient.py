"""A teacher from the gradient of a reward: MEND (2610.05954).

An image moves in latent space along the gradient of its reward, as long as the gain outweighs the
distance. The velocity at one late state of its trajectory is corrected so that it leads there. The
targets are clean images, so that models of few steps stay so.
configs/tiny/teacher_preference_gradient.yaml is a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowalign import sde
from flowalign.config import ConfigError, GradientStage
from flowalign.report.pictures import score_text
from flowalign.rewards.gradient import gradient_problems, value_with_gradient
from flowalign.teachers.forward import WithPolicies
from flowalign.teachers.scored import gathered, reward_metrics
from flowalign.training import metrics
from flowalign.training.algorithm import Keeps, Pairs, Parts, Prepared
from flowalign.training.rollout import clean_schedule
from flowalign.training.run.processes import Means
from flowalign.types import Problem, Rollout, Schedule, StepLoss

FACTOR = 1.1  # by which tau changes after a rollout


@dataclass(frozen=True, kw_only=True)
class Moved(Prepared):
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
        self.rewards = parts.rewards
        self.checked = False  # are the rewards' gradients?
        self.names = sorted(self.rewards)
        self.tau = torch.full((len(self.names),), self.settings.tau, dtype=torch.float64)
        self.floor = torch.full((len(self.names),), -torch.inf, dtype=torch.float64)

    @classmethod
    def keeps(cls, config: GradientStage, updates: Sequence[int] | None = None) -> Keeps:
        """Images, their latents, one state each, and the shift of the velocity there."""
        kept = super().keeps(config, updates)
        tried = len(config.gradient.lengths)
        return replace(kept, ascended=config.gradient.batch, candidates=tried)

    @classmethod
    def trained_steps(cls, config: GradientStage, update: int) -> tuple[int, ...]:
        return (config.trained_step,)

    def plan(self, update: int) -> Schedule:
        rollout, step = self.config.rollout, self.config.trained_step
        schedule = clean_schedule(self.backbone, rollout.steps, rollout.solver)
        return replace(schedule, window=(step, step + 1))

    def prepare(self, rollout: Rollout, update: int) -> Moved:
        """Move the images whose reward is below the threshold of their prompt. Raises ConfigError
        where a reward's gradient is wrong, TrainingError where it fails on too many images."""
        if not self.checked:
            self._check_gradients(rollout)
            self.checked = True
        x = rollout.latents
        assert x is not None
        reasons: set[str] = set()
        value, slope = self._slopes(rollout, x, reasons)
        valid = value.isfinite() & slope.isfinite().flatten(1).all(1)
        task = torch.tensor([self.names.index(name) for name in rollout.batch.tasks])
        measured = self._rewards_of_all(task, value, valid, reasons)
        quartile = threshold(value, rollout.group, valid, self.settings.threshold)
        kappa = quartile.maximum(self.floor[task])
        moves = candidates(slope, self.settings.lengths)  # [J,B,C,h,w]
        index = torch.zeros(len(x), dtype=torch.long)
        gain = torch.zeros_like(value)
        rows = (valid & (value < kappa)).nonzero().flatten()
        if len(rows):
            tried = [self._values(rollout, x + move.to(x), rows, reasons) for move in moves]
            values = torch.stack([value[rows], *tried])
            chosen = choose(values, moves[:, rows], kappa[rows], self.tau[task[rows]])
            index[rows] = chosen
            gain[rows] = values.gather(0, chosen[None])[0] - value[rows]
        still = torch.zeros_like(moves[:1])
        shift = torch.cat([still, moves])[index, torch.arange(len(x))]
        weight = torch.where(index > 0, 1.0, self.settings.kept_weight)
        sigma = float(rollout.schedule.sigmas[self.config.trained_step])
        return Moved(
            rollout=rollout,
            keep=valid,
            metrics=measured | self._adapt(index > 0, gain, valid, quartile, task),
            notes=list(map(score_text, value.tolist())),
            shift=(shift / sigma).to(x),
            weight=weight.to(x),
        )

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Moved) -> StepLoss:
        """The loss of MEND, plus kl_weight times the drift from the base."""
        old = self.old_velocity(pairs, velocity)
        shift, weight = prepared.shift[pairs.rows], prepared.weight[pairs.rows]
        elements = gradient_loss(velocity, old, shift, pairs.sigma, weight)
        return StepLoss(*self.near_base(elements.mean(), pairs, velocity))

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """The tensors of the policies, and each task's tau and floor, which earlier rollouts
        set."""
        return {**super().tensors(), "gradient": [self.tau, self.floor]}

    # Rewards -----------------------------------------------------------------------------------

    def _check_gradients(self, rollout: Rollout) -> None:
        """Raise ConfigError for rewards whose gradient is wrong at images of a rollout."""
        assert rollout.images is not None
        problems = []
        for index, task in enumerate(self.config.tasks):
            rows = [row for row, name in enumerate(rollout.batch.tasks) if name == task.name]
            if not rows:
                continue
            batch = rollout.batch.select(rows)
            inputs = rollout.images[rows], batch.prompts, batch.metadata
            for fault in gradient_problems(self.rewards[task.name], *inputs):
                text = f"gradient of {task.reward.name!r}: {fault}."
                problems.append(Problem(f"tasks.{index}.reward", text))
        # each process has other images
        if problems := sorted(set(gather_object(problems)), key=str):
            raise ConfigError(problems)

    def _slopes(self, rollout: Rollout, x: Tensor, reasons: set[str]) -> tuple[Tensor, Tensor]:
        """The rewards [B] (float64) of the images of latents x [B,C,h,w] and their gradients
        [B,C,h,w], both on the CPU. NaN where a reward or its gradient fails; `reasons` gets why."""
        values, slopes = [], []
        for rows in torch.arange(len(x)).split(self.settings.batch):
            at = x[rows].detach().requires_grad_()
            with torch.enable_grad():
                value = self._reward(rollout, at, rows, reasons)
            slope = torch.full_like(at, torch.nan)
            if value.requires_grad:  # it failed on some of the images at most
                (slope,) = torch.autograd.grad(value.sum(), at)
            if not slope.isfinite().all():
                reasons.add("its gradient is NaN or infinite")
            values.append(value.detach().double().cpu())
            slopes.append(slope.float().cpu())
        return torch.cat(values), torch.cat(slopes)

    @torch.no_grad()
    def _values(self, rollout: Rollout, x: Tensor, rows: Tensor, reasons: set[str]) -> Tensor:
        """The rewards [n] (float64, on the CPU) of the images of some rows of x [B,C,h,w]."""
        parts = rows.split(self.settings.batch)
        values = [self._reward(rollout, x[part], part, reasons) for part in parts]
        return torch.cat([value.double().cpu() for value in values])

    def _reward(self, rollout: Rollout, x: Tensor, rows: Tensor, reasons: set[str]) -> Tensor:
        """The rewards [b] of the images of latents x [b,C,h,w], each by that of its task; NaN where
        it fails."""
        images = self.backbone.decoded(x)
        batch = rollout.batch.select(rows.tolist())
        value = images.new_full((len(x),), torch.nan)
        for name in dict.fromkeys(batch.tasks):
            of_task = [row for row, task in enumerate(batch.tasks) if task == name]
            part = batch.select(of_task)
            try:
                scores = value_with_gradient(
                    self.rewards[name], images[of_task], part.prompts, part.metadata
                )
            except Exception as error:  # whatever the user's code raises
                reasons.add(f"{type(error).__name__}: {error}")
                continue
            index = torch.tensor(of_task, device=value.device)
            value = value.index_put((index,), scores.to(value))
        return value

    def _rewards_of_all(
        self, task: Tensor, value: Tensor, valid: Tensor, reasons: set[str]
    ) -> dict[str, float]:
        """What is logged of the rewards [B] of all processes. Raises TrainingError where too many
        images are invalid."""
        task, value, valid = (gathered(self.accelerator, t) for t in (task, value.float(), valid))
        limit = self.config.train.max_invalid_share
        return reward_metrics(self.names, task, value, valid, reasons, limit)

    def _adapt(
        self, moved: Tensor, gain: Tensor, valid: Tensor, quartile: Tensor, task: Tensor
    ) -> dict[str, float]:
        """Adapt each task after a rollout: tau, to keep the share of moved images in the config's
        range, and the floor, which follows the mean quartile upward. All processes get the same
        values. Returns the metrics to log."""
        means = Means()
        for number, name in enumerate(self.names):
            rows = valid & (task == number)
            figures = {
                metrics.MOVED_SHARE: moved[rows],
                metrics.MOVED_GAIN: gain[moved & rows],
                metrics.QUARTILE: quartile[rows],
            }
            for metric, values in figures.items():
                means.add_sum(metric + name, float(values.sum()), len(values))
        measured = means.over_processes()
        low, high = self.settings.moved
        for number, name in enumerate(self.names):
            share = measured[metrics.MOVED_SHARE + name]
            if share > high:
                self.tau[number] /= FACTOR
            elif share < low:
                self.tau[number] *= FACTOR
            mean = measured[metrics.QUARTILE + name]
            self.floor[number] = raised(float(self.floor[number]), mean, self.settings.rise)
            measured[metrics.TAU + name] = float(self.tau[number])
        return measured


def raised(floor: float, mean: float, rise: float) -> float:
    """MEND's floor of the threshold after a rollout whose mean quartile is `mean`: it goes a share
    `rise` of the way up to it, and never down. The first one (floor -inf) begins that share of
    |mean| below it; NaN, a rollout without the task, changes nothing."""
    if not math.isfinite(mean):
        return floor
    if floor == -math.inf:
        return mean - rise * abs(mean)
    return floor + rise * max(0.0, mean - floor)


def threshold(value: Tensor, group: Tensor, valid: Tensor, share: float) -> Tensor:
    """MEND's threshold [B]: of each image's group the quantile of its valid rewards [B]; NaN for a
    group without one."""
    thresholds = torch.full_like(value, torch.nan)
    for number in group.unique():
        rows = group == number
        if (values := value[rows & valid]).numel():
            thresholds[rows] = values.quantile(share)
    return thresholds


def candidates(slope: Tensor, lengths: Sequence[float]) -> Tensor:
    """MEND's moves [J,B,C,h,w]: eta g / rms(g) of gradients g [B,C,h,w], for each length eta. 0
    where the gradient is 0."""
    rms = sde.image_mean(slope**2).sqrt()[:, None, None, None]
    unit = slope / rms.where(rms > 0, 1.0)
    return torch.stack([eta * unit for eta in lengths])


def choose(values: Tensor, moves: Tensor, kappa: Tensor, tau: Tensor) -> Tensor:
    """The candidate [B] of each image by MEND's min(R(y), kappa) - mean |y - x|^2 / (2 tau): 0 = it
    stays. values [1+J,B]: of the images themselves, then of the candidates; moves [J,B,C,h,w];
    kappa, tau [B]. Of equals the nearer one."""
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
