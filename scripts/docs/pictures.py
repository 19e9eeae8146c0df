"""The pictures of docs, from what `make demo` leaves: no number is copied by hand.

    make demo
    python scripts/docs/pictures.py

writes flow_opd.png and report.png (needs chromium) to docs/. (two_loras.png is samples.png of the
commands of README.)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.eval.scores import from_row
from flowalign.eval.stats import headline_rows, part_of
from flowalign.report.pictures import (
    COLUMNS,
    Block,
    Row,
    comparison,
    score_text,
)
from flowalign.system.images import pixels_of
from flowalign.training.data import spread, spread_text

DOCS = Path(__file__).parents[2] / "docs"
TASKS = {"geneval": "GenEval", "ocr": "OCR", "preference": "preference"}


class Named:
    """What `headline_rows` asks of a benchmark."""

    def __init__(self, name: str, headline: str | None) -> None:
        self.name = name
        self.headline = headline


def block(table: Path, results: Mapping[str, Any], task: str, columns: int) -> Block:
    """Base, the task's teacher, merge and student on prompts of one task, evenly spaced."""
    files = sorted((table / "images" / "base" / task).glob("*_0.png"))
    kept = [int(path.name.split("_")[0]) for path in files]
    places = [kept[i] for i in spread(len(kept), columns)]
    benchmark = Named(task, results["benchmarks"][task]["headline"])
    models = {
        "base": "base model",
        f"teacher_{task}": f"{TASKS[task]} teacher",
        "merge": "merge of the three",
        "flow_opd": "student",
    }
    rows, prompts = [], []
    for model, name in models.items():
        scored = [from_row(row) for row in results["models"][model]["images"][task]]
        values = [scored[i].number(part_of(benchmark)) for i in places]
        number = headline_rows(benchmark, scored)[0].mean
        folder = table / "images" / model / task
        images = [pixels_of((folder / f"{i:05}_0.png").read_bytes()) for i in places]
        rows.append(Row(images, [*map(score_text, values)], name, f"all {score_text(number)}"))
        prompts = [scored[i].image.prompt for i in places]
    title = f"{TASKS[task]}: {spread_text(places, len(results['models']['base']['images'][task]))}"
    return Block(title, prompts, rows)


def screenshot(page: Path, path: Path, width: int, height: int) -> None:
    """The upper part of a page as Chromium shows it."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--user-data-dir={folder}", f"--window-size={width},{height}",
                   f"--screenshot={path.resolve()}"]  # fmt: skip
        subprocess.run(["chromium", *options, page.resolve().as_uri()], check=True, timeout=120,
                       capture_output=True)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 if the demo did not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--demo", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder to write to")
    args = parser.parse_args(argv)
    table = args.demo / "table"
    if not (table / "results.json").is_file():
        print(f"pictures: no {table / 'results.json'}. Run `make demo` first.", file=sys.stderr)
        return 2
    results = json.loads((table / "results.json").read_text())
    blocks = [block(table, results, task, COLUMNS) for task in TASKS]
    comparison(args.docs / "flow_opd.png", blocks)
    screenshot(table / "report.html", args.docs / "report.png", 1100, 2560)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
