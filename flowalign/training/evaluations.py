"""The evaluations of a run: when they are due, which adapter is the best, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowalign.config import TrainingStage
from flowalign.training import metrics
from flowalign.types import EvalReport, EvalRow, Watched

Evaluate = Callable[[], tuple[EvalRow | None, EvalReport]]  # None where no task has a reward
Measured = tuple[float, float]  # a mean and its standard error
SURE = 2.0  # standard errors of a difference that count as a change
# and of a watched judge's fall: there are many of them, at many evaluations (docs/alarm.md)
FALL = 3.0


def measured(row: EvalRow) -> Measured:
    """The mean of a held-out number, and its standard error over prompts. For a share, at least the
    error of independent images: a tag may have only two prompts, whose means may agree by
    chance."""
    alone = max(0.0, row.mean * (1 - row.mean)) / max(1, row.n)
    return row.mean, max(row.stderr, math.sqrt(alone))


@dataclass(frozen=True)
class Change:
    """What a number has become since the start of the run, on the same prompts and noise.

    stderr: of the difference, paired: the root of the sum of squares of `moved`, which has how far
    each prompt moves the difference. images: the image set.
    """

    start: float
    now: float
    stderr: float
    moved: Mapping[str, float]
    images: str

    @property
    def difference(self) -> float:
        return self.now - self.start

    @property
    def fell(self) -> bool:
        """Whether it is lower by more than FALL standard errors."""
        return self.difference < -FALL * self.stderr

    def __str__(self) -> str:
        about = f"{self.difference:+.3f} ± {self.stderr:.3f}, paired over {len(self.moved)} prompts"
        return f"{self.start:.3f} to {self.now:.3f} ({about})"


def change_of(start: EvalRow, now: Watched) -> Change:
    """The change of a watched number since the start."""
    moved = now.row.moved_from(start)
    stderr = math.hypot(*moved.values())
    return Change(start.mean, now.row.mean, stderr, moved, now.images)


@dataclass
class Evaluation:
    """The result of an evaluation. Listeners may add to its values and alarms.

    rows: each number that counts, by BENCHMARK/METRIC. values: the row of the log. counts: whether
    few enough images were lost. best: whether its adapter is the best so far. changes: of the
    judges that the run does not learn from. alarms: its warnings. stalled: why the run ends after
    it, "" = it continues.
    """

    report: EvalReport
    rows: Mapping[str, Measured]
    values: dict[str, float]
    counts: bool = True
    best: bool = False
    changes: Mapping[str, Change] = field(default_factory=dict)
    stalled: str = ""
    alarms: list[str] = field(default_factory=list)


class Evaluations:
    """Scores the student on held-out prompts; says which adapter is the best.

    last: update of the last evaluation that counted. best: headline and update of the best one.
    nearest: the least mean distance to the targets at fixed states, and the evaluations since.
    start: the watched numbers at the first evaluation. fallen: those that fell since, at the last.
    """

    def __init__(self, config: TrainingStage, evaluate: Evaluate | None) -> None:
        self.evaluate = evaluate
        self.config = config
        self.last = -1
        self.best: dict[str, float] = {}
        self.nearest: dict[str, float] = {}
        self.start: dict[str, EvalRow] = {}
        self.fallen: list[str] = []

    @property
    def stalled(self) -> str:
        """Why the run ends before its last update; "" = it goes on."""
        patience = self.config.patience
        if patience is not None and self.nearest.get("since", 0) >= patience:
            text = f"no nearer to the targets for {patience} evaluations"
            return f"{text} (student.patience): the run ends here"
        if self.fallen and self._on_fall == "stop":
            return f"{', '.join(self.fallen)} fell (evaluation.on_fall): the run ends here"
        return ""

    @property
    def _on_fall(self) -> str:
        return self.config.evaluation.on_fall if self.config.evaluation else "warn"

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
        watched = report.watched
        self.start = {name: one.row for name, one in watched.items()} | self.start
        changes = {name: change_of(self.start[name], one) for name, one in watched.items()}
        self.fallen = [name for name, change in changes.items() if change.fell]
        if self.fallen and self._on_fall != "warn":
            best = False
        if best:
            self.best = {"headline": headline, "update": update}
        self.last = update
        if distance < self.nearest.get("distance", math.inf):
            self.nearest = {"distance": distance, "since": 0}
        elif not math.isnan(distance):
            self.nearest["since"] += 1
        differences = {metrics.WATCHED + name: c.difference for name, c in changes.items()}
        values = {metrics.HEADLINE: headline, **means, **more, **differences}
        return Evaluation(report, rows, values, True, best, changes, self.stalled)

    def state(self) -> dict[str, Any]:
        start = {
            name: {"mean": row.mean, "influence": row.influence} for name, row in self.start.items()
        }
        known = {"evaluated": self.last, "best": self.best, "nearest": self.nearest}
        return {**known, "start": start, "fallen": self.fallen}

    def load(self, state: Mapping[str, Any]) -> None:
        self.last = state["evaluated"]
        self.best = state["best"]
        self.nearest = state.get("nearest", {})
        self.start = {
            name: EvalRow(name, "", row["mean"], math.nan, 0, influence=row["influence"])
            for name, row in state.get("start", {}).items()
        }
        self.fallen = state.get("fallen", [])
