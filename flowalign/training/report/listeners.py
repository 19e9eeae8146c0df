"""What listens to a run: its log, samples and the drift of its images, and its evaluations.

The loop tells them what happens; they write, warn, and choose the best adapter.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flowalign.config import TrainingStage
from flowalign.system import files
from flowalign.system.files import to_json
from flowalign.training import metrics
from flowalign.training.report import page, samples, trackers
from flowalign.training.report.alarm import Alarm, measured
from flowalign.training.report.drift.compare import Check
from flowalign.types import EvalReport, EvalRow, Rollout

log = logging.getLogger("flowalign")

OnUpdate = Callable[[int, Mapping[str, float]], None]
Evaluate = Callable[[], tuple[EvalRow | None, EvalReport]]  # None where no task has a reward


class RunLog:
    """metrics.jsonl, the trackers, the warnings and the samples of a run; the main process writes
    them."""

    def __init__(
        self, config: TrainingStage, accelerator: Accelerator, alarm: Alarm, on_update: OnUpdate
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.alarm = alarm
        self.folder = Path(config.output)
        self.on_update = on_update
        self.main = accelerator.is_main_process

    def write(self, update: int, values: Mapping[str, float]) -> None:
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            row = to_json({metrics.UPDATE: update, **values})
            files.append(self.config.folder.log, json.dumps(row, allow_nan=False) + "\n")
            self.on_update(update, values)
        self.accelerator.log(dict(values), step=update)

    def warn(self, update: int, texts: Iterable[str]) -> None:
        for text in texts if self.main else ():
            log.warning("update %d: %s", update, text)

    def rollout(self, update: int, rollout: Rollout, notes: list[str]) -> None:
        """Some images of a rollout, where they are due, and of the last."""
        train = self.config.train
        due = update % train.sample_every == 0 or update == train.updates
        if self.main and due and rollout.images is not None:
            path = samples.write_rollout(self.folder, update, rollout, notes)
            trackers.image(self.accelerator, "samples", path, update)

    def evaluation(self, update: int, report: EvalReport) -> None:
        if self.main and report.examples:
            path = samples.write_examples(self.folder, update, report.examples)
            trackers.image(self.accelerator, "held_out", path, update)

    def page(self) -> None:
        if self.main:
            page.write(self.folder, self.config)

    def drift(self, update: int, check: Check) -> dict[str, float]:
        """A check of the drift, and warnings of it; its figures."""
        limits = self.config.alarm
        where = "the rollout"
        assert limits
        self.warn(update, self.alarm.drift(check.drifts, limits.warn, where, limits.reference))
        if self.main:
            samples.write_drift(self.folder, update, to_json(asdict(check)))
        beyond = sum(drift.beyond(limits.warn) for drift in check.drifts)
        values = {metrics.IMAGE_DRIFT + drift.name: drift.sigmas for drift in check.drifts}
        return {**values, metrics.DRIFT_ALARMS: beyond}


class Evaluations:
    """Scores the student on held-out prompts; says which adapter is the best.

    last: update of the last evaluation that counted. best: headline and update of the best one.
    nearest: the least mean distance to the targets at fixed states, and the evaluations since.
    """

    def __init__(self, config: TrainingStage, evaluate: Evaluate | None, run_log: RunLog) -> None:
        self.evaluate = evaluate
        self.config = config
        self.log = run_log
        self.last = -1
        self.best: dict[str, float] = {}
        self.nearest: dict[str, float] = {}

    @property
    def stalled(self) -> bool:
        """Whether the run ends, since its students came no nearer to their targets."""
        patience = self.config.patience
        return patience is not None and self.nearest.get("since", 0) >= patience

    def due(self, update: int) -> bool:
        """Whether the weights after an update are to be scored, and were not."""
        settings = self.config.evaluation
        if self.evaluate is None or settings is None or self.last == update:
            return False
        return update == self.config.train.updates or update % settings.every == 0

    def note(
        self,
        update: int,
        scored: EvalRow | None,
        report: EvalReport,
        more: Mapping[str, float],
        keep: Callable[[Mapping[str, float]], None],
    ) -> bool:
        """Log an evaluation and what else was measured, and `keep` the adapter if it is the best so
        far; the first of equals stays. scored: the headline; without one it is minus the
        distance to the targets. False if too many images were lost, so that it does not count.

        The weights that the run began with stay only if those after are worse by more than a
        standard error: by the luck of a few prompts all training would be thrown away.
        """
        distance = more.get(metrics.FIXED_MEAN, math.nan)
        headline = scored.mean if scored else -distance
        counted = [row for row in report.rows if row.benchmark not in report.lost]
        rows = {f"{row.benchmark}/{row.metric}": measured(row) for row in counted}
        means = {metrics.EVAL + name: mean for name, (mean, _) in rows.items()}
        self.log.warn(update, [f"the evaluation lost {text}" for text in report.lost.values()])
        self.log.evaluation(update, report)
        if math.isnan(headline):
            self.log.write(update, {metrics.LOST: len(report.lost), **means})
            return False
        alarms = self.log.alarm.look(rows)
        values = {metrics.HEADLINE: headline, **means, **more, metrics.ALARMS: len(alarms)}
        self.log.write(update, values)
        self.log.warn(update, alarms)
        noise = 0.0
        best = self.best.get("headline", -math.inf)
        if scored and self.best.get("update") == 0 and math.isfinite(scored.stderr):
            noise = measured(scored)[1]
        if headline > best - noise and headline != best:
            self.best = {"headline": headline, "update": update}
            keep(self.best)
        self.last = update
        if distance < self.nearest.get("distance", math.inf):
            self.nearest = {"distance": distance, "since": 0}
        elif not math.isnan(distance):
            self.nearest["since"] += 1
        if self.stalled:
            text = f"no nearer to the targets for {self.config.patience} evaluations"
            self.log.warn(update, [f"{text} (student.patience): the run ends here"])
        self.log.page()
        return True

    def state(self) -> dict[str, Any]:
        return {"evaluated": self.last, "best": self.best, "nearest": self.nearest}

    def load(self, state: Mapping[str, Any]) -> None:
        self.last, self.best = state["evaluated"], state["best"]
        self.nearest = state.get("nearest", {})
