"""Compares the folders of two runs, file by file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowalign.system.files import read_lines

TIMES = {
    "seconds/rollout", "seconds/score", "seconds/update", "seconds/image_drift",
    "images_per_second",
}  # fmt: skip
EXCEPTIONS = {
    "metrics.jsonl": f"without {', '.join(sorted(TIMES))}: how fast the machine was",
    "manifest.json, done.json": "without its own digest, and those of such metrics.jsonl and "
    "manifests in its folder",
    "README.md": "without the command that it cites: the run was continued with --resume",
    "report.html": "without dates, speed and warnings: for the same reasons as these",
    "warnings.jsonl": "each warning of the uninterrupted run is there; updates that were repeated "
    "warn again, and a resumed run says so",
    "rows.*.jsonl": "the rows of all processes together, in any order: a continued evaluation "
    "shares the rest of the images anew",
}
"""{file: what of it need not be equal, and why}. All other files are equal to the byte."""


def differences(expected: Path, found: Path) -> list[str]:
    """A line for each file that differs, or is in one folder only."""
    names = {p.relative_to(f).as_posix() for f in (expected, found) for p in f.rglob("*")}
    lines = []
    for name in sorted(names):
        a, b = expected / name, found / name
        if a.is_dir() and b.is_dir():
            continue
        if re.fullmatch(r"rows\.\d+\.jsonl", a.name):  # compared together, by their folder
            a, b = a.parent, b.parent
        if a.exists() != b.exists():
            lines.append(f"{name}: {'missing' if a.exists() else 'too much'}")
        elif reason := _difference(a, b):
            lines.append(f"{name}: {reason}")
    return lines


def _difference(a: Path, b: Path) -> str:
    """Of two files; "" if there is none."""
    if a.is_dir():
        return "" if _rows(a) == _rows(b) else "other rows"
    if a.name == "metrics.jsonl":
        return next(_log_differences(read_lines(a), read_lines(b)), "")
    if a.name == "warnings.jsonl":
        texts = {row["text"] for row in read_lines(b)}
        return next((f"lacks {r['text']!r}" for r in read_lines(a) if r["text"] not in texts), "")
    if (one := _plain(a)) == (other := _plain(b)):
        return ""
    return f"differs ({len(one)} and {len(other)} bytes without the exceptions)"


def _plain(path: Path) -> bytes:
    """The bytes of a file without its exceptions."""
    content = path.read_bytes()
    if path.name in ("manifest.json", "done.json"):
        row = json.loads(content)
        for name in row["files"]:
            if name.endswith(INSIDE):
                row["files"][name] = "compared on its own"
        return json.dumps({k: v for k, v in row.items() if k != "sha256"}).encode()
    if path.name == "README.md":
        return re.sub(rb"\n +(?:flowalign|accelerate launch) [^\n]*", b"", content)
    if path.name == "report.html":
        return re.sub(rb"|".join(CLOCKS), b"", content, flags=re.DOTALL)
    return content


INSIDE = ("metrics.jsonl", "manifest.json")
CLOCKS = (
    rb"\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?",
    rb"<div><dt>images per second</dt>.*?</div>",
    rb"<h2>Warnings</h2>.*?</table></div>\n?",
)


def _rows(folder: Path) -> list[str]:
    return sorted(line for path in folder.glob("rows.*.jsonl") for line in path.open())


def _log_differences(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> Iterator[str]:
    """Of two logs."""
    updates = [[row.get("update") for row in rows] for rows in (a, b)]
    if updates[0] != updates[1]:
        yield f"rows of the updates {updates[1]}, not {updates[0]}"
    for one, other in zip(a, b, strict=False):
        for key in sorted((one.keys() | other.keys()) - TIMES):
            if repr(one.get(key)) != repr(other.get(key)):  # NaN equals itself
                yield f"update {one.get('update')}: {key} is {other.get(key)}, not {one.get(key)}"
