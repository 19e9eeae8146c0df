"""The one training loop: rollout, score or label, update, log, save.

What is learnt is the business of an algorithm (`flowalign.training.algorithm`). The loop does the
rest.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers.optimization import get_scheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from flowalign.backbone import Backbone
from flowalign.config import ConfigError, TrainingStage
from flowalign.system import files
from flowalign.system.files import to_json
from flowalign.system.signals import Clock, Interrupted, Requests
from flowalign.training import metrics, nonfinite
from flowalign.training.algorithm import (
    STUDENT,
    Algorithm,
    NotFinite,
    Prepared,
    TrainingError,
    filled,
    pairs_of,
)
from flowalign.training.averages import MovingAverage
from flowalign.training.data import PromptSampler
from flowalign.training.nonfinite import Fault, Skips
from flowalign.training.report import samples, trackers
from flowalign.training.report.alarm import Alarm, drifted, measured
from flowalign.training.report.drift.monitor import Check, Monitor
from flowalign.training.rollout import Noise, sample, shard
from flowalign.training.run import (
    best_adapter,
    checkpoint,
    history,
    processes,
    ranks,
    resume,
)
from flowalign.training.run.processes import Means
from flowalign.types import EvalReport, Rollout

log = logging.getLogger("flowalign")


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
        clock: Clock | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.config, self.backbone, self.accelerator = config, backbone, accelerator
        self.prompts, self.algorithm, self.evaluate = prompts, algorithm, evaluate
        self.on_update, self.keeps = on_update, algorithm.keeps(config)
        self.folder = Path(config.output)
        self.checkpoints = checkpoint.Checkpoints(self.folder, config.train.keep)
        self.identity = {
            **resume.identity(config),
            "processes": accelerator.num_processes,
            "base": backbone.fingerprint(),
        }
        self.parameters = backbone.adapter_parameters(STUDENT)
        inner = optimizer(config, self.parameters)
        self.parallel = processes.of(accelerator)
        self.optimizer = self.parallel.prepare(config, backbone, inner)
        self.lr = learning_rate(config, inner)
        self.ema = MovingAverage(self.parameters, **config.ema.model_dump()) if config.ema else None
        self.update = 0  # rollouts done
        self.steps = 0  # optimizer steps done
        self.evaluated = -1  # update of the last evaluation
        self.best: dict[str, float] = {}  # headline and update of the adapter that is kept
        self.alarm, self.monitor = Alarm(), monitor
        self.too_far = ""  # of the drift: what ends the run
        self.skips = Skips(config.train.max_skipped)
        several = accelerator.num_processes > 1
        clock = clock or Clock(time.monotonic(), config.train.max_minutes)
        self.requests = Requests(gather_object if several else None, clock)

    # The main path -----------------------------------------------------------------------------

    def run(self) -> None:
        """To the configured end. A signal, or the clock, ends it earlier and leaves a checkpoint of
        the last whole update (`flowalign.system.signals`)."""
        self._mark_whole()
        with self.requests:
            try:
                self._evaluate()
                self._updates()
            except KeyboardInterrupt as error:
                self._save_interrupted(error)
                raise
        if self.evaluate is None:
            with self.averaged():
                self._keep_adapter({})
        elif self.evaluated != self.update == self.config.train.updates:  # due, and not counted
            raise TrainingError(
                f"update {self.update}: the last evaluation lost too many images (the warnings say "
                "why), so it is not known whether its adapter is the best. Fix what they name and "
                "run again with --resume: only the evaluation is taken again."
            )

    def _updates(self) -> None:
        train = self.config.train
        longest: float | None = None  # seconds from one update to the next; at least one is done
        while self.update < train.updates:
            self.requests.meet(longest)
            began = time.perf_counter()
            self._at("the rollout", offset=1)
            rollout = self.rollout(self.update)
            sampled = time.perf_counter()
            self._at("scores and labels", offset=1)
            prepared = self.prepare(rollout)
            scored = time.perf_counter()
            drift = self._watch_rollout(rollout)  # now: no thread asks a reward any more
            self._check_drift()
            watched = time.perf_counter()
            with self.requests.whole():  # an update is learnt as a whole, or not at all
                self._whole = False
                self._at("the gradient", offset=1)
                values = self.learn(prepared)
                if isinstance(prepared, Prepared) and self._due(train.sample_every, offset=1):
                    self._draw(rollout, prepared.notes)
                done = time.perf_counter()
                images = len(rollout) * self.accelerator.num_processes  # an equal shard each
                del rollout, prepared  # before the next is sampled
                values |= {
                    metrics.SECONDS_ROLLOUT: sampled - began,
                    metrics.SECONDS_SCORE: scored - sampled,
                    metrics.SECONDS_UPDATE: done - watched,
                    metrics.IMAGES_PER_SECOND: images / (done - began),
                    **drift,
                }
                self.update += 1
                for text in self.alarm.update(values):
                    if self.accelerator.is_main_process:
                        log.warning("update %d: %s", self.update, text)
                self._log(values)
                self._mark_whole()
            self._check_skips()
            self._evaluate()
            due = self._due(train.checkpoint_every)
            if self.update == train.updates or self.skips.saves(due):
                with self.requests.whole():
                    self.save()
            longest = max(longest or 0.0, time.perf_counter() - began)

    def _mark_whole(self) -> None:
        self._rng = checkpoint.get_rng()  # an interrupt puts these back: nothing is half done here
        self._whole = True

    def _save_interrupted(self, error: KeyboardInterrupt) -> None:
        """A checkpoint of the last whole update, unless the processes are at different points."""
        alone = self.accelerator.num_processes == 1
        if not self._whole or not (alone or self.requests.agreed):
            return
        checkpoint.set_rng(self._rng)
        folder = self.save()
        if isinstance(error, Interrupted):
            main = self.accelerator.is_main_process
            error.note = f"wrote checkpoint {folder}; --resume continues from it" if main else ""

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
            self.algorithm.plan(update, batch.size),
            guidance=settings.guidance,
            noise=Noise((self.config.seed, update), settings.shared_noise),
            places=places,
            batch_size=settings.batch_size,
            decode=self.keeps.images,
            finish=self.keeps.images or self.keeps.latents,
            sources=self.algorithm.sources(batch.tasks),
            on_images=self.algorithm.on_images,
        )

    def prepare(self, rollout: Rollout) -> Prepared | Fault:
        """What the algorithm makes of a rollout; or, on every process, the fault that a state or a
        label of one of them has. A diverged student is not the reward's fault, nor the teacher's:
        neither is asked about states that are not finite."""
        if fault := nonfinite.first_fault(nonfinite.fault_of_rollout(rollout)):
            return fault
        try:
            return self.algorithm.prepare(rollout, self.update)
        except NotFinite as error:
            return error.fault

    def learn(self, prepared: Prepared | Fault) -> dict[str, float]:
        """The optimizer steps of one rollout, each on an equal share of its images (`shard`).

        The loss of a step is the mean over all pairs of its share; images that are not kept count
        as 0. A step whose loss or gradient is not finite on one process is left out on all.
        Returns what was measured, as means over all processes, without what was not finite.
        """
        steps = self.config.optimizer.updates_per_rollout
        if isinstance(prepared, Fault):
            self._note_skips(prepared, steps)
            return {metrics.SKIPPED: steps}
        means, skipped, fault = Means(), 0, None
        share = len(prepared.rollout) // steps
        for start in range(0, share * steps, share):
            keep = torch.zeros(len(prepared.rollout), dtype=torch.bool)
            keep[start : start + share] = prepared.keep[start : start + share].cpu()
            if not keep.any():  # every process must take part in the gradient's reduction
                keep[start] = True
            broken = self.accumulate(prepared, keep, share, means)
            means.add(metrics.LEARNING_RATE, float(self.lr.get_last_lr()[0]))
            norm, taken = self._descend()
            if math.isfinite(norm):
                means.add(metrics.GRADIENT_NORM, norm)
            if not taken:
                skipped += 1
                fault = fault or nonfinite.first_fault(broken) or self._overflow()
        if skipped < steps:
            self.algorithm.learnt(self.steps)
        self._note_skips(fault, skipped)
        return {**prepared.metrics, **means.over_processes(), metrics.SKIPPED: skipped}

    def accumulate(
        self, prepared: Prepared, keep: Tensor, share: int, means: Means
    ) -> Fault | None:
        """The gradient of an optimizer step's pairs, in micro-batches. Returns the first fault of a
        velocity or loss of this process."""
        rollout, fault = prepared.rollout, None
        count = share * len(rollout.steps)
        size = min(self.config.optimizer.micro_batch, count)
        batches = math.ceil(int(keep.sum()) * len(rollout.steps) / size)
        batches += processes.missing_steps(batches, self.parallel.lockstep)
        for i, (pairs, weight) in enumerate(filled(pairs_of(rollout, keep, size), batches)):
            with self.parallel.learning(self.backbone.transformer, last=i == batches - 1):
                velocity = self.algorithm.velocity(pairs)
                step = self.algorithm.loss(pairs, velocity, prepared)
                # an infinite velocity may have a clipped, finite loss; asked together: one wait
                sound = torch.isfinite(velocity).all()
                loss, sound = torch.stack([step.total.detach().float(), sound.float()]).tolist()
                # its share of the mean over the step's pairs; the backward passes add up
                part = weight * len(pairs.rows) / count
                if not (sound and math.isfinite(loss)):
                    part = math.nan  # a gradient that no process takes, as theirs is the mean
                    fault = fault or nonfinite.fault_of_pairs(
                        velocity, rollout, pairs.rows, pairs.steps
                    )
                self.accelerator.backward(step.total * part)
            for name, value in {metrics.LOSS: loss, **step.metrics}.items() if weight else ():
                if math.isfinite(value):
                    means.add(name, value, step.counts.get(name, len(pairs.rows)))
        return fault

    def _descend(self) -> tuple[float, bool]:
        """One optimizer step, if the gradient is finite: its norm before clipping, and whether the
        step was taken. All processes agree, as the gradient is the mean of theirs."""
        self.parallel.average(self.parameters)
        limit = self.config.optimizer.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.parameters, limit)
        norm = math.nan if norm is None else float(norm)
        taken = math.isfinite(norm)
        if taken or self.accelerator.scaler:  # it leaves such a step out, and lowers its scale
            self.optimizer.step()
            taken = taken and not self.optimizer.step_was_skipped
        self.optimizer.zero_grad(set_to_none=True)
        if taken:
            self.lr.step()
            self.steps += 1
            if self.ema:
                self.ema.step(self.parameters, self.steps)
        return norm, taken

    # Numbers that go wrong ---------------------------------------------------------------------

    def _overflow(self) -> Fault | None:
        """The fault of a gradient that is not finite though the losses are. None under float16,
        where that is how the loss scale finds its place, until the scale is used up."""
        scaler = self.accelerator.scaler
        if scaler and scaler.get_scale() >= nonfinite.LEAST_SCALE:
            return None
        return Fault("the gradient", "while all losses are finite", nonfinite.DIVERGED)

    def _note_skips(self, fault: Fault | None, skipped: int) -> None:
        """After an update: how many of its optimizer steps were skipped, and why the first was."""
        steps = self.config.optimizer.updates_per_rollout
        self.skips.note(fault if skipped == steps else None)
        if fault and self.accelerator.is_main_process:
            log.warning(
                "update %d: %d of %d optimizer steps skipped, as %s",
                self.update + 1, skipped, steps, fault,
            )  # fmt: skip

    def _check_skips(self) -> None:
        """Raise TrainingError after too many updates in a row without an optimizer step, and at the
        end of a run that took none."""
        reason, none = self.skips.reason, self.update == self.config.train.updates > self.steps == 0
        if none and not self.skips.first and self.accelerator.is_main_process:
            log.warning("no optimizer step was taken: float16's loss scale was falling all along")
        elif none and not reason:
            reason = f"no optimizer step was taken: {self.skips.first}"
        if reason and self.skips.first:
            raise TrainingError(
                f"update {self.update}: {reason}. {self.skips.first.remedy}. {self._last_good()}"
            )

    def _check_finite(self, values: Any, whose: str) -> None:
        """Raise TrainingError where tensors, at any depth, hold NaN: they are not to be written."""
        if not nonfinite.all_finite(values):
            raise TrainingError(
                f"update {self.update}: {whose} holds NaN or infinity, and is not written. "
                f"{nonfinite.DIVERGED}. {self._last_good()}"
            )

    def _last_good(self) -> str:
        """Where the run was sound; while updates are skipped, no checkpoint is written."""
        latest = self.checkpoints.latest()
        return f"The last good checkpoint is {latest}." if latest else "There is no checkpoint."

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
        self.requests.meet()  # it may take many minutes
        self._at("the evaluation")
        with self.averaged():
            headline, report = self.evaluate()
            with self.requests.whole():
                main = self.accelerator.is_main_process
                known = [row for row in report.rows if row.benchmark not in report.lost]
                rows = {f"{r.benchmark}/{r.metric}": measured(r) for r in known}
                means = {metrics.EVAL + name: mean for name, (mean, _) in rows.items()}
                for text in report.lost.values() if main else ():
                    log.warning("update %d: the evaluation lost %s", self.update, text)
                if main:
                    self._show(report)
                if math.isnan(headline):  # too many images are lost: it does not count
                    self._log({metrics.LOST: len(report.lost), **means})
                    return
                drift = self._watch_evaluation()
                alarms = self.alarm.look(rows)
                self._log(
                    {metrics.HEADLINE: headline, **means, metrics.ALARMS: len(alarms), **drift}
                )
                for text in alarms if main else ():
                    log.warning("update %d: %s", self.update, text)
                if headline > self.best.get("headline", -math.inf):  # the first of equals stays
                    self.best = {"headline": headline, "update": self.update}
                    self._keep_adapter(self.best)
                self.evaluated = self.update
                self._mark_whole()
        self._check_drift()

    def _watch_rollout(self, rollout: Rollout) -> dict[str, float]:
        """Where it is due, the drift of a rollout from the base's images."""
        if self.monitor is None or not self.monitor.due(rollout, self.update):
            return {}
        began = time.perf_counter()
        self._at("the drift of the rollout", offset=1)
        check = self.monitor.rollout(rollout, self.update)
        values = self._drift(check, "the rollout", metrics.IMAGE_DRIFT, samples.DRIFT)
        return {**values, metrics.SECONDS_DRIFT: time.perf_counter() - began}

    def _watch_evaluation(self) -> dict[str, float]:
        """The drift of the averaged adapter on held-out prompts."""
        check = self.monitor.evaluation() if self.monitor else None
        if check is None:
            return {}
        return self._drift(
            check, "the evaluation", metrics.HELD_OUT_IMAGE_DRIFT, samples.HELD_OUT_DRIFT
        )

    def _drift(self, check: Check, where: str, prefix: str, kind: str) -> dict[str, float]:
        """Say what a check found, and keep it; note what is to stop the run."""
        assert self.config.alarm
        settings, main = self.config.alarm, self.accelerator.is_main_process
        texts = self.alarm.drift(check.drifts, settings.warn, where)
        for text in texts if main else ():
            log.warning("update %d: %s", self.update, text)
        if main:
            keep = self.config.train.keep_samples
            samples.write_drift(self.folder, self.update, kind, check.about(), keep)
        worst = [drift for drift in check.drifts if drift.beyond(settings.stop)]
        if worst:
            self.too_far = f"{where}: {'; '.join(map(drifted, worst))}"
        beyond = sum(drift.beyond(settings.warn) for drift in check.drifts)
        values = {f"{prefix}{drift.name}": drift.sigmas for drift in check.drifts}
        return {**values, metrics.DRIFT_ALARMS: beyond}

    def _check_drift(self) -> None:
        """Raise TrainingError, with a checkpoint of the last whole update, where a statistic of the
        images is beyond alarm.stop; on all processes, as all know the same."""
        text, self.too_far = self.too_far, ""
        if not text:
            return
        assert self.config.alarm
        checkpoint.set_rng(self._rng)  # a reward may have drawn since
        with self.requests.whole():
            self.save()
        raise TrainingError(
            f"update {self.update}: the images drift from the base, beyond alarm.stop = "
            f"{self.config.alarm.stop:g}: {text}. Look at {self.folder / 'watch.html'} "
            "(`flowalign watch`). If that is a hack, mend the reward and begin anew; if it is what "
            "you train for, raise alarm.stop and run again with --resume. "
            f"The last checkpoint is {self.checkpoints.latest() or 'missing'}."
        )

    def _show(self, report: EvalReport) -> None:
        """The table of an evaluation, and some of its images."""
        trackers.table(self.accelerator, "evaluation", report, self.update)
        if report.examples:
            keep = self.config.train.keep_samples
            path = samples.write_examples(self.folder, self.update, report.examples, keep)
            trackers.image(self.accelerator, "held_out", path, self.update)

    def _keep_adapter(self, scores: Mapping[str, float]) -> None:
        self._check_finite(self.parameters, "the adapter")
        save = partial(self.backbone.save_adapter, STUDENT)
        processes.from_main(lambda: best_adapter.write(self.folder, save, scores))

    def _log(self, values: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            row = to_json({metrics.UPDATE: self.update, **values})
            files.append(self.folder / history.LOG, json.dumps(row, allow_nan=False) + "\n")
            self.on_update(self.update, values)
        self.accelerator.log(dict(values), step=self.update)

    def _draw(self, rollout: Rollout, notes: list[str]) -> None:
        if self.accelerator.is_main_process and rollout.images is not None:
            keep = self.config.train.keep_samples
            path = samples.write_rollout(self.folder, self.update + 1, rollout, notes, keep)
            trackers.image(self.accelerator, "samples", path, self.update + 1)

    def _due(self, every: int, offset: int = 0) -> bool:
        return (self.update + offset) % every == 0

    def _at(self, what: str, offset: int = 0) -> None:
        """Say what this rank is at; other ranks name it if it is lost there."""
        ranks.watch().at(what, self.update + offset)

    # Checkpoints -------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Any]:
        average = {"ema": self.ema.shadow_params} if self.ema else {}
        return {"adapter": self.parameters, **average, **self.algorithm.tensors()}

    def save(self) -> Path:
        """A complete checkpoint of this moment. Raises OSError on all processes if it cannot be
        written; the older ones are then as they were."""
        self._at("the checkpoint")
        self.best = processes.from_main(self._sound_best)
        copies = {history.LOG: self.folder / history.LOG}
        if self.best:
            copies[best_adapter.COPY] = self.folder / best_adapter.ADAPTER
        scaler = self.accelerator.scaler
        states = {
            "optimizer": self.optimizer.state_dict(),
            "lr": self.lr.state_dict(),
            "scaler": scaler.state_dict() if scaler else {},
        }
        self._check_finite([self._tensors(), states], "the run's state")
        done = {"steps": self.steps, "evaluated": self.evaluated, "best": self.best}
        progress = {**done, "alarm": to_json(self.alarm.state())}
        progress["drift"] = to_json(self.monitor.state() if self.monitor else {})
        return self.checkpoints.save(
            self.update,
            tensors=self._tensors(),
            states=states,
            progress=progress,
            about=self.identity,
            copies=copies,
        )

    def _sound_best(self) -> dict[str, float]:
        """Which adapter is kept. Where that was damaged since, the one of the last checkpoint."""
        if not self.best or not (wrong := best_adapter.wrong(self.folder, self.best)):
            return self.best
        latest = self.checkpoints.latest()
        best = dict(best_adapter.restore(self.folder, latest)) if latest else {}
        log.warning(
            "%s: %s, so that of update %d is lost. The best one is now that of update %s.",
            self.folder / best_adapter.ADAPTER, wrong, self.best["update"],
            best.get("update", "(none: the next one evaluated)"),
        )  # fmt: skip
        return best

    def begin(self) -> None:
        """Start anew: an earlier attempt may have ended before its first checkpoint."""
        processes.from_main(lambda: history.clear(self.folder))

    def resume(self, *, any_world: bool = False) -> bool:
        """Continue from the newest sound checkpoint; False if there is none. The main process looks
        for it and tells the others. Raises ConfigError if none can be used, or if the base model or
        the number of processes is another. any_world: that number may be another."""
        found = processes.from_main(lambda: resume.newest(self.folder, self.config))
        if found.folder is None and not found.skipped:
            return False
        world = self.accelerator.num_processes
        problems = [*resume.against(self.config, found, world, any_world=any_world)]
        if found.folder and found.about["base"] != self.identity["base"]:
            problems.append(
                f"model.id: the weights of {self.config.model.id!r} have changed since "
                f"{found.folder} was written. Put those back, or choose another `output`."
            )
        if problems or found.folder is None:
            raise ConfigError(problems)
        if self.accelerator.is_main_process:
            for text in resume.warnings(found, self.identity):
                log.warning(text)
        rank, place = self.accelerator.process_index, found.folder
        try:
            states, progress = checkpoint.load(place, rank, self._tensors())
            self.optimizer.load_state_dict(states["optimizer"])
        except ValueError as error:  # it is whole, and of another strategy
            raise ConfigError([f"--resume: {error}"]) from error
        self.lr.load_state_dict(states["lr"])
        if self.accelerator.scaler and states["scaler"]:
            self.accelerator.scaler.load_state_dict(states["scaler"])
        self.update, self.steps = progress["update"], progress["steps"]
        self.evaluated, self.best = progress["evaluated"], progress["best"]
        self.alarm.load(progress["alarm"])
        if self.monitor:
            self.monitor.load(progress.get("drift", {}))
        processes.from_main(lambda: self._go_back(place))
        return True

    def _go_back(self, folder: Path) -> None:
        """Make the run's folder what it was when a checkpoint was written."""
        if wrong := history.go_back(self.folder, folder, self.update, self.evaluated):
            log.warning("%s: %s. It is restored.", self.folder / history.LOG, wrong)
        if self.best and (wrong := best_adapter.wrong(self.folder, self.best)):
            best_adapter.restore(self.folder, folder)
            if wrong != best_adapter.OTHER:  # that of a later update comes again
                log.warning("%s: %s. It is restored.", self.folder / best_adapter.ADAPTER, wrong)


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
