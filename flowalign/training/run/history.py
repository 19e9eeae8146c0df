"""What a run has written of itself, its log and its samples, put back to where the run goes on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from flowalign.system import files
from flowalign.training import metrics
from flowalign.training.report.status import WARNINGS

LOG = "metrics.jsonl"  # of a run; each checkpoint has a copy
SAMPLES = "samples"
DRAWN = re.compile(r"[a-z_]+_(\d{6,})\.\w+")  # update_000020.png, held_out_000020.json


def go_back(run: Path, checkpoint: Path, update: int, evaluated: int) -> str:
    """Make log, samples and warnings those of a run that has just written this checkpoint. update,
    evaluated: rollouts done, and done at the last evaluation that counted; a later one is taken
    again. Returns what was wrong with the log up to there, "" if nothing was."""
    for path in (run / SAMPLES).glob("*"):
        if (match := DRAWN.fullmatch(path.name)) and int(match[1]) > update:
            path.unlink()
    if (run / WARNINGS).exists():
        rows = [row for row in files.read_lines(run / WARNINGS) if row.get("update", 0) <= update]
        with files.replacing(run / WARNINGS) as part:
            part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return _cut(run / LOG, checkpoint / LOG, evaluated)


def _cut(log: Path, copy: Path, evaluated: int) -> str:
    """The log's first bytes must be those of the copy; what comes after them is cut."""
    right = copy.read_bytes() if copy.exists() else b""
    now = log.read_bytes() if log.exists() else b""
    lines = right.splitlines(keepends=True)
    rows = [_row(line) for line in lines]
    with files.replacing(log) as part:
        pairs = zip(lines, rows, strict=True)
        kept = (line for line, row in pairs if row and not _repeated(row, evaluated))
        part.write_bytes(b"".join(kept))
    if now.startswith(right) and all(rows):
        return ""
    there = now.splitlines(keepends=True)[: len(lines)]
    wrong = sum(line != seen for line, seen in zip_longest(lines, there)) or rows.count(None)
    return f"{wrong} of {len(lines)} lines are damaged or missing"


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of the log; None for one that is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(row, dict) and isinstance(row.get(metrics.UPDATE), int)
    return row if sound else None


def _repeated(row: Mapping[str, Any], evaluated: int) -> bool:
    """Whether a line is of an evaluation that comes again."""
    return row[metrics.UPDATE] > evaluated and any(name.startswith(metrics.EVAL) for name in row)


def clear(run: Path) -> None:
    """Remove what a run left that ended before its first checkpoint, so that it starts anew. The
    log goes last: it tells whose the rest is, should this be killed."""
    for name in (SAMPLES, "adapter"):
        shutil.rmtree(run / name, ignore_errors=True)
    for name in (WARNINGS, LOG):
        (run / name).unlink(missing_ok=True)
