"""The one training loop: rollout, score or label, update, log, save.

What is learnt is an Algorithm's business: it prepares a rollout once (it scores the images, or asks
teachers for labels), and turns velocities at (image, step) pairs into a loss. The loop does the
rest.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from flowalign import checkpoint, metrics, parallel, ranks, snapshots, trackers
from flowalign.alarm import Alarm
from flowalign.backbone import Backbone
from flowalign.config import TrainingStage
from flowalign.data import PromptSampler
from flowalign.ema import MovingAverage
from flowalign.files import replacing
from flowalign.parallel import Means
from flowalign.rollout import Noise, OnImages, Schedule, sample, shard
from flowalign.types import Conditioning, EvalReport, Rollout, Source, StepLoss

log = logging.getLogger("flowalign")

STUDENT = "student"  # name of the adapter that is trained


class TrainingError(RuntimeError):
    """A run that must stop: what happened, and what to do."""


@dataclass(frozen=True)
class Pairs:
    """A micro-batch of b (image, step) pairs of a rollout."""

    rows: Tensor  # [b] images of the rollout
    columns: Tensor  # [b] positions among its trained steps
    steps: Tensor  # [b] positions in the schedule
    sigma: Tensor  # [b]
    x: Tensor  # [b,C,h,w] states
    x_next: Tensor | None  # [b,C,h,w] sampled successors; None where the rollout kept none
    old_log_prob: Tensor | None  # [b] of x_next, under the policy that sampled it
    conditioning: Conditioning
    size: int  # rows of the forward pass, at least b
    first: bool  # whether costly diagnostics are taken on this micro-batch

    def action(self) -> tuple[Tensor, Tensor]:
        """x_next and old_log_prob of a rollout that has them."""
        assert self.x_next is not None and self.old_log_prob is not None
        return self.x_next, self.old_log_prob


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rollout that is ready to be learnt from; an algorithm adds what its loss needs."""

    rollout: Rollout  # the states to train on, which need not be those that were sampled
    keep: Tensor  # [B] images that carry gradient
    metrics: Mapping[str, float]  # means over all processes
    notes: list[str]  # B texts that stand below the samples: a reward, a teacher


P = TypeVar("P", bound=Prepared)


class Algorithm(Protocol[P]):
    """What is learnt from a rollout."""

    needs_images: bool  # rollouts are decoded
    needs_latents: bool  # rollouts run to their end
    guidance: float  # the CFG scale at which the student is trained
    on_images: OnImages | None  # called with each batch of images during the rollout

    def plan(self, update: int) -> Schedule:
        """How the rollout of an update steps, and which of its states are trained."""
        ...

    def sources(self, tasks: list[str]) -> list[Source] | None:
        """Who samples each image, by its task; None = the student."""
        ...

    def prepare(self, rollout: Rollout, update: int) -> P:
        """Score or label a rollout, once."""
        ...

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: P) -> StepLoss:
        """Mean loss of b pairs, from the student's velocity [b,C,h,w] there."""
        ...


def pairs_of(rollout: Rollout, keep: Tensor, size: int) -> Iterator[Pairs]:
    """All (image, step) pairs of the kept images in micro-batches of `size`: step by step, images
    in order.

    The forward pass of a smaller last micro-batch has `size` rows, too: kernels differ in the last
    bits between sizes, so that a ratio is exactly 1 where `size` is that of the rollout's batches.
    """
    size = min(size, len(rollout) * len(rollout.steps))
    images = keep.nonzero().flatten()
    device = rollout.states.device
    rows = images.repeat(len(rollout.steps)).to(device)
    columns = torch.arange(len(rollout.steps)).repeat_interleave(len(images)).to(device)
    steps, sigmas = torch.tensor(rollout.steps, device=device), rollout.sigmas.to(device)
    for i, (r, c) in enumerate(zip(rows.split(size), columns.split(size), strict=True)):
        yield Pairs(
            rows=r,
            columns=c,
            steps=steps[c],
            sigma=sigmas[steps[c]],
            x=rollout.states[r, c],
            x_next=None if rollout.next_states is None else rollout.next_states[r, c],
            old_log_prob=None if rollout.log_probs is None else rollout.log_probs[r, c],
            conditioning=rollout.conditioning.select(r),
            size=size,
            first=i == 0,
        )


def filled(parts: Iterable[Pairs], count: int) -> Iterator[tuple[Pairs, float]]:
    """The micro-batches with weight 1; then, up to `count`, the last one again with weight 0."""
    for pairs in parts:
        count -= 1
        yield pairs, 1.0
    for _ in range(count):
        yield replace(pairs, first=False), 0.0


class Loop:
    """A run: its adapter, optimizer, EMA, prompts, log and checkpoints."""

    def __init__(
        self,
        config: TrainingStage,
        backbone: Backbone,
        accelerator: Accelerator,
        prompts: PromptSampler,
        algorithm: Algorithm[Any],
        evaluate: Callable[[], tuple[float, EvalReport]] | None = None,
        on_update: Callable[[int, Mapping[str, float]], None] = lambda update, values: None,
    ) -> None:
        self.config, self.backbone, self.accelerator = config, backbone, accelerator
        self.prompts, self.algorithm, self.evaluate = prompts, algorithm, evaluate
        self.on_update = on_update
        self.folder = Path(config.output)
        self.checkpoints = checkpoint.Checkpoints(self.folder / "checkpoints", config.train.keep)
        self.parameters = backbone.adapter_parameters(STUDENT)
        inner = optimizer(config, self.parameters)
        self.parallel = parallel.of(accelerator)
        self.optimizer = self.parallel.prepare(config, backbone, inner)
        self.lr = learning_rate(config, inner)
        self.ema = MovingAverage(self.parameters, **config.ema.model_dump()) if config.ema else None
        self.update = 0  # rollouts done
        self.steps = 0  # optimizer steps done
        self.evaluated = -1  # update of the last evaluation
        self.best: dict[str, float] = {}  # headline and update of the adapter that is kept
        self.alarm = Alarm()

    # The main path -----------------------------------------------------------------------------

    def run(self) -> None:
        """To the configured end. Ctrl-C leaves a checkpoint of the last whole update. (Processes
        are interrupted at different points: a run of several keeps only those already written.)"""
        train = self.config.train
        self._mark_whole()
        try:
            self._evaluate()
            while self.update < train.updates:
                began = time.perf_counter()
                self._at("the rollout", offset=1)
                rollout = self.rollout(self.update)
                sampled = time.perf_counter()
                self._at("scores and labels", offset=1)
                prepared = self.algorithm.prepare(rollout, self.update)
                scored = time.perf_counter()
                with interrupts_held():  # an update is learnt as a whole, or not at all
                    self._whole = False
                    self._at("the gradient", offset=1)
                    values = {**prepared.metrics, **self.learn(prepared)}
                    if self._due(train.sample_every, offset=1):
                        self._draw(rollout, prepared.notes)
                    done = time.perf_counter()
                    images = len(rollout) * self.accelerator.num_processes  # an equal shard each
                    values |= {
                        metrics.SECONDS_ROLLOUT: sampled - began,
                        metrics.SECONDS_SCORE: scored - sampled,
                        metrics.SECONDS_UPDATE: done - scored,
                        metrics.IMAGES_PER_SECOND: images / (done - began),
                    }
                    self.update += 1
                    self.alarm.update(values)
                    self._log(values)
                    self._mark_whole()
                self._evaluate()
                if self.update == train.updates or self._due(train.checkpoint_every):
                    self.save()
        except KeyboardInterrupt:
            if self._whole and self.accelerator.num_processes == 1:
                checkpoint.set_rng(self._rng)
                self.save()
            raise
        if self.evaluate is None:
            with self.averaged():
                self._keep_adapter({})
        elif self.evaluated != self.update == train.updates:  # it was due, and did not count
            raise TrainingError(
                f"update {self.update}: the last evaluation lost too many images (the warnings say "
                "why), so it is not known whether its adapter is the best. Fix the reward and run "
                "again with --resume: only the evaluation is taken again."
            )

    def _mark_whole(self) -> None:
        self._rng = checkpoint.get_rng()  # Ctrl-C puts these back: nothing is half done here
        self._whole = True

    def rollout(self, update: int) -> Rollout:
        """The trajectories of this process for an update: a function of seed, update, weights."""
        settings = self.config.rollout
        places = shard(
            settings.prompts,
            settings.copies,
            self.config.optimizer.updates_per_rollout,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        batch = self.prompts.batch(update).select([prompt for prompt, _ in places])
        return sample(
            self.backbone,
            batch,
            self.algorithm.plan(update),
            guidance=settings.guidance,
            noise=Noise((self.config.seed, update), settings.shared_noise),
            places=places,
            batch_size=settings.batch_size,
            decode=self.algorithm.needs_images,
            finish=self.algorithm.needs_images or self.algorithm.needs_latents,
            sources=self.algorithm.sources(batch.tasks),
            on_images=self.algorithm.on_images,
        )

    def learn(self, prepared: Prepared) -> dict[str, float]:
        """The optimizer steps of one rollout, each on an equal share of its images (`shard`).

        The loss of a step is the mean over all pairs of its share; images that are not kept count
        as 0. Returns what was measured, as means over all processes.
        """
        rollout, means = prepared.rollout, Means()
        share = len(rollout) // self.config.optimizer.updates_per_rollout
        count = share * len(rollout.steps)
        size = min(self.config.optimizer.micro_batch, count)
        for start in range(0, share * self.config.optimizer.updates_per_rollout, share):
            keep = torch.zeros(len(rollout), dtype=torch.bool)
            keep[start : start + share] = prepared.keep[start : start + share].cpu()
            if not keep.any():  # every process must take part in the gradient's reduction
                keep[start] = True
            batches = math.ceil(int(keep.sum()) * len(rollout.steps) / size)
            batches += parallel.missing_steps(batches, self.parallel.lockstep)
            for i, (pairs, weight) in enumerate(filled(pairs_of(rollout, keep, size), batches)):
                with self.parallel.learning(self.backbone.transformer, last=i == batches - 1):
                    step = self.algorithm.loss(pairs, self.velocity(pairs), prepared)
                    # its share of the mean over the step's pairs; the backward passes add up
                    self.accelerator.backward(step.total * (weight * len(pairs.rows) / count))
                values = {metrics.LOSS: float(step.total.detach()), **step.metrics}
                for name, value in values.items() if weight else ():
                    means.add(name, value, step.counts.get(name, len(pairs.rows)))
            means.add(metrics.LEARNING_RATE, float(self.lr.get_last_lr()[0]))
            means.add(metrics.GRADIENT_NORM, self._descend())
        return means.over_processes()

    def velocity(self, pairs: Pairs) -> Tensor:
        """The student's velocity [b,C,h,w] at the pairs, with gradient."""
        x, sigma, guidance = pairs.x, pairs.sigma, self.algorithm.guidance
        return self.backbone.velocity(
            x, sigma, pairs.conditioning, guidance=guidance, rows=pairs.size
        )

    def _descend(self) -> float:
        """One optimizer step; returns the norm of the gradient before clipping."""
        self.parallel.average(self.parameters)
        limit = self.config.optimizer.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.parameters, limit)
        norm = math.nan if norm is None else float(norm)
        # under float16 the scaler skips such a step and lowers its scale
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise TrainingError(
                f"update {self.update}: the gradient is not finite. The last checkpoint is "
                f"{self.checkpoints.latest()}; lower optimizer.lr, or use bfloat16 for float16."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.lr.step()
        self.steps += 1
        if self.ema:
            self.ema.step(self.parameters, self.steps)
        return norm

    # Evaluation, log and pictures --------------------------------------------------------------

    def averaged(self) -> AbstractContextManager[None]:
        """Inside the `with`, the student has the EMA's weights."""
        return self.ema.of(self.parameters, self.steps) if self.ema else nullcontext()

    def _evaluate(self) -> None:
        """If it is due, score the averaged adapter on held-out prompts; keep the best one."""
        settings = self.config.evaluation
        if self.evaluate is None or settings is None or self.evaluated == self.update:
            return
        if self.update != self.config.train.updates and not self._due(settings.every):
            return
        self._at("the evaluation")
        with self.averaged():
            headline, report = self.evaluate()
            with interrupts_held():
                main = self.accelerator.is_main_process
                known = [row for row in report.rows if row.benchmark not in report.lost]
                rows = {f"{r.benchmark}/{r.metric}": (r.mean, r.stderr) for r in known}
                means = {metrics.EVAL + name: mean for name, (mean, _) in rows.items()}
                for text in report.lost.values() if main else ():
                    log.warning("update %d: the evaluation lost %s", self.update, text)
                if main:
                    self._show(report)
                if math.isnan(headline):  # too many images are lost: it does not count
                    self._log({metrics.LOST: len(report.lost), **means})
                    return
                alarms = self.alarm.look(rows)
                self._log({metrics.HEADLINE: headline, **means, metrics.ALARMS: len(alarms)})
                for text in alarms if main else ():
                    log.warning("update %d: %s", self.update, text)
                if headline > self.best.get("headline", -math.inf):  # the first of equals stays
                    self.best = {"headline": headline, "update": self.update}
                    self._keep_adapter(self.best)
                self.evaluated = self.update
                self._mark_whole()

    def _show(self, report: EvalReport) -> None:
        """The table of an evaluation, and some of its images."""
        trackers.table(self.accelerator, "evaluation", report, self.update)
        if report.examples:
            path = snapshots.write_examples(self.folder, self.update, report.examples)
            trackers.image(self.accelerator, "held_out", path, self.update)

    def _keep_adapter(self, scores: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.backbone.save_adapter(STUDENT, self.folder / "adapter")
            (self.folder / "adapter" / "scores.json").write_text(json.dumps(dict(scores)))

    def _log(self, values: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({metrics.UPDATE: self.update, **values}) + "\n")
            self.on_update(self.update, values)
        self.accelerator.log(dict(values), step=self.update)

    def _draw(self, rollout: Rollout, notes: list[str]) -> None:
        if self.accelerator.is_main_process and rollout.images is not None:
            path = snapshots.write_rollout(self.folder, self.update + 1, rollout, notes)
            trackers.image(self.accelerator, "samples", path, self.update + 1)

    def _due(self, every: int, offset: int = 0) -> bool:
        return (self.update + offset) % every == 0

    def _at(self, what: str, offset: int = 0) -> None:
        """Say what this rank is at; other ranks name it if it is lost there."""
        ranks.watch().at(what, self.update + offset)

    # Checkpoints -------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Any]:
        average = {"ema": self.ema.shadow_params} if self.ema else {}
        return {"adapter": self.parameters, **average}

    def save(self) -> Path:
        """A complete checkpoint of this moment."""
        self._at("the checkpoint")
        scaler = self.accelerator.scaler
        states = {
            "optimizer": self.parallel.optimizer_state(self.optimizer),
            "lr": self.lr.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
        }
        done = {"steps": self.steps, "evaluated": self.evaluated, "best": self.best}
        progress = {**done, "alarm": self.alarm.state()}
        return self.checkpoints.save(
            self.update, self.accelerator, tensors=self._tensors(), states=states, progress=progress
        )

    def resume(self) -> bool:
        """Continue from the newest complete checkpoint; False if there is none."""
        folder = self.checkpoints.latest()
        if folder is None:
            return False
        states, progress = checkpoint.load(folder, self.accelerator.process_index, self._tensors())
        self.parallel.load_optimizer_state(self.optimizer, states["optimizer"])
        self.lr.load_state_dict(states["lr"])
        if self.accelerator.scaler and states["scaler"]:
            self.accelerator.scaler.load_state_dict(states["scaler"])
        self.update, self.steps = progress["update"], progress["steps"]
        self.evaluated, self.best = progress["evaluated"], progress["best"]
        self.alarm.load(progress["alarm"])
        self._cut_log()
        return True

    def _cut_log(self) -> None:
        """Drop log lines after the checkpoint, and one that a kill cut short: they come again."""
        path = self.folder / "metrics.jsonl"
        if not (self.accelerator.is_main_process and path.exists()):
            return
        kept = []
        for line in path.read_text().splitlines(keepends=True):
            row = json.loads(line) if line.endswith("}\n") else {metrics.UPDATE: math.inf}
            evaluation = any(name.startswith(metrics.EVAL) for name in row)
            done = self.evaluated if evaluation else self.update
            kept += [line] if row[metrics.UPDATE] <= done else []
        with replacing(path) as part:
            part.write_text("".join(kept))


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C inside the `with` takes effect at its end; a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted, and only it may set a handler
        return
    caught: list[int] = []

    def hold(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


def optimizer(config: TrainingStage, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the adapter, or its 8-bit form from bitsandbytes."""
    o, kind = config.optimizer, torch.optim.AdamW
    if o.name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[import-not-found]
    return kind(parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)


def learning_rate(config: TrainingStage, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """diffusers' schedule of that name, over the optimizer steps of the whole run."""
    o, steps = config.optimizer, config.optimizer_steps
    name = "constant_with_warmup" if o.schedule == "constant" else o.schedule
    return get_scheduler(name, optimizer, num_warmup_steps=o.warmup, num_training_steps=steps)
