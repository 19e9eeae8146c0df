"""`flowalign doctor --hours`: a smaller run that is predicted to end in time.

What is cut first costs least of what is learnt, as far as that was measured (CUTS): on the tiny
model alone. Reasons name pages of docs.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

from flowalign.commands.doctor.estimate import evaluated_images
from flowalign.commands.doctor.findings import fault, note, ok, show
from flowalign.commands.doctor.predictions import Forecast, shown_hours
from flowalign.config import ConfigError, RecipeStage, Stage, TrainingStage

LONG = 100  # hours above which a run is noted
NEAR = 1.05  # times its hours that a stage may take and lose a few updates alone


class Cut(NamedTuple):
    """A key that is lowered, to `floor` at least, and why it comes at its place. taught: the floor
    of a student of teachers; None = the same, 0 = it is not cut."""

    key: str
    floor: Any
    why: str
    taught: int | None = None


CUTS = (
    Cut("benchmarks.*.images", 1, "images of one prompt resemble each other (log)"),
    Cut("benchmarks.*.limit", 128, "standard errors grow: at most .044 of a share"),
    Cut("evaluation.prompts", 64, "the best update is chosen less surely: errors of at most .063"),
    Cut("student.states.select", "high_noise", "one such state was level with all (log)"),
    Cut("student.states.count", 1, "one random state was .005 behind three (study)"),
    Cut(
        "rollout.prompts",
        8,
        "a quarter of the images cost as little as half of the rollouts (budget)",
        taught=128,
    ),
    Cut("rollout.copies", 8, "groups of 8 learn (results); larger ones were not compared"),
    Cut("{stage}.states", 1, "1 of 8 cost a quarter of the gain of an OCR teacher (budget)"),
    Cut("train.updates", 100, "half of the rollouts cost a quarter of the gain (budget)"),
    Cut("rollout.window", "[0,4]", "4 of 10 steps were enough (log); all were not compared", 0),
    Cut("train.updates", 30, "the tiny model's teachers learn most in 30 (results)"),
    Cut("rollout.steps", 6, "not measured: the reward sees other images than the users do"),
)
TRIM = Cut("train.updates", 1, "hardly fewer")


def conclude(config: Stage, listed: Sequence[Forecast], limit: float | None) -> bool:
    """Print the hours of all stages, and cuts if they exceed `limit`; False for a fault."""
    total = sum(forecast.hours for forecast in listed)
    text = f"time: {shown_hours(total)} h"
    if limit is None:
        show([note(f"{text}. --hours 24 proposes a smaller run")] if total > LONG else [])
    elif not any(forecast.times for forecast in listed):
        show([fault("time: --hours needs a rate, not known here: add --gpu or --tflops")])
    else:
        if total > limit >= float(shown_hours(total)):  # rounded down
            text = f"time: {math.ceil(10 * total) / 10:g} h"
        show([(ok if total <= limit else fault)(f"{text} of {limit:g}")])
        if total > limit:
            print(propose(config, listed, limit))
    return limit is None or 0 < total <= limit


def propose(config: Stage, listed: Sequence[Forecast], limit: float) -> str:
    """The arguments of `flowalign train` after which all stages take at most so many hours, as far
    as CUTS go, which are printed. Short stages leave their share to longer ones."""
    timed = sorted((f for f in listed if f.times), key=lambda forecast: forecast.hours)
    chains = [list(_chain(forecast)) for forecast in timed]
    pairs = zip(timed, chains, strict=True)
    least = [min([f.hours, *(after.hours for *_, after in chain)]) for f, chain in pairs]
    rest, lines = limit, []
    for number, forecast in enumerate(timed):
        share = min(rest / (len(timed) - number), rest - sum(least[number + 1 :]))
        after, keys = forecast, {}
        chain = chains[number]
        if forecast.hours <= NEAR * share:
            chain = [step for step in _chain(forecast, [TRIM]) if step[2].hours <= share] or chain
        for cut, texts, after in _fitted(chain, share):
            head = f"  {forecast.name}: {' '.join(texts)}: {shown_hours(after.hours)} h"
            show([note(f"{head}. {cut.why}")])
            keys |= {text.partition("=")[0]: text for text in texts}  # a later value replaces
        rest, words = rest - after.hours, list(keys.values())
        if isinstance(config, RecipeStage) and words:  # `set` comes after everything else
            words = [*config.stages[forecast.name].get("set", []), *words]
            words = [f"stages.{forecast.name}.set={json.dumps(words)}"]
        lines += words
    if rest < 0:
        show([note(f"  {shown_hours(limit - rest)} h are the least: use a larger GPU")])
    return shlex.join(lines)


def _chain(
    forecast: Forecast, cuts: Sequence[Cut] = CUTS
) -> Iterator[tuple[Cut, Forecast, Forecast]]:
    """(cut, the forecasts before and after it) of the cuts that save time, all at their floors."""
    for cut in cuts:
        with suppress(ConfigError, LookupError):  # another key needs more; there is no value
            after = forecast.after(_texts(cut, forecast, _values(cut, forecast)[0]))
            if after.hours < forecast.hours:
                yield cut, forecast, after
                forecast = after


def _fitted(
    chain: Sequence[tuple[Cut, Forecast, Forecast]], limit: float
) -> Iterator[tuple[Cut, list[str], Forecast]]:
    """(cut, changes, the forecast with them) until a stage takes at most `limit` hours. The last
    cut goes no further than it must."""
    for cut, before, after in chain:
        if before.hours <= limit:
            return
        values, low, above = _values(cut, before), after.hours, before.hours
        index, high = 0, len(values)
        while 0 < (guess := int((limit - low) / (above - low) * high)) < high:
            tried = before.after(_texts(cut, before, values[guess]))
            if tried.hours <= limit:  # hours are about linear in every key
                index, after = guess, tried
                break
            high, above = guess, tried.hours
        yield cut, _texts(cut, before, values[index]), after


def _values(cut: Cut, forecast: Forecast) -> Sequence[Any]:
    """What a cut can write to a stage, from the floor up."""
    stage, now = forecast.stage, list(_now(cut, forecast).values())
    taught = stage.trains and not stage.learns_from_rewards
    floor = cut.taught if taught and cut.taught is not None else cut.floor
    if isinstance(floor, str) or not floor:
        return [floor] if floor and now[0] in ("all", None) else []
    unit = 1  # of what all processes and optimizer steps share
    if isinstance(stage, TrainingStage) and cut.key in ("rollout.prompts", "rollout.copies"):
        unit = stage.optimizer.updates_per_rollout * forecast.device.gpus
    every = max(evaluated_images(stage).values(), default=0)  # for None
    largest = max((value or every for value in now), default=0)
    return range(-(-floor // unit) * unit, largest, unit)


def _texts(cut: Cut, forecast: Forecast, value: Any) -> list[str]:
    """The changes that write a value where there is a larger one."""
    now = _now(cut, forecast)
    return [f"{key}={value}" for key, v in now.items() if not isinstance(v, int) or v > value]


def _now(cut: Cut, forecast: Forecast) -> dict[str, Any]:
    """{key of a stage that a cut means: its value}. The first rows of a .jsonl may be of one tag,
    as those of GenEval are, so that `limit` is for sets of texts."""
    stage = forecast.stage
    head, star, leaf = cut.key.format(stage=stage.stage).partition(".*.")
    with suppress(AttributeError):
        found = attrgetter(head)(stage)
        if not star:
            return {head: found}
        marks = {f"{head}.{i}.{leaf}": mark for i, mark in enumerate(found)}
        whole = ".jsonl" if leaf == "limit" else "/"
        return {key: getattr(m, leaf) for key, m in marks.items() if not m.prompts.endswith(whole)}
    return {}
