"""The optimizer steps of a run: a gradient is accumulated, clipped, and taken or skipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from flowalign import sde
from flowalign.backbone import Backbone
from flowalign.config import TrainingStage
from flowalign.training import metrics, nonfinite
from flowalign.training.algorithm import STUDENT, Algorithm, Pairs, Prepared, pairs_at, pairs_of
from flowalign.training.nonfinite import NotFinite
from flowalign.training.run import processes
from flowalign.training.run.processes import Means
from flowalign.types import Rollout

MEASURED = 32  # (image, step) pairs an optimizer step that are compared with the base for the log


class Step:
    """Takes the optimizer steps of the student's adapter: its optimizer, learning rate and EMA.

    count: steps taken so far. fault: what kept a step of the last rollout from being taken.
    """

    def __init__(
        self,
        config: TrainingStage,
        backbone: Backbone,
        accelerator: Accelerator,
        algorithm: Algorithm[Any],
    ) -> None:
        self.settings = config.optimizer
        self.backbone = backbone
        self.accelerator = accelerator
        self.algorithm = algorithm
        self.copies = config.rollout.group_size
        self.parameters = backbone.adapter_parameters(STUDENT)
        optimizer = build_optimizer(config, self.parameters)
        self.parallel = processes.of(accelerator)
        # before `prepare`: accelerate's scaled steps (float16) restore optimizer.step
        self.lr = learning_rate(config, optimizer)
        self.optimizer = self.parallel.prepare(backbone, optimizer)
        self.ema = MovingAverage(self.parameters, **config.ema.model_dump()) if config.ema else None
        self.count = 0
        self.fault: NotFinite | None = None

    def learn(self, prepared: Prepared) -> dict[str, float]:
        """Take the optimizer steps of one rollout, each on an equal share of its images (`shard`).

        The loss of a step is the mean over all pairs of its share; images that are not kept count
        as 0. A step whose loss or gradient is not finite on one process is skipped on all. Returns
        the measurements as means over all processes, without those that are not finite.
        """
        steps = self.settings.updates_per_rollout
        means = Means()
        skipped = 0
        self.fault = None
        share = len(prepared.rollout) // steps
        if self.backbone.compiled and prepared.rollout.log_probs is not None:
            prepared = self._with_learning_log_probs(prepared, share)
        for start in range(0, share * steps, share):
            keep = share_of(prepared.keep, start, share)
            with self.backbone.uncounted():
                self._measure_drift(prepared, start, share, means)
            fault = self.accumulate(prepared, keep, share, means)
            means.add(metrics.LEARNING_RATE, float(self.lr.get_last_lr()[0]))
            norm, taken = self._descend()
            if math.isfinite(norm):
                means.add(metrics.GRADIENT_NORM, norm)
            if not taken:
                skipped += 1
                self.fault = self.fault or nonfinite.first_fault(fault) or self._overflow()
        if skipped < steps:
            self.algorithm.learnt(self.count)
        return {**prepared.metrics, **means.over_processes(), metrics.SKIPPED: skipped}

    def _with_learning_log_probs(self, prepared: Prepared, share: int) -> Prepared:
        """With the log-probabilities of the actions as the compiled learning graph computes them.

        torch compiles other graphs with gradients and without, and in bfloat16 the log-probability
        of a rollout is off by as much as clip ranges allow; so a ratio would not begin at 1. With
        one optimizer step a rollout there are none: the old policy is the new one. With several,
        the steps to come are asked before the first, in the same micro-batches.
        """
        rollout = prepared.rollout
        assert rollout.log_probs is not None
        if self.settings.updates_per_rollout == 1:
            return replace(prepared, rollout=replace(rollout, log_probs=None))
        log_probs = rollout.log_probs.clone()
        evaluations = self.backbone.evaluations
        for start in range(0, share * self.settings.updates_per_rollout, share):
            keep = share_of(prepared.keep, start, share)
            for pairs, _, _ in self._micro_batches(rollout, keep, share):
                with self.parallel.learning(self.backbone.transformer, last=False):
                    velocity = self.algorithm.velocity(pairs).detach()
                policy = sde.scheduled_transition(rollout.schedule, pairs.x, velocity, pairs.steps)
                log_probs[pairs.rows, pairs.columns] = sde.log_prob(policy, pairs.action()[0])
        asked = self.backbone.evaluations - evaluations
        self.backbone.evaluations = evaluations + asked // 3  # there is no backward pass
        return replace(prepared, rollout=replace(rollout, log_probs=log_probs))

    def accumulate(
        self, prepared: Prepared, keep: Tensor, share: int, means: Means
    ) -> NotFinite | None:
        """The gradient of an optimizer step's pairs, in micro-batches. Returns the first fault of a
        velocity or loss of this process."""
        rollout = prepared.rollout
        fault = None
        count = share * len(rollout.steps)
        for pairs, weight, last in self._micro_batches(rollout, keep, share):
            with self.parallel.learning(self.backbone.transformer, last=last):
                with self.backbone.uncounted(not weight):
                    velocity = self.algorithm.velocity(pairs)
                    step = self.algorithm.loss(pairs, velocity, prepared)
                # an infinite velocity may have a clipped, finite loss; one transfer for both
                sound = torch.isfinite(velocity).all()
                loss, sound = torch.stack([step.total.detach().float(), sound.float()]).tolist()
                # its share of the mean over the step's pairs; the backward passes add up
                part = weight * len(pairs.rows) / count
                if not (sound and math.isfinite(loss)):
                    part = math.nan  # NaN in the mean gradient: no process takes the step
                    fault = fault or nonfinite.fault_of_pairs(
                        velocity, rollout, pairs.rows, pairs.steps
                    )
                self.accelerator.backward(step.total * part)
            if not weight:
                continue
            for name, value in {metrics.LOSS: loss, **step.metrics}.items():
                if math.isfinite(value):
                    means.add(name, value, step.counts.get(name, len(pairs.rows)))
        return fault

    def _micro_batches(
        self, rollout: Rollout, keep: Tensor, share: int
    ) -> Iterator[tuple[Pairs, float, bool]]:
        """The pairs of an optimizer step's kept images, their weight (0 where they only keep other
        processes company), and whether they are the last."""
        if idle := not keep.any():  # every process takes part in the gradient's reduction
            keep = torch.arange(len(rollout)) == 0  # with an image of weight 0
        size = min(self.settings.micro_batch, share * len(rollout.steps))
        batches = math.ceil(int(keep.sum()) * len(rollout.steps) / size)
        batches += processes.missing_steps(batches, self.backbone.sharded)
        for i, (pairs, weight) in enumerate(filled(pairs_of(rollout, keep, size), batches)):
            yield pairs, 0.0 if idle else weight, i == batches - 1

    @torch.no_grad()
    def _measure_drift(self, prepared: Prepared, start: int, share: int, means: Means) -> None:
        """How far the student is from the base before an optimizer step, at a sample of the pairs
        of its `share` images (`strided`), whether they are kept or not."""
        rollout = prepared.rollout
        world = self.accelerator.num_processes
        numbers = rollout.group * self.copies + rollout.copy - start * world
        rows, columns = strided(numbers, share * world, len(rollout.steps))
        if idle := not len(rows):  # a sharded base needs all processes in every forward pass
            rows = columns = torch.zeros(1, dtype=torch.int64)
        size = min(self.settings.micro_batch, share * len(rollout.steps))
        batches = math.ceil(len(rows) / size)
        batches += processes.missing_steps(batches, self.backbone.sharded)
        for pairs, weight in filled(pairs_at(rollout, rows, columns, size), batches):
            for name, value in self.algorithm.drift(pairs, prepared).items():
                if weight and not idle and math.isfinite(value):
                    means.add(name, value, len(pairs.rows))

    def _descend(self) -> tuple[float, bool]:
        """One optimizer step, if the gradient is finite: its norm before clipping, and whether the
        step was taken. All processes agree, as the gradient is the mean of theirs."""
        self.parallel.average(self.parameters)
        norm = self.accelerator.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        norm = math.nan if norm is None else float(norm)
        taken = math.isfinite(norm)
        if taken or self.accelerator.scaler:  # the scaler skips such a step and lowers its scale
            self.optimizer.step()
            taken = taken and not self.optimizer.step_was_skipped
        self.optimizer.zero_grad(set_to_none=True)
        if taken:
            self.lr.step()
            self.count += 1
            if self.ema:
                self.ema.step(self.parameters, self.count)
        return norm, taken

    def _overflow(self) -> NotFinite | None:
        """The fault of a gradient that is not finite while the losses are. None under float16 while
        the loss scale can still be lowered."""
        scaler = self.accelerator.scaler
        if scaler and scaler.get_scale() >= nonfinite.LEAST_SCALE:
            return None
        return NotFinite("the gradient", "while all losses are finite")

    def averaged(self) -> AbstractContextManager[None]:
        """Inside the `with`, the student has the EMA's weights."""
        return self.ema.of(self.parameters, self.count) if self.ema else nullcontext()

    # Checkpoints -------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        """The adapter, its average and what the algorithm keeps, by name."""
        average = {"ema": self.ema.shadow_params} if self.ema else {}
        return {"adapter": self.parameters, **average, **self.algorithm.tensors()}

    def states(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "optimizer": self.optimizer.state_dict(),
            "lr": self.lr.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
        }

    def load_states(self, states: dict[str, Any], count: int) -> None:
        """Restore the result of `states` after `count` steps. The learning rates follow this run's
        schedule, which may be longer or shorter than the saved one."""
        self.optimizer.load_state_dict(states["optimizer"])
        self.lr.load_state_dict(states["lr"])
        groups = self.lr.optimizer.param_groups
        bases = self.lr.base_lrs
        for group, base, factor in zip(groups, bases, self.lr.lr_lambdas, strict=True):
            group["lr"] = base * factor(count)
        self.lr._last_lr = [group["lr"] for group in groups]
        if self.accelerator.scaler and states["scaler"]:
            self.accelerator.scaler.load_state_dict(states["scaler"])
        self.count = count


def share_of(keep: Tensor, start: int, share: int) -> Tensor:
    """keep [B], within the `share` images of an optimizer step alone."""
    found = torch.zeros(len(keep), dtype=torch.bool)
    found[start : start + share] = keep[start : start + share].cpu()
    return found


def filled(parts: Iterable[Pairs], count: int) -> Iterator[tuple[Pairs, float]]:
    """The micro-batches with weight 1; then, up to `count`, the last one again with weight 0."""
    for pairs in parts:
        count -= 1
        yield pairs, 1.0
    for _ in range(count):
        yield pairs, 0.0


def strided(numbers: Tensor, images: int, steps: int) -> tuple[Tensor, Tensor]:
    """The pairs that are compared with the base for the log: rows [n] and columns [n] of a process.

    numbers [B]: the indices of its images among the `images` that all processes have for an
    optimizer step. All processes together have about MEASURED pairs: each step equally often, with
    images from the entire batch. So the figure depends neither on the micro-batch nor on the
    processes.
    """
    pairs = min(images, -(-MEASURED // steps))
    order = torch.arange(steps * pairs)
    rows, places = (numbers[:, None] == order * images // len(order)).nonzero(as_tuple=True)
    return rows, places % steps


def build_optimizer(
    config: TrainingStage, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    settings = config.optimizer.model_dump(include={"lr", "weight_decay", "betas", "eps"})
    return torch.optim.AdamW(parameters, **settings)


def learning_rate(config: TrainingStage, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The diffusers schedule named in the config, over the optimizer steps of the run."""
    o, steps = config.optimizer, config.optimizer_steps
    name = "constant_with_warmup" if o.schedule == "constant" else o.schedule
    return get_scheduler(name, optimizer, num_warmup_steps=o.warmup, num_training_steps=steps)


# The moving average of the adapter, as in Flow-GRPO and Flow-OPD ----------------------------------


def decay_at(steps: int, decay: float) -> float:
    """The share of the old average that is kept after `steps` optimizer steps (1, 2, ...).

    min(decay, (1 + n) / (10 + n)) with n = steps - 1, which reaches .9 after 80 steps. (diffusers'
    EMAModel counts averagings instead: with one every 8 steps, .9 takes about 650 steps.)
    """
    return min(decay, steps / (9 + steps))


class MovingAverage:
    """The average of some parameters, updated every `every` optimizer steps.

    Its only state is `shadow_params`: all else follows from the number of optimizer steps.
    """

    def __init__(self, parameters: Sequence[Tensor], *, decay: float, every: int) -> None:
        self.decay = decay
        self.every = every
        self.shadow_params = [p.detach().clone() for p in parameters]

    def step(self, parameters: Sequence[Tensor], steps: int) -> None:
        """Update the average after optimizer step number `steps`, if it is due."""
        if steps % self.every == 0:
            _copy(self._mixed(parameters, decay_at(steps, self.decay)), self.shadow_params)

    @contextmanager
    def of(self, parameters: Sequence[Tensor], steps: int) -> Iterator[None]:
        """Inside the `with`, the parameters are the average as of `steps`.

        Two departures from the published code, which uses the result of the last averaging. Before
        the first averaging the adapter itself is used, so that a short run returns what it learnt.
        Steps since the last averaging count in proportion: k of `every` keep decay^(k / every).
        """
        if steps < self.every:  # before the first averaging
            yield
            return
        decay = decay_at(steps, self.decay) ** (steps % self.every / self.every)
        saved = [p.detach().clone() for p in parameters]
        _copy(self._mixed(parameters, decay), parameters)
        try:
            yield
        finally:
            _copy(saved, parameters)

    @torch.no_grad()
    def _mixed(self, parameters: Sequence[Tensor], decay: float) -> list[Tensor]:
        pairs = zip(self.shadow_params, parameters, strict=True)
        # decay * average + (1 - decay) * p, rounded as diffusers' EMAModel rounds it
        return [average - (1 - decay) * (average - p.detach()) for average, p in pairs]


def _copy(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)  # in place: the optimizer holds these tensors
