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
    """An image as a data URI, or as the name of the one in the page that it shows again; its score
    as text; level: where it lies among all shown, 0 to 100.

    level is None where there is no score. hint: every part of the score; reason: what it rests
    on. failed: judged wrong, or where there is no verdict, in the lower half of what is shown; or
    without a score.
    """

    source: str
    name: str
    score: str
    level: float | None
    hint: str
    reason: str
    failed: bool


@dataclass(frozen=True)
class Line:
    """One prompt with the cells of each model, one an image; disagree: their scores differ, see
    `disagree`."""

    index: int
    prompt: str
    tag: str
    disagree: bool
    cells: list[list[Cell]]


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
        copies={mark.name: mark.images for mark in results.benchmarks},
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
    """The prompts whose images were kept, each with its images by every model. What an earlier
    benchmark judged, too, is named, so that the page holds it once."""
    judged = {model: found[benchmark.name] for model, found in results.judged.items()}
    count, copies = min(len(found.pictures) for found in judged.values()), benchmark.images
    part, source = benchmark.headline or "value", benchmark.source or benchmark.name
    others = [mark for mark in results.benchmarks if (mark.source or mark.name) == source]
    first = benchmark.name == others[0].name
    scores = {m: [row.get(part, math.nan) for row in of.rows[:count]] for m, of in judged.items()}
    known = [score for mine in scores.values() for score in mine if math.isfinite(score)]
    ends = min(known, default=0.0), max(known, default=0.0)
    found = []
    for start in range(0, count, copies):
        places = range(start, start + copies)
        cells = [
            [
                _cell(
                    of.rows[i],
                    of.pictures[i] if first else None,
                    f"{source}/{model}/{i}",
                    scores[model][i],
                    ends,
                )
                for i in places
            ]
            for model, of in judged.items()
        ]
        means = [_mean([scores[model][i] for i in places]) for model in judged]
        row = next(iter(judged.values())).rows[start]
        tag = str(row["metadata"].get("tag", ""))
        differ = disagree(means, ends[1] - ends[0])
        found.append(Line(start // copies, row["prompt"], tag, differ, cells))
    return found


def _mean(scores: Sequence[float]) -> float:
    """That of those that are known, NaN where none is."""
    known = [score for score in scores if math.isfinite(score)]
    return sum(known) / len(known) if known else math.nan


def disagree(scores: Sequence[float], spread: float) -> bool:
    """Whether models disagree on a prompt: their scores (means over its images) differ by more than
    half of the spread of all shown (so any difference of right and wrong does, where there is one
    image), or some have none (NaN)."""
    known = [score for score in scores if math.isfinite(score)]
    if len(known) < len(scores):
        return bool(known)
    return max(scores) - min(scores) > spread / 2


def _cell(
    image: Mapping[str, Any],
    picture: bytes | None,
    name: str,
    score: float,
    ends: tuple[float, float],
) -> Cell:
    low, high = ends
    level = None if math.isnan(score) else 100 * (score - low) / (high - low) if high > low else 100
    parts = [f"{key} {value:.3g}" for key, value in image.items() if key not in FIELDS]
    verdict = image.get("correct", math.nan)
    failed = level is None or (verdict == 0 if math.isfinite(verdict) else level < 50)
    text = "failed" if math.isnan(score) else f"{score:.2f}"
    source = ""
    if picture is not None:
        encoded = base64.b64encode(thumbnail(picture, LONGEST)).decode()
        source = f"data:image/png;base64,{encoded}"
    reason = str(image.get("reason") or "")
    return Cell(source, name, text, level, ", ".join(parts), reason, failed)
