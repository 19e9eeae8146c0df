"""The evaluations of a run: when they are due, which adapter is the best, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowalign.config import TrainingStage
from flowalign.training import metrics
from flowalign.types import EvalReport, EvalRow

Evaluate = Callable[[], tuple[EvalRow | None, EvalReport]]  # None where no task has a reward
Measured = tuple[float, float]  # a mean and its standard error


def measured(row: EvalRow) -> Measured:
    """The mean of a held-out number, and its standard error over prompts. For a share, at least the
    error of independent images: a tag may have only two prompts, whose means may agree by
    chance."""
    alone = max(0.0, row.mean * (1 - row.mean)) / max(1, row.n)
    return row.mean, max(row.stderr, math.sqrt(alone))


@dataclass
class Evaluation:
    """The result of an evaluation. Listeners may add to its values and alarms.

    rows: each number that counts, by BENCHMARK/METRIC. values: the row of the log. counts: whether
    few enough images were lost. best: whether its adapter is the best so far. alarms: its
    warnings. stalled: why the run ends after it, "" = it continues.
    """

    report: EvalReport
    rows: Mapping[str, Measured]
    values: dict[str, float]
    counts: bool = True
    best: bool = False
    stalled: str = ""
    alarms: list[str] = field(default_factory=list)


class Evaluations:
    """Scores the student on held-out prompts; says which adapter is the best.

    last: update of the last evaluation that counted. best: headline and update of the best one.
    nearest: the least mean distance to the targets at fixed states, and the evaluations since.
    """

    def __init__(self, config: TrainingStage, evaluate: Evaluate | None) -> None:
        self.evaluate = evaluate
        self.config = config
        self.last = -1
        self.best: dict[str, float] = {}
        self.nearest: dict[str, float] = {}

    @property
    def stalled(self) -> bool:
        """Whether the run ends because the student no longer gets nearer to its targets."""
        patience = self.config.patience
        return patience is not None and self.nearest.get("since", 0) >= patience

    def due(self, update: int) -> bool:
        """Whether the weights after an update should be scored and have not been."""
        settings = self.config.evaluation
        if self.evaluate is None or settings is None or self.last == update:
            return False
        return update == self.config.train.updates or update % settings.every == 0

    def note(
        self, update: int, scored: EvalRow | None, report: EvalReport, more: Mapping[str, float]
    ) -> Evaluation:
        """Note an evaluation and what else was measured. Its adapter is the best if it is better
        than all before; the first of equals stays. scored: the headline; without one it is minus
        the distance to the targets.

        The initial weights stay the best only if all later ones are worse by more than a standard
        error. Otherwise chance on a few prompts could discard all training.
        """
        distance = more.get(metrics.FIXED_MEAN, math.nan)
        headline = scored.mean if scored else -distance
        counted = [row for row in report.rows if row.benchmark not in report.lost]
        rows = {f"{row.benchmark}/{row.metric}": measured(row) for row in counted}
        means = {metrics.EVAL + name: mean for name, (mean, _) in rows.items()}
        if math.isnan(headline):
            values = {metrics.LOST: len(report.lost), **means}
            return Evaluation(report, rows, values, counts=False)
        noise = 0.0
        highest = self.best.get("headline", -math.inf)
        if scored and self.best.get("update") == 0 and math.isfinite(scored.stderr):
            noise = measured(scored)[1]
        best = headline > highest - noise and headline != highest
        if best:
            self.best = {"headline": headline, "update": update}
        self.last = update
        if distance < self.nearest.get("distance", math.inf):
            self.nearest = {"distance": distance, "since": 0}
        elif not math.isnan(distance):
            self.nearest["since"] += 1
        stalled = ""
        if self.stalled:
            text = f"no nearer to the targets for {self.config.patience} evaluations"
            stalled = f"{text} (student.patience): the run ends here"
        values = {metrics.HEADLINE: headline, **means, **more}
        return Evaluation(report, rows, values, best=best, stalled=stalled)

    def state(self) -> dict[str, Any]:
        return {"evaluated": self.last, "best": self.best, "nearest": self.nearest}

    def load(self, state: Mapping[str, Any]) -> None:
        self.last, self.best = state["evaluated"], state["best"]
        self.nearest = state.get("nearest", {})
