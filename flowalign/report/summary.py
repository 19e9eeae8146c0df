"""The summary that a command prints at its end: where its results are, and what to do next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.config import RecipeStage, Stage, TrainingStage, read
from flowalign.system.files import read_lines
from flowalign.system.folder import RunFolder
from flowalign.training import metrics


@dataclass(frozen=True)
class KeptAdapter:
    """The log rows of a run's evaluations: the one that chose its adapter, the last, the first."""

    row: Mapping[str, Any]
    last: Mapping[str, Any]
    first: Mapping[str, Any]

    def __str__(self) -> str:
        text = f"update {self.row[metrics.UPDATE]} of {self.last[metrics.UPDATE]}"
        text += f" ({metrics.headline_metrics(self.row)}"
        if self.row != self.last:
            text += f"; the last: {metrics.headline_number(self.last):.3f}"
        if self.first[metrics.HEADLINE] > self.row[metrics.HEADLINE]:
            text += f"; the start: {metrics.headline_number(self.first):.3f}"
        return f"{text})"


def evaluation_rows(folder: Path) -> list[dict[str, Any]]:
    """The log rows of a run that hold an evaluation, without their missing numbers."""
    lines = read_lines(RunFolder(folder).log)
    rows = [row for row in lines if row.get(metrics.HEADLINE) is not None]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def kept_adapter(folder: Path) -> KeptAdapter | None:
    """The evaluation that chose the adapter of the run in a folder, as the run recorded it beside
    the adapter; None if no evaluation chose it."""
    try:
        chosen = json.loads(RunFolder(folder).scores.read_text()).get("update")
    except (OSError, ValueError, AttributeError):
        return None
    rows = evaluation_rows(folder)
    matches = (KeptAdapter(row, rows[-1], rows[0]) for row in rows if row[metrics.UPDATE] == chosen)
    return next(matches, None)


def unlearnt(adapter: str | None) -> str:
    """A remark for an adapter whose run kept its initial weights, which names these weights; "" for
    any other adapter."""
    folder = Path(adapter or "").parent
    chosen = kept_adapter(folder) if adapter else None
    if chosen is None or chosen.row[metrics.UPDATE] or chosen.row == chosen.last:
        return ""
    start = (read(RunFolder(folder).config).get("lora") or {}).get("init") or "the base model"
    return f"kept: {chosen}. Nothing that was learnt is in it; it equals {start}"


def untrained(config: TrainingStage) -> str:
    """A warning if the run's adapter is `unlearnt`, with what to do; "" otherwise."""
    if not (remark := unlearnt(str(config.folder.adapter))):
        return ""
    assert config.evaluation
    return (
        f"{remark}. No later evaluation was better. Train longer, lower optimizer.lr, or score "
        f"more than evaluation.prompts = {config.evaluation.prompts} a task, if noise decides. To "
        "keep the last adapter instead, give the command again with --resume evaluation=null."
    )


def stage_summary(config: Stage) -> str:
    """The kept adapters and result files of a stage, as far as they exist, one line each, and what
    to do next."""
    folder = Path(config.output)
    adapters = {"kept": kept_adapter(folder)}
    paths = {"folder": folder} | _paths(folder)
    if isinstance(config, RecipeStage):
        for name in config.stages:
            adapters[f"{name}: kept"] = kept_adapter(folder / name)
            paths |= {f"{name}: {what}": path for what, path in _paths(folder / name).items()}
    lines = [f"\n{what}: {which}" for what, which in adapters.items() if which]
    labellers = config.labellers.values() if isinstance(config, TrainingStage) else ()
    teachers = dict.fromkeys(str(teacher.adapter) for teacher in labellers if teacher.adapter)
    if lines:
        lines.append("\n")
    return "".join([*lines, _text(paths, teachers)])


def merge_summary(adapter: str | Path) -> str:
    """The path and next steps for an adapter that `flowalign merge` wrote."""
    return _text({"adapter": Path(adapter)})


def _paths(path: Path) -> dict[str, Path]:
    """The existing result files of a run or a stage, by their label."""
    run = RunFolder(path)
    paths = {"report": run.page, "grid": run.grid, "table": run.table, "adapter": run.adapter}
    return {what: path for what, path in paths.items() if path.exists()}


def _text(paths: Mapping[str, Path], teachers: Iterable[str] = ()) -> str:
    """The paths, and next steps for the first report and the last adapter, which is sampled
    together with its teachers."""
    width = max(map(len, paths), default=0)
    lines = [f"  {what:{width}}  {path}" for what, path in paths.items()]
    pages = [path for what, path in paths.items() if what.endswith("report")]
    steps = [f"open {path} in a browser" for path in pages[:1]]
    for path in [path for what, path in paths.items() if what.endswith("adapter")][-1:]:
        adapter = shlex.quote(str(path))
        shown = " --lora ".join([adapter, *map(shlex.quote, teachers)])
        steps += [f"flowalign sample PROMPT --lora {shown}", f"hf upload YOU/NAME {adapter}"]
    return "\n".join(["", "Results:", *lines, "Next:", *(f"  {step}" for step in steps)])
