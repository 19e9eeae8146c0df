"""The base of all stages: their common keys, and the questions that other modules ask of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from flowalign.config.learning import AdvantageConfig, RewardConfig
from flowalign.config.model import ModelConfig
from flowalign.config.run import BenchmarkConfig, SamplingConfig
from flowalign.config.section import Location, Section
from flowalign.system.folder import RunFolder
from flowalign.types import Problem


@dataclass(frozen=True)
class Judged:
    """Prompts whose images are scored: a task or a benchmark."""

    place: str  # in the config
    name: str
    rewards: Mapping[str, RewardConfig]  # by their key below the place
    prompts: Mapping[str, str]  # prompt sets by their key below the place; the last is held out
    evaluated: int  # images of a held-out prompt in one evaluation, of all its models
    limit: int | None  # held-out prompts, at most


class Stage(Section):
    """The keys that all configs have; `load(..., stage=Stage)` accepts any of them."""

    stage: str
    """What is done: a key of STAGES."""
    output: Location = Field(min_length=1, examples=["runs/teacher_ocr"])
    """Folder of the run."""
    model: ModelConfig
    command: ClassVar[str] = "flowalign train"
    """What runs it."""
    trains: ClassVar[bool] = False
    """Whether it is a training run."""
    merges: ClassVar[bool] = False
    """Whether it is a merge of adapters."""
    is_recipe: ClassVar[bool] = False
    """Whether it runs other stages."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.output)

    @property
    def samples(self) -> bool:
        return self.trains

    @property
    def inputs(self) -> dict[str, str]:
        """{config key: folder or Hub id} of every adapter that the stage reads."""
        return {}

    def guidance_at(self, key: str) -> float | None:
        """The CFG scale at which an adapter is used, by its key in `inputs`; None = at its own."""
        return None

    @property
    def bases(self) -> dict[str, ModelConfig]:
        """{config key of a teacher: its base}, of those that are not on the student's."""
        return {}

    @property
    def scales(self) -> dict[str, float]:
        """{config key: guidance scale} of all scales that are set."""
        return {}

    @property
    def credited(self) -> AdvantageConfig | None:
        """The section that turns its rewards into advantages; None if there is none."""
        return None

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the loss needs scores, and so decoded images, of every rollout."""
        return self.credited is not None

    @property
    def judged(self) -> list[Judged]:
        """Every task and benchmark; empty for a stage that samples no images."""
        return []

    @property
    def images(self) -> int:
        """Images that the rollouts of a training run draw in all."""
        return 0

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        return SamplingConfig()


class Job(Stage):
    """What `flowalign train` runs."""


def judged_at(place: str, benchmarks: Sequence[BenchmarkConfig], models: int = 1) -> list[Judged]:
    return [
        Judged(f"{place}.{i}", b.name, b.reward_keys, {"prompts": b.prompts}, models * b.images,
               b.limit)
        for i, b in enumerate(benchmarks)
    ]  # fmt: skip


def same_names(names: Sequence[tuple[str, str]]) -> Iterator[Problem]:
    """Problems of names in tables, logs and folders that occur twice. names: (key in the config,
    name)."""
    counts = Counter(name.casefold() for _, name in names)  # a disk may ignore the case
    for key, name in dict.fromkeys(names):
        if counts.pop(name.casefold(), 1) > 1:
            yield Problem(
                key, f"the name {name!r} is taken in tables, logs or folders. Use another."
            )


def either(value: Any, default: Any) -> Any:
    return default if value is None else value
