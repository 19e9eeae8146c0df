"""A merge of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from flowalign.config.section import Location, Seed
from flowalign.config.stages.base import Job
from flowalign.types import Problem


class MergeStage(Job):
    """A merge of adapters of one base; see flowalign.teachers.merge.

    *Choose it when* two adapters are to be one, or as a student's start. *Otherwise* opd: of three
    the student is .36 of the base's distance away, the best merge .93 (docs/choosing.md).

    The default is the sum, which overshoots where the updates are long: of the tiny world's three
    teachers it scores .42, and the average .85 (docs/log).
    """

    merges = True
    stage: Literal["merge"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Add weight updates."""
    adapters: list[Location] = Field(min_length=2, examples=[["runs/a/adapter", "runs/b/adapter"]])
    """Adapter folders or Hub ids."""
    weights: list[float] | None = Field(default=None, examples=[[0.5, 0.5]])
    """One per adapter; null = 1 each, the sum. 1/n each is the average."""
    method: Literal["concat", "svd", "ties", "dare"] = "concat"
    """concat is exact, and the ranks add. A student that starts from it has the summed rank."""
    rank: Annotated[int, Field(ge=1, le=8192)] | None = Field(default=None, examples=[32])
    """Rank of the result (not for concat); null = the largest rank given. svd: at most their
    sum."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the entries that ties and dare keep."""
    seed: Seed = 0
    """Seed of the entries that dare drops."""

    @property
    def inputs(self) -> dict[str, str]:
        return {f"adapters.{index}": source for index, source in enumerate(self.adapters)}

    def problems(self) -> Iterator[Problem]:
        if self.weights is not None and len(self.weights) != len(self.adapters):
            yield Problem(
                "weights", f"{len(self.weights)} for {len(self.adapters)} adapters. Give one each."
            )
        if self.rank is not None and self.method == "concat":
            yield Problem(
                "rank", f"{self.rank}, but 'concat' adds the ranks. Use 'svd', or leave it out."
            )
