"""report.html: the page of a run or a recipe, and what it shares with the page of an evaluation.

A page is one file that needs no network: a template in `templates/` that extends `page.html.j2`
(head, style, title). Drift is shown by the macro of `drift.html.j2`. A run writes its page at each
evaluation and at its end, a recipe after each stage. It is made from the files of the run, so
`flowalign watch` can write it at any time.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2

from flowalign.config import AlarmConfig, TrainingStage, to_yaml
from flowalign.config.loading import run_config
from flowalign.report import pictures, samples, summary
from flowalign.report.drift.compare import Check
from flowalign.report.progress import figures
from flowalign.system.exit import refusing
from flowalign.system.files import read_lines, replacing
from flowalign.system.folder import RunFolder
from flowalign.system.table import Table
from flowalign.training import metrics
from flowalign.training.evaluations import Evaluation
from flowalign.training.events import Listener

NEWEST = 20  # warnings that are shown


class Panel(NamedTuple):
    """A drift check on a page. title: whose images. warn: sigmas beyond which a statistic is
    highlighted. reference: what the images are compared with."""

    title: str
    warn: float
    check: Check
    reference: str = "base"


def render(template: str, **content: object) -> str:
    """The page of `templates/<template>`. content: its variables, including `title`.

    Texts are escaped, because prompts and reasons come from files and models. A missing variable
    raises jinja2.UndefinedError.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flowalign.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)


# The page of a run -------------------------------------------------------------------------------


class Page(Listener):
    """Writes the page of a run at each evaluation that counts, and where a listener stops it."""

    def __init__(self, config: TrainingStage) -> None:
        self.config = config

    def evaluated(self, update: int, evaluation: Evaluation) -> None:
        if evaluation.counts:
            self._write()

    def stopped(self, update: int) -> None:
        self._write()

    def _write(self) -> None:
        if self.main:
            write(Path(self.config.output), self.config)


def write(run: Path, config: TrainingStage | None = None) -> Path:
    """Write the page of a run or a recipe, and metrics.png, which it shows; returns the page. The
    run's files may be incomplete. config: None = the one that the run wrote. Raises NoRun for a
    folder without a run."""
    keys = config.model_dump(mode="json") if config else run_config(run)
    folder = RunFolder(run)
    curves = pictures.read_metrics(folder.log)
    charts = pictures.charts(curves)
    name = run.absolute().name
    stages = keys.get("stages") or {}
    pictures.metrics_plot(charts, folder.curves, name)
    text = render(
        "run.html.j2",
        title=f"{name} ({keys['stage']})",
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        folder=run,
        stages=[_stage(folder.stage(name), stage) for name, stage in stages.items()],
        warnings=read_lines(folder.warnings)[::-1][:NEWEST],
        clock=lambda seconds: time.strftime("%m-%d %H:%M", time.localtime(seconds)),
        facts=_facts(run, keys, curves),
        meanings={chart.title: chart.about for chart in charts},
        pictures=_pictures(run),
        drifts=_drifts(run, keys.get("alarm") or {}),
        watched=samples.read_json(run, samples.WATCHED),
        config=to_yaml(config) if config else folder.config.read_text("utf-8"),
    )
    with replacing(folder.page) as part:
        part.write_text(text, encoding="utf-8")
    return folder.page


def _stage(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a recipe's stage. tables: those of an evaluation."""
    document: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        document = json.loads(folder.results.read_text(encoding="utf-8"))
    return {
        "name": folder.path.name,
        "kind": config.get("stage"),
        "begun": folder.path.is_dir(),
        "facts": _facts(folder.path, config, pictures.read_metrics(folder.log)),
        "page": f"{quote(folder.path.name)}/{folder.page.name}" if folder.page.is_file() else "",
        "remarks": document.get("remarks", []),
        "tables": [
            {**table, "html": Table(table["rows"][0], table["rows"][1:]).html()}
            for table in document.get("tables", [])
        ],
    }


def _facts(
    run: Path, config: Mapping[str, Any], curves: Mapping[str, pictures.Curve]
) -> list[tuple[str, str]]:
    facts = []
    chosen = summary.kept_adapter(run)
    rows = summary.evaluation_rows(run)
    if last := max((points[-1][0] for points in curves.values()), default=0):
        total = (config.get("train") or {}).get("updates", "?")
        facts.append(("updates", f"{last} of {total}"))
    evaluated = {"newest evaluation": rows[-1]} if rows else {}
    if chosen:
        evaluated = {"kept adapter": chosen.row, **evaluated}
    for which, row in evaluated.items():
        facts.append((which, f"{metrics.headline_metrics(row)} at update {row[metrics.UPDATE]}"))
    return facts + figures({name: points[-1][1] for name, points in curves.items()})


def _pictures(run: Path) -> list[tuple[str, str]]:
    paths = {"Curves": RunFolder(run).curves}
    held_out = samples.updates(run, samples.EVALUATION)
    for n in [*held_out[:1], *held_out[-1:]]:  # before and after
        paths[f"Held-out prompts at update {n}"] = samples.sample_path(run, samples.EVALUATION, n)
    for n in samples.updates(run, samples.TRAINING)[-1:]:
        paths[f"Training samples at update {n}"] = samples.sample_path(run, samples.TRAINING, n)
    return [
        (title, f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}")
        for title, path in paths.items()
        if path.is_file()
    ]


def _drifts(run: Path, alarm: Mapping[str, Any]) -> list[Panel]:
    """The panel of a run's newest drift check; [] if there is none. alarm: the config's section."""
    if (newest := samples.read_json(run, samples.DRIFT)) is None:
        return []
    update, check = newest
    warn = alarm.get("warn", AlarmConfig().warn)
    reference = alarm.get("reference", "base")
    return [Panel(f"Update {update}", warn, Check.from_json(check), reference)]


@refusing("watch")
def main(args: argparse.Namespace) -> int:
    """`flowalign watch`; exit status 0 = written, 2 = refused."""
    print(f"{write(args.run)}: open it in a browser")
    return 0
