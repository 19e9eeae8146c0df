"""What listens to a run: its log and samples, its evaluations and the drift of its images.

The loop tells them what happens; they write, warn, and choose the best adapter.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flowalign.config import TrainingStage
from flowalign.system import files
from flowalign.system.files import to_json
from flowalign.training import metrics
from flowalign.training.report import samples, trackers
from flowalign.training.report.alarm import Alarm, measured
from flowalign.training.report.drift.compare import Check
from flowalign.training.report.drift.monitor import Monitor
from flowalign.training.run.resume import LOG
from flowalign.types import EvalReport, Rollout

log = logging.getLogger("flowalign")

OnUpdate = Callable[[int, Mapping[str, float]], None]
Evaluate = Callable[[], tuple[float, EvalReport]]


class RunLog:
    """metrics.jsonl, the trackers, the warnings and the samples of a run; the main process writes
    them."""

    def __init__(
        self, config: TrainingStage, accelerator: Accelerator, on_update: OnUpdate
    ) -> None:
        self.accelerator, self.on_update = accelerator, on_update
        self.folder, self.settings = Path(config.output), config.train
        self.main = accelerator.is_main_process

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """A row: an update, or an evaluation."""
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            row = to_json({metrics.UPDATE: update, **values})
            files.append(self.folder / LOG, json.dumps(row, allow_nan=False) + "\n")
            self.on_update(update, values)
        self.accelerator.log(dict(values), step=update)

    def warn(self, update: int, texts: Iterable[str]) -> None:
        """Warnings about an update."""
        for text in texts if self.main else ():
            log.warning("update %d: %s", update, text)

    def rollout(self, update: int, rollout: Rollout, notes: list[str]) -> None:
        """Some images of a rollout, where they are due."""
        if self.main and update % self.settings.sample_every == 0 and rollout.images is not None:
            keep = self.settings.keep_samples
            path = samples.write_rollout(self.folder, update, rollout, notes, keep)
            trackers.image(self.accelerator, "samples", path, update)

    def evaluation(self, update: int, report: EvalReport) -> None:
        """Some images of an evaluation."""
        if self.main and report.examples:
            keep = self.settings.keep_samples
            path = samples.write_examples(self.folder, update, report.examples, keep)
            trackers.image(self.accelerator, "held_out", path, update)

    def best(self, update: int) -> None:
        """before_after.png, after an evaluation whose adapter is kept."""
        if self.main and (path := samples.write_before_after(self.folder, update)):
            trackers.image(self.accelerator, path.stem, path, update)

    def drift(self, update: int, kind: str, check: Check) -> None:
        """A check of the drift."""
        if self.main:
            samples.write_drift(self.folder, update, kind, check, self.settings.keep_samples)


class DriftWatch:
    """How far the images are from the base model's. too_far: of what is to stop the run."""

    def __init__(
        self, config: TrainingStage, monitor: Monitor | None, alarm: Alarm, run_log: RunLog
    ) -> None:
        self.settings, self.monitor, self.alarm = config.alarm, monitor, alarm
        self.log = run_log
        self.too_far = ""

    def due(self, rollout: Rollout, update: int) -> bool:
        """Whether a rollout is to be compared with the base's images."""
        return self.monitor is not None and self.monitor.due(rollout, update)

    def rollout(self, rollout: Rollout, update: int) -> dict[str, float]:
        """The drift of a rollout that is due."""
        assert self.monitor
        check = self.monitor.rollout(rollout, update)
        return self._note(update, check, "the rollout", metrics.IMAGE_DRIFT, samples.DRIFT)

    def evaluation(self, update: int) -> dict[str, float]:
        """The drift of the averaged adapter on held-out prompts."""
        check = self.monitor.evaluation() if self.monitor else None
        if check is None:
            return {}
        prefix, kind = metrics.HELD_OUT_IMAGE_DRIFT, samples.HELD_OUT_DRIFT
        return self._note(update, check, "the evaluation", prefix, kind)

    def _note(
        self, update: int, check: Check, where: str, prefix: str, kind: str
    ) -> dict[str, float]:
        assert self.settings
        self.log.warn(update, self.alarm.drift(check.drifts, self.settings.warn, where))
        self.log.drift(update, kind, check)
        worst = [drift for drift in check.drifts if drift.beyond(self.settings.stop)]
        if worst:
            self.too_far = f"{where}: {'; '.join(map(str, worst))}"
        beyond = sum(drift.beyond(self.settings.warn) for drift in check.drifts)
        values = {f"{prefix}{drift.name}": drift.sigmas for drift in check.drifts}
        return {**values, metrics.DRIFT_ALARMS: beyond}


class Evaluations:
    """Scores the student on held-out prompts; says which adapter is the best.

    last: update of the last evaluation that counted. best: headline and update of the best one.
    """

    def __init__(
        self,
        config: TrainingStage,
        evaluate: Evaluate | None,
        alarm: Alarm,
        drift: DriftWatch,
        run_log: RunLog,
    ) -> None:
        self.evaluate, self.settings = evaluate, config.evaluation
        self.updates = config.train.updates
        self.alarm, self.drift, self.log = alarm, drift, run_log
        self.last = -1
        self.best: dict[str, float] = {}

    def due(self, update: int) -> bool:
        """Whether the weights after an update are to be scored, and were not."""
        if self.evaluate is None or self.settings is None or self.last == update:
            return False
        return update == self.updates or update % self.settings.every == 0

    def note(
        self,
        update: int,
        headline: float,
        report: EvalReport,
        keep: Callable[[Mapping[str, float]], None],
    ) -> bool:
        """Log an evaluation, and `keep` the adapter if it is the best so far; the first of equals
        stays. False if too many images were lost, so that it does not count."""
        counted = [row for row in report.rows if row.benchmark not in report.lost]
        rows = {f"{row.benchmark}/{row.metric}": measured(row) for row in counted}
        means = {metrics.EVAL + name: mean for name, (mean, _) in rows.items()}
        self.log.warn(update, [f"the evaluation lost {text}" for text in report.lost.values()])
        self.log.evaluation(update, report)
        if math.isnan(headline):
            self.log.write(update, {metrics.LOST: len(report.lost), **means})
            return False
        drift = self.drift.evaluation(update)
        alarms = self.alarm.look(rows)
        values = {metrics.HEADLINE: headline, **means, metrics.ALARMS: len(alarms), **drift}
        self.log.write(update, values)
        self.log.warn(update, alarms)
        if headline > self.best.get("headline", -math.inf):
            self.best = {"headline": headline, "update": update}
            keep(self.best)
            self.log.best(update)
        self.last = update
        return True

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"evaluated": self.last, "best": self.best}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` returned."""
        self.last, self.best = state["evaluated"], state["best"]
