"""Warnings about a run: divergence; reward hacking (the trained reward improves while held-out
scores fall); and, as an earlier sign, images that drift from the base model's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Mapping, Sequence
from typing import Any

from flowalign.report.drift.compare import Drift
from flowalign.training import metrics
from flowalign.training.evaluations import SURE, Change, Evaluation, Measured
from flowalign.training.events import Learned, Listener, warn

LASTING = 5  # consecutive wrong updates before a warning
CLIPPED = 0.5  # share of clipped policy ratios above which little is learnt
FARTHER = 10.0  # times the first distance to the teachers, which should only fall


class Alarm(Listener):
    """Compares the trained objective (reward, or minus distillation loss) with every held-out
    score. rewards: their names by task."""

    key = "alarm"

    def __init__(self, rewards: Mapping[str, str] | None = None) -> None:
        self.rewards = dict(rewards or {})
        self.trained: list[Measured] = []  # objective of each period between evaluations
        self.held_out: list[dict[str, Measured]] = []  # held-out numbers of each evaluation
        self.period: list[float] = []  # objectives since the last evaluation
        self.first_distance: float | None = None  # to the teachers, or the loss of a cold start
        self.lasting: dict[str, int] = {}  # {what is wrong: updates in a row}
        self.drifting: dict[str, list[str]] = {}  # {where: statistics beyond the limit}

    def learned(self, update: int, learned: Learned) -> None:
        warn(update, self.update(learned.values))

    def evaluated(self, update: int, evaluation: Evaluation) -> None:
        if evaluation.counts:
            evaluation.alarms += self.look(evaluation.rows, evaluation.changes)
            evaluation.alarms += self.watch(evaluation.changes)
            evaluation.values[metrics.ALARMS] = len(evaluation.alarms)

    def update(self, values: Mapping[str, float]) -> list[str]:
        """Note an update. Returns a sentence when LASTING updates in a row had too many clipped
        ratios, or were FARTHER from the teachers than the first update. Returns one, once, for a
        task whose prompts all had constant rewards for LASTING updates."""
        distance = values.get(metrics.DISTILL, math.nan)
        value = values.get(metrics.REWARD, -distance)
        if math.isfinite(value):
            self.period.append(value)
        if not {metrics.DISTILL, metrics.REWARD} & values.keys():
            # a cold start; the loss of a policy has no scale
            distance = values.get(metrics.LOSS, math.nan)
        if self.first_distance is None and math.isfinite(distance):
            self.first_distance = distance
        sentences = []
        remedy = "Look at the samples; lower optimizer.lr, or updates_per_rollout"
        if self._lasts("clipped", (clipped := values.get(metrics.CLIP_FRACTION, 0.0)) > CLIPPED):
            sentences.append(
                f"clip_fraction is {clipped:.2f}, and was above {CLIPPED:g} in {LASTING} updates: "
                f"most of the gradient is cut off. {remedy}"
            )
        times = distance / self.first_distance if self.first_distance else math.nan
        if self._lasts("farther", times > FARTHER):
            sentences.append(
                f"the distance to the teachers is {times:.3g} times that of the first update, and "
                f"was above {FARTHER:g} in {LASTING} updates: the student diverges. {remedy}"
            )
        alone = metrics.KEPT_SHARE if len(self.rewards) == 1 else ""
        for task, name in self.rewards.items():
            differs = values.get(metrics.TASK_ADVANTAGE + task, values.get(alone))
            if differs is None or self.lasting.get(key := f"constant/{task}", 0) >= LASTING:
                continue
            if self._lasts(key, differs == 0):
                sentences.append(
                    f"reward {name} of task {task} gave the images of every prompt the same score "
                    f"in {LASTING} updates: nothing is learnt from it. Look at the samples, and at "
                    "the reward with `flowalign doctor --reward` (docs/reward.md)"
                )
        return sentences

    def _lasts(self, sign: str, wrong: bool) -> bool:
        """Whether this is the last of LASTING wrong updates in a row."""
        self.lasting[sign] = self.lasting.get(sign, 0) + 1 if wrong else 0
        return self.lasting[sign] == LASTING

    def look(self, held_out: Mapping[str, Measured], watched: Container[str] = ()) -> list[str]:
        """A sentence for each number that fell from its best: of all numbers where training or a
        held-out reward has risen, else of the rewards alone, for a tag has few prompts.
        Differences within SURE standard errors, or with an unknown error, raise no alarm. The
        errors assume independent prompts; that is conservative, because evaluations share their
        prompts. watched: benchmarks that `watch` compares, with the start and paired."""
        if len(self.period) > 1:
            error = statistics.stdev(self.period) / math.sqrt(len(self.period))
            self.trained.append((statistics.fmean(self.period), error))
        self.period = []
        self.held_out.append(dict(held_out))
        risen, meaning = self.risen, self.meaning
        sentences = []
        for name, now in held_out.items():
            best = max(report[name] for report in self.held_out if name in report)
            benchmark, _, metric = name.partition("/")
            counts = benchmark not in watched and (risen or metric == metrics.REWARD)
            if counts and _beyond(now, best):
                fell = f"fell from {best[0]:.3f} to {now[0]:.3f} (± {now[1]:.3f})"
                sentences.append(f"held-out {name} {fell} {meaning}")
        return sentences

    def watch(self, changes: Mapping[str, Change]) -> list[str]:
        """A sentence for each judge that the run does not learn from and whose number fell since
        the start."""
        return [
            f"{name}, which is not trained, fell from {change} {self.meaning}. Worst: "
            f"{'; '.join(map(repr, worst(change)))}. Look at report.html; evaluation.on_fall keeps "
            "the adapter from before the fall"
            for name, change in changes.items()
            if change.fell
        ]

    @property
    def risen(self) -> str:
        """How the trained objective rose since the first period, or else a reward on held-out
        prompts since the first evaluation: the objective of few images is noisy. "" if none did."""
        seen = {"training improved": self.trained}
        for task in self.rewards:
            name = f"{task}/{metrics.REWARD}"
            seen[f"held-out {name} rose"] = [rows[name] for rows in self.held_out if name in rows]
        for what, values in seen.items():
            if len(values) > 1 and _beyond(values[0], values[-1]):
                return f"while {what} from {values[0][0]:.3g} to {values[-1][0]:.3g}"
        return ""

    @property
    def meaning(self) -> str:
        """What a fall means, and what to do."""
        if risen := self.risen:
            return (
                f"{risen}: is the reward hacked? Look at the samples; an earlier adapter, a lower "
                "learning rate or an anchor may help "
                "(docs/reward.md#it-rises-and-the-images-get-worse)"
            )
        return (
            "and training does not improve: does the run diverge? Look at the samples; lower "
            "optimizer.lr, or go back to an earlier adapter (docs/reward.md#it-rises-then-falls)"
        )

    def drift_warnings(
        self, drifts: Sequence[Drift], warn: float, where: str, reference: str = "base"
    ) -> list[str]:
        """A sentence for each statistic that is newly beyond `warn` sigmas, or is so again. where:
        the images, such as "the rollout". reference: what they are compared with."""
        beyond = [drift for drift in drifts if drift.beyond(warn)]
        before = self.drifting.get(where, [])
        self.drifting[where] = [drift.name for drift in beyond]
        return [
            f"images of {where} drift from the {reference}: {drift}, beyond alarm.warn = {warn:g}. "
            "Look at them (`flowalign watch`): an honest gain, or a hack of the reward?"
            for drift in beyond
            if drift.name not in before
        ]

    def state(self) -> dict[str, Any]:
        """All attributes; an unknown error is NaN."""
        return dict(vars(self))

    def load(self, state: Mapping[str, Any], comparable: bool = True) -> None:
        vars(self).update(state, rewards=self.rewards)
        if not comparable:
            self.trained = []
            self.held_out = []
            return
        self.trained = [_measured(pair) for pair in state["trained"]]
        earlier = state["held_out"]
        self.held_out = [{k: _measured(v) for k, v in seen.items()} for seen in earlier]


def worst(change: Change, count: int = 3) -> list[str]:
    """The prompts that fell most, first."""
    return sorted(change.moved, key=lambda prompt: change.moved[prompt])[:count]


def _measured(pair: Sequence[float | None]) -> Measured:
    mean, error = (math.nan if number is None else number for number in pair)
    return mean, error


def _beyond(low: Measured, high: Measured) -> bool:
    # the standard error of a difference of two independent means
    return high[0] - low[0] > SURE * math.hypot(low[1], high[1])
