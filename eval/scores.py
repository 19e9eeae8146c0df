"""The score of an image as a row of JSON: a line of a store, an item of results.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flowalign.types import EvalImage, ImageScore

# keys about the image; all others are numbers
ABOUT = ("index", "copy", "prompt", "metadata", "reason")
WEIGHT = "weight"  # the part with how often an image counts

# (metadata, parts) -> how often each part counts: `flowalign.rewards.RewardBase.counts`.
Counts = Callable[[Mapping[str, Any], Mapping[str, float]], Mapping[str, float]]


def no_counts(metadata: Mapping[str, Any], parts: Mapping[str, float]) -> Mapping[str, float]:
    """Every part counts once."""
    return {}


def image_score(
    image: EvalImage,
    numbers: Mapping[str, float],
    reason: str | None,
    counts: Counts = no_counts,
) -> ImageScore:
    """The score from a judge's `value` and parts. Raises KeyError without a value."""
    parts = dict(numbers)
    value = parts.pop("value")
    weight = dict(counts(image.metadata, parts))
    if parts.get(WEIGHT, 0) > 0:  # NaN is not
        weight = dict.fromkeys(numbers, parts[WEIGHT])
    weight[WEIGHT] = 0
    return ImageScore(image, value, parts, weight, reason)


def from_row(row: Mapping[str, Any], counts: Counts = no_counts) -> ImageScore:
    """The score of a row of JSON, where null is NaN. Raises KeyError or TypeError for a row of
    another form."""
    image = EvalImage(row["index"], row["copy"], row["prompt"], row["metadata"])
    numbers = {}
    for name, number in row.items():
        if name not in ABOUT:
            numbers[name] = math.nan if number is None else number
    return image_score(image, numbers, row.get("reason"), counts)


def to_row(score: ImageScore) -> dict[str, Any]:
    """The row of a score for JSON; NaN where an image has no number."""
    return {**vars(score.image), "reason": score.reason, **score.numbers}
