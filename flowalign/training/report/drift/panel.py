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


ROW_KEYS = ("prompt", "task", "sigmas", "base", "model")


@dataclass(frozen=True)
class Panel:
    """A check. title: whose images. drifts: the largest first. rows: as `monitor.Check` has
    them."""

    title: str
    warn: float
    drifts: list[Drift]
    rows: Sequence[Mapping[str, Any]]

    def meaning(self, drift: Drift) -> str:
        """What the statistic is, in words."""
        return MEANINGS.get(drift.name.rpartition("/")[2], "")


def panel(
    title: str, drifts: Sequence[Drift], rows: Sequence[Mapping[str, Any]], warn: float
) -> Panel:
    """A panel with the statistics by the size of their drift."""
    return Panel(title, warn, sorted(drifts, key=lambda drift: -abs(drift.sigmas)), rows)


def read_panel(title: str, check: Mapping[str, Any], warn: float) -> Panel:
    """The same from the JSON of `monitor.Check.about`. Raises ValueError for one that is damaged
    or of another version."""
    try:
        rows = [{key: row[key] for key in ROW_KEYS} for row in check["rows"]]
        return panel(title, list(map(read_drift, check["drifts"])), rows, warn)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no drift: {error}") from error


def read_drift(row: Mapping[str, Any]) -> Drift:
    """A drift from `vars` of it in JSON, where NaN and infinity are null."""
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in row.items()}
    return Drift(**values)
