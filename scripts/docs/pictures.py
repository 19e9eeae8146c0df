"""The pictures of README and docs, from what `make demo` leaves: no number is copied by hand.

    make demo
    python scripts/docs/pictures.py

writes before_after.png, flow_opd.png and report.png (needs chromium) to docs/. flow_opd_metrics.png
is the metrics.png of a longer run of the first tiny world; of another run:

    python scripts/docs/pictures.py --student outputs/tiny/student_flow_opd

beyond.png is drawn from benchmarks/beyond.yaml by

    python scripts/docs/pictures.py --beyond outputs/tiny/beyond_{0,1,2}/table/results.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flowalign.eval.stats import headline_rows
from flowalign.system.images import pixels_of
from flowalign.training.data import spread, spread_text
from flowalign.training.report.pictures import (
    COLUMNS,
    Block,
    Row,
    charts,
    comparison,
    metrics_plot,
    read_metrics,
    score_text,
)

DOCS = Path(__file__).parents[2] / "docs"
GREYS = {"diversity (GenEval)": "0.5", "fidelity (lower is better)": "black"}
TASKS = {"geneval": "GenEval", "ocr": "OCR", "preference": "preference"}


class Named:
    """What `headline_rows` asks of a benchmark."""

    def __init__(self, name: str, headline: str | None) -> None:
        self.name, self.headline = name, headline


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
        scored = results["models"][model]["images"][task]
        part = benchmark.headline or "value"
        values = [math.nan if scored[i][part] is None else scored[i][part] for i in places]
        number = headline_rows(benchmark, scored)[0].mean
        folder = table / "images" / model / task
        images = [pixels_of((folder / f"{i:05}_0.png").read_bytes()) for i in places]
        rows.append(Row(images, [*map(score_text, values)], name, f"all {score_text(number)}"))
        prompts = [scored[i]["prompt"] for i in places]
    title = f"{TASKS[task]}: {spread_text(places, len(results['models']['base']['images'][task]))}"
    return Block(title, prompts, rows)


def side_by_side(blocks: Sequence[Block]) -> Block:
    """The blocks of several tasks as one, their columns beside each other, without numbers."""
    names = ("base model", "its task's teacher", "merge of the three", "student")
    rows = [
        Row(
            [image for row in rows for image in row.images],
            [""] * sum(len(row.images) for row in rows),
            name,
        )
        for name, rows in zip(
            names, zip(*(block.rows for block in blocks), strict=True), strict=True
        )
    ]
    return Block("", [head for block in blocks for head in block.heads], rows)


def curves(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Scores, fidelity and diversity of the students of benchmarks/beyond.yaml against the scale of
    their labels: the mean over runs of several seeds, and its standard error."""
    sweeps = {
        "CFG scale of the labels": {1: "guidance_1", 1.5: "guidance_1_5", 2: "guidance_2",
                                    3: "guidance_3", 4: "guidance_4"},
        "extrapolation λ": {1: "guidance_1", 1.5: "lambda_1_5", 2: "lambda_2"},
    }  # fmt: skip

    def numbers(run: Mapping[str, Any], model: str) -> dict[str, float]:
        """{what is drawn: its number in one run}."""
        found: dict[str, float] = {}
        for task, name in TASKS.items():
            benchmark = Named(task, run["benchmarks"][task]["headline"])
            found[name] = headline_rows(benchmark, run["models"][model]["images"][task])[0].mean
        images = run["models"][model]["images"]["geneval_diversity"]
        found["diversity (GenEval)"] = statistics.fmean(row["value"] for row in images)
        found["fidelity (lower is better)"] = run["models"][model]["fidelity"]["mean"]
        return found

    figure = Figure(figsize=(8, 5), layout="constrained")
    grid = figure.subplots(2, 2, sharex="col", sharey="row", height_ratios=(2, 1))
    for column, (label, models) in enumerate(sweeps.items()):
        points = [[numbers(run, model) for run in runs] for model in models.values()]
        for name in points[0][0]:
            seeds = [[row[name] for row in point] for point in points]
            errors = [statistics.stdev(s) / len(s) ** 0.5 if len(s) > 1 else 0 for s in seeds]
            style = {} if name in TASKS.values() else {"linestyle": "--", "color": GREYS[name]}
            grid[int(name in GREYS), column].errorbar(
                [*models], [statistics.fmean(s) for s in seeds], errors,
                marker="o", capsize=3, label=name, **style,
            )  # fmt: skip
        grid[0, column].set(ylim=(0.6, 1))
        grid[1, column].set(xlabel=label, ylim=(0, 0.1))
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=150)


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
    parser.add_argument("--student", type=Path, help="a run with metrics.jsonl")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder to write to")
    parser.add_argument("--beyond", type=Path, nargs="+", help="benchmarks/beyond.yaml: results")
    args = parser.parse_args(argv)
    if args.beyond:
        runs = [json.loads(file.read_text()) for file in args.beyond]
        curves(runs, args.docs / "beyond.png")
        return 0
    if args.student:
        logged = read_metrics(args.student / "metrics.jsonl")
        metrics_plot(charts(logged), args.docs / "flow_opd_metrics.png")
        return 0
    table = args.demo / "table"
    if not (table / "results.json").is_file():
        print(f"pictures: no {table / 'results.json'}. Run `make demo` first.", file=sys.stderr)
        return 2
    results = json.loads((table / "results.json").read_text())
    blocks = [block(table, results, task, COLUMNS) for task in TASKS]
    comparison(args.docs / "flow_opd.png", blocks)
    few = side_by_side([block(table, results, task, 1) for task in TASKS])
    comparison(args.docs / "before_after.png", [few])
    screenshot(table / "report.html", args.docs / "report.png", 1100, 2560)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
