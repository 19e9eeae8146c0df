"""What the files of a run say of it now. Nothing here writes, and no file needs to be whole."""

from __future__ import annotations

import base64
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowalign.commands.recipe import DONE
from flowalign.config import AlarmConfig, ConfigError, read
from flowalign.system.files import read_lines
from flowalign.training import metrics
from flowalign.training.report import samples
from flowalign.training.report.drift.panel import Panel, read_panel
from flowalign.training.report.pictures import Chart, charts, read_metrics
from flowalign.training.report.progress import duration
from flowalign.training.report.status import WARNINGS, Status, read_status

OVER = ("finished", "stopped", "interrupted")
NEWEST = 20  # warnings that are shown


class NoRun(ValueError):
    """A folder that holds no run: what was seen, what to do."""


@dataclass(frozen=True)
class Image:
    """An image and its note. level: its score from 0 = lowest shown to 100, None = no score."""

    source: str
    note: str
    level: float | None


@dataclass(frozen=True)
class Prompt:
    """A prompt with its images."""

    text: str
    task: str
    images: list[Image]


@dataclass(frozen=True)
class View:
    """A run or a stage. Texts are plain; the template escapes them."""

    name: str
    kind: str  # the config's `stage`
    folder: Path
    state: str  # waiting, running, dead, or one of OVER
    status: Status
    about: str  # what is going on, in a sentence
    facts: list[tuple[str, str]] = field(default_factory=list)
    curves: list[Chart] = field(default_factory=list)
    rollout: list[Prompt] = field(default_factory=list)
    held_out: list[Prompt] = field(default_factory=list)
    drawn: int = 0  # update of `rollout`
    heads: list[str] = field(default_factory=list)  # of the columns of `held_out`
    drifts: list[Panel] = field(default_factory=list)  # from the base: rollout, evaluation
    picture: str = ""  # source of the base and the result side by side
    warnings: list[Mapping[str, Any]] = field(default_factory=list)  # the newest first
    table: str = ""  # of an evaluation, Markdown
    config: str = ""
    stages: list[View] = field(default_factory=list)

    @property
    def share(self) -> float:
        """How much is done, in percent."""
        if self.state == "finished":
            return 100.0
        return 100 * self.status.update / self.status.total if self.status.total else 0.0

    @property
    def open(self) -> bool:
        """Whether it is, of a recipe's stages, the one to look at."""
        return self.state not in ("waiting", "finished")


def look(folder: Path, now: float | None = None) -> View:
    """The run in a folder. Raises NoRun if there is none."""
    now = time.time() if now is None else now
    try:
        config = read(folder / "config.yaml")
        kind = config["stage"]
    except (ConfigError, TypeError, KeyError, OSError) as error:
        raise NoRun(_no_run(folder)) from error
    whole = _view(folder, folder.absolute().name, config, now)
    if kind != "recipe":
        return whole
    listed: Mapping[str, Any] = config.get("stages") or {}
    stages = [_view(folder / name, name, keys, now, whole) for name, keys in listed.items()]
    return replace(whole, stages=stages)


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder. Name the `output` folder of a run."
    inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
    hint = f" There are {', '.join(map(str, inside[:8]))}." if inside else ""
    return (
        f"{folder} is no run: it has no config.yaml with a `stage`. Name the `output` folder of a "
        f"run of `flowalign train`.{hint}"
    )


def _view(
    folder: Path, name: str, config: Mapping[str, Any], now: float, recipe: View | None = None
) -> View:
    """A run, or the stage of a recipe."""
    rows = read_lines(folder / "metrics.jsonl")
    done = _written(folder / DONE)
    status = read_status(folder) or _guessed(folder, config, rows, recipe)
    if done:
        status = replace(status, state="finished", heard=done, began=min(status.began, done))
    state = "dead" if status.silent(now) else status.state
    curves = read_metrics(folder / "metrics.jsonl")
    rollout = samples.newest(folder, samples.TRAINING)
    warnings = read_lines(folder / WARNINGS)[::-1][:NEWEST]
    kind = str(config.get("stage"))
    held_out, heads = _held_out(folder)
    alarm = config.get("alarm") or {}
    return View(
        name=name,
        kind=kind,
        folder=folder,
        state=state,
        status=status,
        about=_about(state, status, now, kind),
        facts=_facts(curves, status),
        curves=charts(curves),
        rollout=_prompts(rollout[1] if rollout else []),
        drawn=rollout[0] if rollout else 0,
        held_out=held_out,
        heads=heads,
        drifts=_drifts(folder, alarm.get("warn", AlarmConfig().warn)),
        picture=_embedded(folder / "before_after.png") if state == "finished" else "",
        warnings=[{**row, "text": str(row.get("text", ""))} for row in warnings],
        table=_text(folder / "table.md").partition("\nEvery metric:")[0],
        config=_text(folder / "config.yaml"),
    )


def _guessed(
    folder: Path, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], recipe: View | None
) -> Status:
    """The status of a folder without one: a stage that has not begun, or keeps none, or a run of an
    older version."""
    if recipe is not None:
        at_it = recipe.status.text == folder.name
        state = recipe.status.state if at_it else "waiting"
        return Status(state, heard=recipe.status.heard, reason=recipe.status.reason)
    heard = _written(folder / "metrics.jsonl")
    total = int((config.get("train") or {}).get("updates", 0))
    update = max((int(row.get(metrics.UPDATE, 0)) for row in rows), default=0)
    # the plot is drawn at the end
    done = update >= total and (folder / "metrics.png").is_file()
    return Status("finished" if done else "running", heard=heard, update=update, total=total)


def _about(state: str, status: Status, now: float, kind: str) -> str:
    """What is going on, in a sentence."""
    silent = max(0.0, now - status.heard)
    if state == "waiting":
        return "has not begun"
    if state == "finished":
        took = f", after {duration(status.heard - status.began)}" if status.began else ""
        return f"ended {_clock(status.heard)}{took}" if status.heard else ""
    if state in OVER:
        at = f" at {status.text}" if status.text else ""
        return f"{_clock(status.heard)}{at}: {status.reason.rstrip('.')}. {_again(kind)}"
    if state == "dead":
        when = f"last heard {duration(silent)} ago" if status.heard else "never heard"
        return f"{when}, so the process was probably killed. {_again(kind)}"
    if kind == "recipe" or not status.total:  # a stage that keeps no count
        return f"at {status.text}" if kind == "recipe" else ""
    if status.seconds is None:
        return "started; the speed is known after the first update"
    left = (status.left or 0.0) - silent
    return f"about {duration(max(0.0, left))} left, to {_clock(now + max(0.0, left))}"


def _again(kind: str) -> str:
    alone = kind in ("grpo", "nft", "awm", "opd", "sft")  # a recipe resumes by itself
    return f"To continue, give the same command again{' with --resume' if alone else ''}."


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _facts(
    curves: Mapping[str, Sequence[tuple[int, float]]], status: Status
) -> list[tuple[str, str]]:
    """The figures above the curves: (name, value)."""
    facts = []
    if status.seconds:
        facts.append(("an update takes", duration(status.seconds, exact=True)))
    if shown := [point for point in curves.get(metrics.HEADLINE, []) if math.isfinite(point[1])]:
        best = max(shown, key=lambda point: point[1])  # the first of equals, as the run keeps it
        points = {"first": shown[0], "best": best, "newest": shown[-1]} if shown[1:] else {"": best}
        for which, (update, score) in points.items():
            facts.append((f"{which} held-out score".strip(), f"{score:.3f} at update {update}"))
    for name, label, style in (
        (metrics.REWARD, "reward", "{:.3f}"),
        (metrics.DISTILL, "distance to the teachers", "{:.3g}"),
        (metrics.KL, "KL to the base", "{:.2e}"),
        (metrics.VELOCITY_DRIFT, "velocity drift from the base", "{:.2e}"),
        (metrics.INVALID_SHARE, "images without a score", "{:.1%}"),
        (metrics.IMAGES_PER_SECOND, "images per second", "{:.2g}"),
    ):
        if name in curves:
            facts.append((label, style.format(curves[name][-1][1])))
    return facts


# Images ------------------------------------------------------------------------------------------


def _held_out(folder: Path) -> tuple[list[Prompt], list[str]]:
    """The prompts of the evaluations with their image of the first and of the newest one."""
    newest = samples.newest(folder, samples.EVALUATION)
    if newest is None:
        return [], []
    update, rows = newest
    first = samples.oldest(folder, samples.EVALUATION)
    same = first and [row["prompt"] for row in first[1]] == [row["prompt"] for row in rows]
    if first is None or first[0] == update or not same:
        return _prompts(rows), [f"update {update}"]
    pairs = [row for both in zip(first[1], rows, strict=True) for row in both]
    return _prompts(pairs), [f"update {first[0]}", f"update {update}"]


def _drifts(folder: Path, warn: float) -> list[Panel]:
    """The newest checks of a run: of an evaluation, of a rollout."""
    places = {"held-out prompts": samples.HELD_OUT_DRIFT, "training prompts": samples.DRIFT}
    panels = []
    for where, kind in places.items():
        if newest := samples.newest(folder, kind):
            update, found = newest
            with suppress(ValueError):
                panels.append(read_panel(f"Update {update}, {where}", found, warn))
    return panels


def _prompts(rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    """Images that follow one another, put together by prompt."""
    scores: dict[str, list[float]] = {}  # of a task: tasks have different ranges
    for row in rows:
        if (score := _number(row["note"])) is not None:
            scores.setdefault(row["task"], []).append(score)

    def image(row: Mapping[str, Any]) -> Image:
        score, level = _number(row["note"]), None
        if score is not None:
            low, high = min(scores[row["task"]]), max(scores[row["task"]])
            level = 100 * (score - low) / (high - low) if high > low else 100.0
        return Image(f"data:image/webp;base64,{row['image']}", row["note"], level)

    together = itertools.groupby(rows, key=lambda row: (row["task"], row["prompt"]))
    return [Prompt(text, task, list(map(image, group))) for (task, text), group in together]


def _number(text: str) -> float | None:
    """The score that a note holds; None for other texts."""
    with suppress(ValueError):
        return float(text)
    return None


def _embedded(path: Path) -> str:
    """A PNG file as a data URI; "" if there is none."""
    with suppress(OSError):
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return ""


def _written(path: Path) -> float:
    """When a file was last written; 0 if there is none."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
