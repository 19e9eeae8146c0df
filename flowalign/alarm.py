"""A warning when what is trained improves while what is held out falls: drift, reward hacking."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flowalign import metrics

Measured = tuple[float, float]  # a mean and its standard error
SURE = 2.0  # standard errors of a difference that count as a change


class Alarm:
    """Compares what is trained (reward, or minus distillation loss) with every held-out number."""

    def __init__(self) -> None:
        self.trained: list[Measured] = []  # one for each period between evaluations
        self.watched: list[dict[str, Measured]] = []  # one for each evaluation
        self.period: list[float] = []  # objectives since the last evaluation

    def update(self, values: Mapping[str, float]) -> None:
        """Note the objective of an update, if it has one."""
        value = values.get(metrics.REWARD, -values.get(metrics.DISTILL, math.nan))
        self.period += [value] if math.isfinite(value) else []

    def look(self, held_out: Mapping[str, Measured]) -> list[str]:
        """A sentence for each number that fell from its best while training improved from the first
        period to this one. Differences within SURE standard errors, or whose error is not known,
        raise no alarm."""
        if len(self.period) > 1:
            error = statistics.stdev(self.period) / math.sqrt(len(self.period))
            self.trained.append((statistics.fmean(self.period), error))
        self.period = []
        self.watched.append(dict(held_out))
        if len(self.trained) < 2 or not _beyond(self.trained[0], self.trained[-1]):
            return []
        fallen = []
        for name, now in held_out.items():
            best = max((seen[name] for seen in self.watched[:-1] if name in seen), default=now)
            if _beyond(now, best):
                fallen.append(
                    f"held-out {name} fell from {best[0]:.3f} to {now[0]:.3f} (± {now[1]:.3f}) "
                    f"while training improved from {self.trained[0][0]:.3g} to "
                    f"{self.trained[-1][0]:.3g}: look at the samples; an earlier adapter, a lower "
                    "learning rate or an anchor may help"
                )
        return fallen

    def state(self) -> dict[str, Any]:
        """Everything; an error that is not known is NaN."""
        return {"trained": self.trained, "watched": self.watched, "period": self.period}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` returned."""
        self.trained = [_measured(pair) for pair in state["trained"]]
        self.watched = [
            {name: _measured(pair) for name, pair in report.items()} for report in state["watched"]
        ]
        self.period = list(state["period"])


def _measured(pair: Sequence[float | None]) -> Measured:
    mean, error = (math.nan if number is None else number for number in pair)  # of JSON
    return mean, error


def _beyond(low: Measured, high: Measured) -> bool:
    # the standard error of a difference of two independent means
    return high[0] - low[0] > SURE * math.hypot(low[1], high[1])
