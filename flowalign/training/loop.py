"""The one training loop: rollout -> prepare -> learn -> tell.

An algorithm (`flowalign.training.algorithm`) decides what is learnt. `flowalign.training.step`
takes the optimizer steps. Listeners (`flowalign.training.events`) show the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from flowalign.backbone import Backbone
from flowalign.config import ConfigError, TrainingStage
from flowalign.system.files import to_json
from flowalign.system.signals import Clock, Interrupted, Requests
from flowalign.training import events, metrics, nonfinite
from flowalign.training.algorithm import STUDENT, Algorithm, Prepared, TrainingError
from flowalign.training.data import PromptSampler
from flowalign.training.evaluations import Evaluate, Evaluations
from flowalign.training.events import Learned, Listener, Stop
from flowalign.training.nonfinite import NotFinite
from flowalign.training.rollout import Noise, sample, shard
from flowalign.training.run import checkpoint, resume
from flowalign.training.run.processes import from_main
from flowalign.training.step import Step
from flowalign.types import Problem, Rollout

log = logging.getLogger("flowalign")


class Loop:
    """A run: its prompts, optimizer steps, checkpoints and listeners.

    Listeners are called in their order, with the same events on all processes.
    """

    def __init__(
        self,
        config: TrainingStage,
        backbone: Backbone,
        accelerator: Accelerator,
        prompts: PromptSampler,
        algorithm: Algorithm[Any],
        evaluate: Evaluate | None = None,
        listeners: Sequence[Listener] = (),
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.backbone = backbone
        self.accelerator = accelerator
        self.prompts = prompts
        self.algorithm = algorithm
        self.keeps = algorithm.keeps(config)
        self.folder = Path(config.output)
        self.checkpoints = checkpoint.Checkpoints(self.folder, config.train.keep)
        self.identity = {
            **resume.identity(config),
            "processes": accelerator.num_processes,
            "base": backbone.fingerprint(),
        }
        self.step = Step(config, backbone, accelerator, algorithm)
        self.parameters = self.step.parameters
        self.update = 0  # rollouts done
        self.skipped = 0  # updates in a row that took no optimizer step
        self.first_skip: NotFinite | None = None  # the fault of the first of them
        several = accelerator.num_processes > 1
        clock = clock or Clock(time.monotonic(), config.train.max_minutes)
        self.requests = Requests(gather_object if several else None, clock)
        self.listeners = list(listeners)
        self.evaluations = Evaluations(config, evaluate)

    # The main path -----------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the configured end. A signal or the time limit ends it earlier, with a
        checkpoint of the last complete update (`flowalign.system.signals`)."""
        for listener in self.listeners:
            listener.began(self.update)
        self._note_complete()
        with self.requests:
            try:
                self._evaluate()
                self._updates()
            except KeyboardInterrupt as error:
                self._save_interrupted(error)
                raise
        if self.evaluations.evaluate is None:
            with self.step.averaged():
                self._keep_adapter({})
        elif self.evaluations.last != self.update == self.config.train.updates:
            raise TrainingError(
                f"update {self.update}: the last evaluation lost too many images (the warnings say "
                "why), so it is not known whether its adapter is the best. Fix what they name and "
                "run again with --resume: only the evaluation is taken again."
            )

    def _updates(self) -> None:
        """Per update: rollout, prepare, learn, tell; then evaluate and save, if due."""
        longest: float | None = None  # seconds from one update to the next; at least one is done
        while self.update < self.config.train.updates and not self.evaluations.stalled:
            self.requests.stop_point(longest)
            self._began = time.perf_counter()
            self._seconds = {}
            self.backbone.evaluations = 0
            with self._timed(metrics.SECONDS_ROLLOUT):
                rollout = self.rollout(self.update)
            with self._timed(metrics.SECONDS_SCORE):
                prepared = self.prepare(rollout)
            figures = self._tell_rollout(rollout)  # now: no thread calls a reward any more
            with self.requests.uninterrupted():  # an update is learnt completely, or not at all
                self._complete = False
                with self._timed(metrics.SECONDS_UPDATE):
                    values = self.learn(prepared)
                self.update += 1
                self._tell_learned(rollout, prepared, values, figures)
                del rollout, prepared  # before anything else is sampled
                self._note_complete()
            self._check_skips()
            self._evaluate()
            self._save_if_due()
            longest = max(longest or 0.0, time.perf_counter() - self._began)

    def rollout(self, update: int) -> Rollout:
        """The trajectories of this process for an update: a function of seed, update, weights."""
        settings = self.config.rollout
        places = shard(
            settings.prompts,
            settings.group_size,
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
            decode=self.keeps.images,
            finish=self.keeps.images or self.keeps.latents,
            sources=self.algorithm.sources(batch.tasks),
            on_images=self.algorithm.on_images,
        )

    def prepare(self, rollout: Rollout) -> Prepared | NotFinite:
        """The prepared rollout; or, on every process, the first fault in a state or label of any
        process. States that are not finite are not passed to rewards or teachers, which would be
        blamed for a diverged student."""
        if fault := nonfinite.first_fault(nonfinite.fault_of_rollout(rollout)):
            return fault
        try:
            return self.algorithm.prepare(rollout, self.update)
        except NotFinite as error:
            return error

    def learn(self, prepared: Prepared | NotFinite) -> dict[str, float]:
        """Take the optimizer steps of one rollout; returns the measurements. A fault takes none."""
        steps = self.config.optimizer.updates_per_rollout
        values: dict[str, float] = {metrics.SKIPPED: steps}
        if isinstance(prepared, NotFinite):
            fault = prepared
        else:
            values = self.step.learn(prepared)
            fault = self.step.fault
        skipped = int(values[metrics.SKIPPED])
        taken = skipped < steps or fault is None
        self.skipped = 0 if taken else self.skipped + 1
        self.first_skip = None if taken else self.first_skip or fault
        if fault:
            text = f"{skipped} of {steps} optimizer steps skipped, as {fault}"
            events.warn(self.update + 1, [text])
        return values

    def _tell_rollout(self, rollout: Rollout) -> dict[str, float]:
        """The listeners' figures for a rollout. Raises TrainingError, with a checkpoint of the last
        complete update, if a listener stops the run."""
        began = time.perf_counter()
        figures: dict[str, float] = {}
        try:
            with self.backbone.uncounted():
                for listener in self.listeners:
                    figures |= listener.rollout(self.update, rollout)
        except Stop as reason:
            checkpoint.set_rng(self._rng)  # a reward may have drawn since
            with self.requests.uninterrupted():
                folder = self.save()
                for listener in self.listeners:
                    listener.stopped(self.update)
            text = f"update {self.update}: {reason} The last checkpoint is {folder}."
            raise TrainingError(text) from None
        if figures:
            self._seconds[metrics.SECONDS_HEARD] = time.perf_counter() - began
        return figures

    def _tell_learned(
        self,
        rollout: Rollout,
        prepared: Prepared | NotFinite,
        values: dict[str, float],
        figures: Mapping[str, float],
    ) -> None:
        images = len(rollout) * self.accelerator.num_processes  # an equal shard each
        speed = images / (time.perf_counter() - self._began)
        values |= {**self._seconds, metrics.IMAGES_PER_SECOND: speed, **figures}
        values[metrics.EVALUATIONS] = sum(gather_object([self.backbone.evaluations]))
        sound = prepared if isinstance(prepared, Prepared) else None
        learned = Learned(rollout, sound, values)
        for listener in self.listeners:
            listener.learned(self.update, learned)

    @contextmanager
    def _timed(self, seconds: str) -> Iterator[None]:
        """Time the `with` block, a part of the next update. seconds: name of the metric."""
        began = time.perf_counter()
        yield
        self._seconds[seconds] = time.perf_counter() - began

    # Evaluation --------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """If it is due, score the averaged adapter on held-out prompts; keep the best one."""
        if not self.evaluations.due(self.update) or self.evaluations.evaluate is None:
            return
        self.requests.stop_point()  # it may take many minutes
        with self.step.averaged():
            headline, report = self.evaluations.evaluate()
            # on all processes, because the base may be sharded
            measured = self.algorithm.held_out()
            # equal on all processes, which must agree on the end of the run
            more = from_main(lambda: measured)
            with self.requests.uninterrupted():
                evaluation = self.evaluations.note(self.update, headline, report, more)
                if evaluation.best:
                    self._keep_adapter(self.evaluations.best)
                for listener in self.listeners:
                    listener.evaluated(self.update, evaluation)
                if evaluation.counts:
                    self._note_complete()

    def _keep_adapter(self, scores: Mapping[str, float]) -> None:
        save = partial(self.backbone.save_adapter, STUDENT)
        from_main(lambda: checkpoint.write_best_adapter(self.folder, save, scores))

    # Numbers that go wrong ---------------------------------------------------------------------

    def _check_skips(self) -> None:
        """Raise TrainingError after too many updates in a row without an optimizer step, and at the
        end of a run that took none."""
        idle = self.update == self.config.train.updates and self.step.count == 0
        if not (fault := self.first_skip):
            if idle:
                text = "no optimizer step was taken: float16's loss scale was falling all along"
                events.warn(self.update, [text])
        elif idle or self.skipped >= self.config.train.max_skipped:
            latest = self.checkpoints.latest()  # none is written while updates are skipped
            good = f"The last good checkpoint is {latest}." if latest else "There is no checkpoint."
            raise TrainingError(
                f"update {self.update}: no optimizer step was taken in {self.skipped} updates in a "
                f"row (train.max_skipped): {fault}. {fault.remedy}. {good}"
            )

    # Checkpoints -------------------------------------------------------------------------------

    def _note_complete(self) -> None:
        """Note that an update or evaluation is complete: an interrupt saves this state."""
        self._rng = checkpoint.get_rng()
        self._complete = True

    def _save_interrupted(self, error: KeyboardInterrupt) -> None:
        """Save the last complete update, unless the processes are at different points."""
        alone = self.accelerator.num_processes == 1
        if not self._complete or not (alone or self.requests.agreed):
            return
        checkpoint.set_rng(self._rng)
        folder = self.save()
        if isinstance(error, Interrupted):
            main = self.accelerator.is_main_process
            error.note = f"wrote checkpoint {folder}; --resume continues from it" if main else ""

    def _save_if_due(self) -> None:
        """Save a checkpoint every `checkpoint_every` updates and at the end. None is saved after
        skipped updates: the weights may have diverged, and it would replace sound checkpoints."""
        due = self.update % self.config.train.checkpoint_every == 0 and not self.skipped
        if due or self.update == self.config.train.updates or self.evaluations.stalled:
            with self.requests.uninterrupted():
                self.save()

    def save(self) -> Path:
        """Write a complete checkpoint. Raises OSError on all processes if it cannot be written;
        older checkpoints are then unchanged."""
        states = {one.key: to_json(one.state()) for one in self.listeners if one.key}
        progress = {"steps": self.step.count, **self.evaluations.state(), **states}
        return self.checkpoints.save(
            self.update,
            tensors=self.step.tensors(),
            states=self.step.states(),
            progress=progress,
            about=self.identity,
            best=bool(self.evaluations.best),
        )

    def begin(self) -> None:
        """Start at the first update: an earlier attempt may have ended before its first
        checkpoint."""
        from_main(lambda: resume.clear_run(self.folder))

    def resume(self) -> bool:
        """Continue from the newest sound checkpoint; False if there is none. The main process looks
        for it and tells the others. Raises ConfigError if none can be used, or if the base model is
        another; the checks have compared the rest."""
        saved = from_main(lambda: resume.newest(self.folder, self.config))
        if saved is None:
            return False
        folder = saved.folder
        if saved.about["base"] != self.identity["base"]:
            text = f"the weights of a base model have changed since {folder} was written."
            raise ConfigError([Problem("model.id", f"{text} Put those back.")])
        if self.accelerator.is_main_process:
            for path, reason in saved.skipped.items():
                text = "--resume: %s is not used: %s. The run continues from %s."
                log.warning(text, path, reason, folder.name)
        tensors = self.step.tensors()
        states, progress = checkpoint.load(folder, self.accelerator.process_index, tensors)
        self.step.load_states(states, progress["steps"])
        self.update = progress["update"]
        self.evaluations.load(progress)
        changed = resume.changed_rewards(self.config, saved.about)  # and that is allowed
        for listener in self.listeners:
            if listener.key in progress:
                listener.load(progress[listener.key], comparable=not changed)
        if changed:
            self.evaluations.best = {}
            self.evaluations.start = {}
            events.warn(self.update, [f"--resume: {text}" for text in changed])
        evaluated = self.evaluations.last
        from_main(lambda: self.checkpoints.restore(folder, self.update, evaluated))
        return True
