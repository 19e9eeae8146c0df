"""report.html: an evaluation as one page that needs nothing beside itself, and no network.

The page is `report.html.j2`; here is what it shows, computed from `table.Results`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.eval import published
from flowalign.eval.stats import FIELDS, tag_rows
from flowalign.eval.suite import Benchmark
from flowalign.eval.table import Results, Table, shown
from flowalign.pictures import thumbnail
from flowalign.types import EvalRow

LONGEST = 256  # pixels of an image in the page; what is larger lies under images/ as it is


@dataclass(frozen=True)
class Bar:
    """A number as a bar: where it ends, and its error to each side, in percent of the axis."""

    model: str
    text: str
    n: int
    end: float
    error: float


@dataclass(frozen=True)
class Cell:
    """An image as a data URI; its score as text; level: where it lies among all shown, 0 to 100.

    level is None where there is no score. hint: every part of the score; reason: what it rests
    on. failed: judged wrong, or where there is no verdict, in the lower half of what is shown; or
    without a score.
    """

    source: str
    score: str
    level: float | None
    hint: str
    reason: str
    failed: bool


@dataclass(frozen=True)
class Line:
    """One prompt with a cell a model; disagree: their scores differ, see `disagree`."""

    index: int
    prompt: str
    tag: str
    disagree: bool
    cells: list[Cell]


def render(
    results: Results,
    tables: Sequence[Table],
    *,
    title: str,
    conditions: Sequence[str],
    config: str,
    model: str,
) -> str:
    """The page. conditions: how the numbers were measured, a sentence each; config as YAML; model:
    the base model's id, for the published numbers of it."""
    import jinja2

    source = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    grids = {mark.name: lines(results, mark) for mark in results.benchmarks}
    return environment.from_string(source).render(
        title=title,
        conditions=conditions,
        config=config,
        tables=tables,
        models=list(results.judged),
        charts={mark.name: bars(results, mark) for mark in results.benchmarks},
        grids={name: found for name, found in grids.items() if found},
        longest=LONGEST,
        published=published if published.concerns(model) else None,
    )


def bars(results: Results, benchmark: Benchmark) -> dict[str, list[Bar]]:
    """{tag: one bar a model}; empty where the benchmark has no tags."""
    found: dict[str, dict[str, EvalRow]] = {}
    for model, judged in results.judged.items():
        for row in tag_rows(benchmark, judged[benchmark.name].rows):
            found.setdefault(row.metric, {})[model] = row
    means = [row.mean for rows in found.values() for row in rows.values() if row.n]
    axis = max([1.0, *means])  # shares end at 1
    return {
        tag: [_bar(model, row, axis) for model, row in rows.items()] for tag, rows in found.items()
    }


def _bar(model: str, row: EvalRow, axis: float) -> Bar:
    mean, error = (0.0 if math.isnan(x) else x / axis * 100 for x in (row.mean, row.stderr))
    return Bar(model, shown(row, 3), row.n, max(0.0, mean), error)


def lines(results: Results, benchmark: Benchmark) -> list[Line]:
    """The prompts whose images were kept, each with its image by every model."""
    judged = {model: found[benchmark.name] for model, found in results.judged.items()}
    count = min(len(found.pictures) for found in judged.values())
    part = benchmark.headline or "value"
    scores = [
        [found.rows[i].get(part, math.nan) for found in judged.values()] for i in range(count)
    ]
    known = [score for row in scores for score in row if math.isfinite(score)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    found = []
    for i, row in enumerate(scores):
        images = [(mine.rows[i], mine.pictures[i]) for mine in judged.values()]
        cells = [
            _cell(image, picture, score, (low, high))
            for (image, picture), score in zip(images, row, strict=True)
        ]
        image = images[0][0]
        tag = str(image["metadata"].get("tag", ""))
        found.append(Line(i, image["prompt"], tag, disagree(row, high - low), cells))
    return found


def disagree(scores: Sequence[float], spread: float) -> bool:
    """Whether models disagree on a prompt: their scores differ by more than half of the spread of
    all shown (so any difference of right and wrong does), or some have none (NaN)."""
    known = [score for score in scores if math.isfinite(score)]
    if len(known) < len(scores):
        return bool(known)
    return max(scores) - min(scores) > spread / 2


def _cell(
    image: Mapping[str, Any], picture: bytes, score: float, ends: tuple[float, float]
) -> Cell:
    low, high = ends
    level = None if math.isnan(score) else 100 * (score - low) / (high - low) if high > low else 100
    parts = [f"{key} {value:.3g}" for key, value in image.items() if key not in FIELDS]
    verdict = image.get("correct", math.nan)
    failed = level is None or (verdict == 0 if math.isfinite(verdict) else level < 50)
    text = "failed" if math.isnan(score) else f"{score:.2f}"
    encoded = base64.b64encode(thumbnail(picture, LONGEST)).decode()
    source, reason = f"data:image/png;base64,{encoded}", str(image.get("reason") or "")
    return Cell(source, text, level, ", ".join(parts), reason, failed)
