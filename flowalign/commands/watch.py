"""`flowalign watch RUN`: one page that shows a run while it goes on, and its report at the end.

It reads the files that the run writes, so it works on any machine that sees the disk: no server and
no network. The page is one HTML file that refreshes itself while the run goes on.
"""

from __future__ import annotations

import argparse
import base64
import html
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flowalign.commands.recipe import DONE
from flowalign.config import AlarmConfig, ConfigError, read
from flowalign.system.exit import refusing
from flowalign.system.files import read_lines, replacing
from flowalign.training import metrics
from flowalign.training.report import page, results, samples
from flowalign.training.report.drift.compare import Check
from flowalign.training.report.page import Panel
from flowalign.training.report.pictures import Chart, Curve, charts, read_metrics
from flowalign.training.report.progress import duration
from flowalign.training.report.status import WARNINGS, Status, read_status
from flowalign.training.run.resume import LOG

PAGE = "watch.html"
OVER = ("finished", "stopped", "interrupted")
NEWEST = 20  # warnings that are shown
FACTS = (  # of the newest update that has them: metric, label, format
    (metrics.REWARD, "reward", "{:.3f}"),
    (metrics.DISTILL, "distance to the teachers", "{:.3g}"),
    (metrics.KL, "KL to the base", "{:.2e}"),
    (metrics.VELOCITY_DRIFT, "velocity drift from the base", "{:.2e}"),
    (metrics.INVALID_SHARE, "images without a score", "{:.1%}"),
    (metrics.IMAGES_PER_SECOND, "images per second", "{:.2g}"),
)


@refusing("watch")
def main(argv: Sequence[str]) -> int:
    """Exit status: 0 the run is over, or the page was written once; 2 no run."""
    parser = argparse.ArgumentParser(
        "flowalign watch",
        description="Write one page that shows a run while it goes on, and end with it.",
    )
    parser.add_argument("run", type=Path, help="the output folder of a run or a recipe")
    parser.add_argument("--out", type=Path, help=f"the page; default: RUN/{PAGE}")
    parser.add_argument("--once", action="store_true", help="write the page once, and end")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two pages")
    args = parser.parse_args(argv)
    out = args.out or args.run / PAGE
    view = write(args.run, out, every=args.every)
    print(f"{out}: open it in a browser", flush=True)
    while not args.once and view.state not in OVER:
        time.sleep(args.every)
        view = write(args.run, out, every=args.every)
    print(f"{view.name}: {view.about}")
    return 0


def write(run: Path, out: Path | None = None, *, every: float = 15.0) -> View:
    """Write the page of a run; returns what it shows. Raises NoRun for a folder without one.

    out: the file, by default RUN/watch.html. every: seconds after which an open page of a run that
    goes on refreshes itself.
    """
    view, out = read_view(run), out or run / PAGE
    text = page.render(
        "watch.html.j2",
        title=f"{view.name} ({view.kind})",
        view=view,
        as_table=page.table,
        refresh=0 if view.state in OVER else max(1, round(every)),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        clock=lambda seconds: time.strftime("%m-%d %H:%M", time.localtime(seconds)),
    )
    with replacing(out) as part:
        part.write_text(text, encoding="utf-8")
    return view


# What the files of a run say: none needs to be complete ------------------------------------------


class NoRun(ValueError):
    """A folder that holds no run: what was seen, what to do."""


Prompts = list[tuple[str, str, list[Mapping[str, Any]]]]
"""(task, prompt, its images: rows of `samples`)."""


@dataclass(frozen=True)
class View:
    """A run or a stage. Texts are plain; the template escapes them."""

    name: str
    kind: str  # the config's `stage`
    folder: Path
    state: str  # waiting, running, dead, or one of OVER
    status: Status
    about: str  # what is going on, in a sentence
    facts: list[tuple[str, str]]  # the figures above the curves: (name, value)
    curves: list[Chart]
    rollout: tuple[int, Prompts]  # the newest training samples: their update, their images
    held_out: tuple[list[str], Prompts]  # which evaluations, and their images
    drifts: list[Panel]  # from the base: evaluation, rollout
    picture: str  # source of the base and the result side by side
    warnings: list[dict[str, Any]]  # the newest first
    table: list[str | list[list[str]]]  # of an evaluation: its paragraphs and tables
    report: str  # address of its page
    config: str
    stages: Sequence[View] = ()

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


def read_view(folder: Path) -> View:
    """The run in a folder. Raises NoRun if there is none."""
    try:
        config = read(folder / "config.yaml")
        config["stage"]
    except (ConfigError, TypeError, KeyError, OSError) as error:
        raise NoRun(_no_run(folder)) from error
    view = _view(folder, folder.absolute().name, config, Status(), "")
    stages: Mapping[str, Any] = config.get("stages") or {}
    views = [
        _view(folder / name, name, keys, view.status, f"{quote(name)}/")
        for name, keys in stages.items()
    ]
    return replace(view, stages=views)


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder. Name the `output` folder of a run."
    inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
    hint = f" There are {', '.join(map(str, inside[:8]))}." if inside else ""
    return (
        f"{folder} is no run: it has no config.yaml with a `stage`. Name the `output` folder of a "
        f"run of `flowalign train`.{hint}"
    )


def read_tables(markdown: str) -> list[str | list[list[str]]]:
    """The lines and the tables of a `table.md`, as plain text."""

    def plain(text: str) -> str:
        bare = text.strip().removeprefix("**").removesuffix("**")  # stars mark the best
        return html.unescape(re.sub(r"\\(.)", r"\1", bare))

    found: list[str | list[list[str]]] = []
    for is_table, lines in itertools.groupby(markdown.splitlines(), lambda x: x.startswith("|")):
        if is_table:
            cells = (re.split(r"(?<!\\)\|", line)[1:-1] for line in lines)
            heads, *rows = [list(map(plain, row)) for row in cells]
            found.append([heads, *rows[1:]])
        else:
            found += [plain(line) for line in lines if line]
    return found


def _view(folder: Path, name: str, config: Mapping[str, Any], recipe: Status, address: str) -> View:
    """A run, or a stage of a recipe with this status. address: of its folder, from the page."""
    now, kind = time.time(), str(config.get("stage"))
    status = read_status(folder)
    if status is None:  # a stage that has not begun, or a merge or an evaluation, which have none
        state = recipe.state if recipe.text == name else "waiting"
        status = Status(state, heard=recipe.heard, reason=recipe.reason)
    if (folder / DONE).exists():
        done = (folder / DONE).stat().st_mtime
        status = replace(status, state="finished", heard=done, began=min(status.began, done))
    state = "dead" if status.silent(now) else status.state
    curves, alarm = read_metrics(folder / LOG), config.get("alarm") or {}
    update, rollout = samples.read_sample(folder, samples.TRAINING) or (0, [])
    return View(
        name=name,
        kind=kind,
        folder=folder,
        state=state,
        status=status,
        about=_about(state, status, now, kind),
        facts=_facts(curves, status, folder),
        curves=charts(curves),
        rollout=(update, _prompts(rollout)),
        held_out=_held_out(folder),
        drifts=_drifts(folder, alarm),
        picture=_embedded(folder / "before_after.png") if state == "finished" else "",
        warnings=read_lines(folder / WARNINGS)[::-1][:NEWEST],
        table=read_tables(_text(folder / "table.md").partition("\nEvery metric:")[0]),
        report=f"{address}report.html" if (folder / "report.html").is_file() else "",
        config=_text(folder / "config.yaml"),
    )


def _about(state: str, status: Status, now: float, kind: str) -> str:
    """What is going on, in a sentence."""
    silent = max(0.0, now - status.heard)
    resume = "" if kind in ("recipe", "merge", "eval") else " with --resume"
    again = f"To continue, give the same command again{resume}."
    if state == "waiting":
        return "has not begun"
    if state == "finished":
        took = f", after {duration(status.heard - status.began)}" if status.began else ""
        return f"ended {_clock(status.heard)}{took}" if status.heard else ""
    if state in OVER:
        at = f" at {status.text}" if status.text else ""
        return f"{_clock(status.heard)}{at}: {status.reason.rstrip('.')}. {again}"
    if state == "dead":
        when = f"last heard {duration(silent)} ago" if status.heard else "never heard"
        return f"{when}, so the process was probably killed. {again}"
    if kind == "recipe" or not status.total:  # a stage that keeps no count
        return f"at {status.text}" if kind == "recipe" else ""
    if status.left is None:
        return "started; the speed is known after the first update"
    left = max(0.0, status.left - silent)
    return f"about {duration(left)} left, to {_clock(now + left)}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _facts(curves: Mapping[str, Curve], status: Status, folder: Path) -> list[tuple[str, str]]:
    facts, chosen, rows = [], results.kept(folder), results.evaluations(folder)
    if status.seconds:
        facts.append(("an update takes", duration(status.seconds, exact=True)))
    found = {"kept adapter": [chosen.row] if chosen else [], "newest evaluation": rows[-1:]}
    for which, row in ((which, row) for which, some in found.items() for row in some):
        facts.append((which, f"{metrics.headline(row)} at update {row[metrics.UPDATE]}"))
    return facts + [
        (label, style.format(curves[name][-1][1])) for name, label, style in FACTS if name in curves
    ]


# Images ------------------------------------------------------------------------------------------


def _held_out(folder: Path) -> tuple[list[str], Prompts]:
    """The first and the newest evaluation, and the image of both for every prompt."""
    first = samples.read_sample(folder, samples.EVALUATION, oldest=True)
    newest = samples.read_sample(folder, samples.EVALUATION)
    if first is None or newest is None:
        return [], []
    update, rows = newest
    same = [row["prompt"] for row in first[1]] == [row["prompt"] for row in rows]
    if first[0] == update or not same:
        return [f"update {update}"], _prompts(rows)
    pairs = [row for both in zip(first[1], rows, strict=True) for row in both]
    return [f"update {first[0]}", f"update {update}"], _prompts(pairs)


def _drifts(folder: Path, alarm: Mapping[str, Any]) -> list[Panel]:
    """The newest checks of a run: of an evaluation, of a rollout. alarm: as in its config."""
    warn, reference = alarm.get("warn", AlarmConfig().warn), alarm.get("reference", "base")
    kinds = {"held-out prompts": samples.HELD_OUT_DRIFT, "training prompts": samples.DRIFT}
    panels = []
    for where, kind in kinds.items():
        if newest := samples.read_sample(folder, kind):
            update, check = newest
            check = Check.from_json(check)
            panels.append(Panel(f"Update {update}, {where}", warn, check, reference))
    return panels


def _prompts(rows: Sequence[Mapping[str, Any]]) -> Prompts:
    """Images that follow one another, put together by prompt."""
    together = itertools.groupby(rows, key=lambda row: (row["task"], row["prompt"]))
    return [(task, prompt, list(group)) for (task, prompt), group in together]


def _embedded(path: Path) -> str:
    """A PNG file as a data URI; "" if there is none."""
    with suppress(OSError):
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return ""


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
