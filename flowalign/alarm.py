"""A warning when what is trained improves while what is held out falls: drift, reward hacking."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Measured = tuple[float, float]  # a mean and its standard error
SURE = 2.0  # standard errors of a difference that count as a change


class Alarm:
    """Compares the evaluations of a run. What is trained: the reward, or minus the distillation
    loss; what is watched: every held-out number."""

    def __init__(self) -> None:
        self.trained: list[Measured] = []  # one each period between evaluations
        self.watched: list[dict[str, Measured]] = []  # one each evaluation
        self.period: list[float] = []

    def update(self, metrics: Mapping[str, float]) -> None:
        """Note what an update says of the objective, if anything."""
        value = metrics.get("reward", -metrics.get("distill", math.nan))
        self.period += [value] if math.isfinite(value) else []

    def look(self, held_out: Mapping[str, Measured]) -> list[str]:
        """What fell since the first evaluation, or since its best, while training improved from
        the first period to this one: a sentence each. Differences within SURE standard errors, and
        errors that are not known, raise no alarm."""
        if len(self.period) > 1:
            error = statistics.stdev(self.period) / math.sqrt(len(self.period))
            self.trained.append((statistics.fmean(self.period), error))
        self.period = []
        self.watched.append(dict(held_out))
        if len(self.trained) < 2 or not _beyond(self.trained[0], self.trained[-1]):
            return []
        return list(filter(None, (self._fallen(name, now) for name, now in held_out.items())))

    def _fallen(self, name: str, now: Measured) -> str:
        before = [found[name] for found in self.watched[:-1] if name in found]
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
        """Back to what `state` gave."""
        self.trained = _pairs(state["trained"])
        self.watched = [
            dict(zip(found, _pairs(found.values()), strict=True)) for found in state["watched"]
        ]
        self.period = list(state["period"])


def _beyond(low: Measured, high: Measured) -> bool:
    """Whether high is surely above low."""
    return high[0] - low[0] > SURE * math.hypot(low[1], high[1])


def _pairs(values: Any) -> list[Measured]:
    found: Sequence[Any] = list(values)
    return [(mean, error) for mean, error in found]
