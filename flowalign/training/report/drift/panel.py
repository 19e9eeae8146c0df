"""Drift as a page shows it: a table of the statistics, and base beside model for some prompts.

The panel is a macro of `templates/drift.html.j2`, for the page of a run and the report of an
evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowalign.training.report.drift.compare import Drift

MEANINGS = {
    "brightness": "mean luma",
    "dark": "share of dark pixels",
    "saturated": "share of pure, loud colours",
    "edges": "share of neighbours with a step",
    "entropy": "bits of the histogram of colours",
    "grid": "share of the luma's power at the grid of the patches",
    "objects": "regions that stand out",
    "surplus": "regions beyond those that the prompt asks for",
    "text": "share of the image that looks like text",
    "diversity": "distance of the images of a prompt, in pixels",
    "feature_diversity": "distance of the images of a prompt, in features of the reward's CLIP",
}


@dataclass(frozen=True)
class Line:
    """A statistic. beyond: the alarm spoke."""

    name: str
    meaning: str
    base: str
    model: str
    sigmas: str
    interval: str
    n: int
    beyond: bool


@dataclass(frozen=True)
class Pair:
    """A prompt with its image by both; sources are data URIs."""

    prompt: str
    task: str
    sigmas: str
    base: str
    model: str


@dataclass(frozen=True)
class Panel:
    """A check. title: whose images."""

    title: str
    warn: float
    lines: list[Line]
    pairs: list[Pair]


def panel(
    title: str, drifts: Sequence[Drift], rows: Sequence[Mapping[str, Any]], warn: float
) -> Panel:
    """The statistics by the size of their drift, and rows as `monitor.Check` has them."""
    order = sorted(drifts, key=lambda drift: -abs(drift.sigmas))
    pairs = [
        Pair(
            row["prompt"],
            row["task"],
            f"{row['sigmas']:.1f}",
            f"data:image/webp;base64,{row['base']}",
            f"data:image/webp;base64,{row['model']}",
        )
        for row in rows
    ]
    return Panel(title, warn, [_line(drift, warn) for drift in order], pairs)


def read(title: str, found: Mapping[str, Any], warn: float) -> Panel:
    """The same from the JSON of `monitor.Check.about`. Raises ValueError for one that is damaged
    or of another version."""
    try:
        drifts = [of_json(row) for row in found["drifts"]]
        return panel(title, drifts, found["rows"], warn)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no drift: {error}") from error


def of_json(row: Mapping[str, Any]) -> Drift:
    """A drift from what `vars` of it was in JSON, where NaN and infinity are null."""
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in row.items()}
    return Drift(**values)


def _line(drift: Drift, warn: float) -> Line:
    known = math.isfinite(drift.low) and math.isfinite(drift.high)
    return Line(
        drift.name,
        MEANINGS.get(drift.name.rpartition("/")[2], ""),
        f"{drift.base:.3g}",
        f"{drift.model:.3g}",
        f"{drift.sigmas:+.1f}",
        f"{drift.low:+.1f} to {drift.high:+.1f}" if known else "too few prompts",
        drift.n,
        drift.beyond(warn),
    )
