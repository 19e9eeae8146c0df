"""What a run has written of itself, its log and its samples, put back to where the run goes on."""

from __future__ import annotations

import json
import re
import shutil
from itertools import zip_longest
from pathlib import Path

from flowalign import files, metrics
from flowalign.status import WARNINGS

LOG = "metrics.jsonl"  # of a run; each checkpoint has a copy
SAMPLES = "samples"
DRAWN = re.compile(r"[a-z_]+_(\d{6,})\.\w+")  # update_000020.png, held_out_000020.json
LEFT = (".adapter.*", f".{LOG}.*", ".config.yaml.*", ".status.json.*", f"{SAMPLES}/.*")


def go_back(run: Path, checkpoint: Path, update: int, evaluated: int) -> str:
    """Make log, samples and warnings those of a run that has just written this checkpoint. update,
    evaluated: rollouts done, and done at the last evaluation that counted; a later one is taken
    again. Returns what was wrong with the log up to there, "" if nothing was."""
    _sweep(run)
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
    with files.replacing(log) as part:
        part.write_bytes(b"".join(line for line in lines if not _repeated(line, evaluated)))
    if now.startswith(right):
        return ""
    pairs = zip_longest(lines, now.splitlines(keepends=True)[: len(lines)])
    return f"{sum(a != b for a, b in pairs)} of {len(lines)} lines are damaged or missing"


def _repeated(line: bytes, evaluated: int) -> bool:
    """Whether a line is of an evaluation that comes again."""
    row = json.loads(line)
    return row[metrics.UPDATE] > evaluated and any(name.startswith(metrics.EVAL) for name in row)


def clear(run: Path) -> None:
    """Remove what a run left that ended before its first checkpoint, so that it starts anew."""
    _sweep(run)
    for name in (LOG, WARNINGS):
        (run / name).unlink(missing_ok=True)
    for name in (SAMPLES, "adapter"):
        shutil.rmtree(run / name, ignore_errors=True)


def _sweep(run: Path) -> None:
    """Remove what a kill left half written."""
    for pattern in LEFT:
        for path in run.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
