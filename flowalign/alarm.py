"""A warning when what is trained improves while what is held out falls: drift, reward hacking."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from flowalign import metrics

Measured = tuple[float, float]  # a mean and its standard error
SURE = 2.0  # standard errors of a difference that count as a change


class Alarm:
    """Compares the evaluations of a run: what is trained (the reward, or minus the distillation
    loss) with what is watched (every held-out number)."""

    def __init__(self) -> None:
        self.trained: list[Measured] = []  # one each period between evaluations
        self.watched: list[dict[str, Measured]] = []  # one each evaluation
        self.period: list[float] = []

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
        return list(filter(None, (self._fallen(name, now) for name, now in held_out.items())))

    def _fallen(self, name: str, now: Measured) -> str:
        before = [report[name] for report in self.watched[:-1] if name in report]
        best = max(before, default=now)
        if not _beyond(now, best):
            return ""
        return (
            f"held-out {name} fell from {best[0]:.3f} to {now[0]:.3f} (± {now[1]:.3f}) while "
            f"training improved from {self.trained[0][0]:.3g} to {self.trained[-1][0]:.3g}: look "
            "at the samples; an earlier adapter, a lower learning rate or an anchor may help"
        )

    def state(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {"trained": self.trained, "watched": self.watched, "period": self.period}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` returned."""
        self.trained = [(mean, error) for mean, error in state["trained"]]
        self.watched = [
            {name: (mean, error) for name, (mean, error) in report.items()}
            for report in state["watched"]
        ]
        self.period = list(state["period"])


def _beyond(low: Measured, high: Measured) -> bool:
    """Whether high is above low by more than chance."""
    return high[0] - low[0] > SURE * math.hypot(low[1], high[1])
