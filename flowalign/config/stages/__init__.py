"""One class a stage: its sections, its checks, and what follows from its keys. Nothing is read from
disk. `base` has what all stages share. RecipeStage is here because it consists of other stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from flowalign.config.section import ConfigError, FileName, Positive, Seed
from flowalign.config.stages.base import Job, Stage, same_names
from flowalign.config.stages.evaluation import EvalStage
from flowalign.config.stages.merge import MergeStage
from flowalign.config.stages.rewards import AwmStage, DpoStage, GradientStage, GrpoStage, NftStage
from flowalign.config.stages.students import OpdStage, SftStage
from flowalign.config.stages.training import TrainingStage
from flowalign.system.packages import entry_points
from flowalign.types import Problem


def variant_problems(variant: Any) -> Iterator[Problem]:
    """The problems of a variant, {kind of stage: keys laid over all stages of that kind}."""
    possible = [name for name in stage_names() if name != "recipe"]
    if not isinstance(variant, Mapping):
        variant = {"config": None}
    for kind, keys in variant.items():
        if kind not in possible or not isinstance(keys, Mapping):
            text = f"want keys of a stage's config under one of {', '.join(possible)}."
            yield Problem(str(kind), text)


class RecipeStage(Job):
    """Stages that run one after the other, each in a folder of its name under `output`."""

    is_recipe = True
    stage: Literal["recipe"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Run other stages."""
    seed: Seed = 0
    """Seed of every stage that sets none."""
    stages: dict[FileName, dict[str, Any]] = Field(
        min_length=1, examples=[{"ocr": {"use": "teacher_ocr.yaml"}}]
    )
    """{name: keys of a stage's config}. They are laid over the file that `use` names (relative to
    this one); `set` lists changes as on the command line. A value `stage:NAME` is the adapter of an
    earlier stage."""
    max_minutes: Positive | None = Field(default=None, examples=[1430.0])
    """Limit like `train.max_minutes`, in place of its stages' keys."""
    variant: dict[str, dict[str, Any]] = Field(
        default={}, examples=[{"grpo": {"rollout": {"batch_size": 4}}}]
    )
    """{kind of stage: keys laid over all stages of that kind}: the same recipe for other hardware.
    `--variant FILE` on the command line sets it."""

    def problems(self) -> Iterator[Problem]:
        for problem in variant_problems(self.variant):
            yield Problem(f"variant.{problem.key}", problem.text)
        yield from same_names([("stages", name) for name in self.stages])


STAGES: dict[str, type[Stage]] = {  # by the value of `stage`
    "grpo": GrpoStage,
    "nft": NftStage,
    "awm": AwmStage,
    "gradient": GradientStage,
    "dpo": DpoStage,
    "opd": OpdStage,
    "sft": SftStage,
    "merge": MergeStage,
    "recipe": RecipeStage,
    "eval": EvalStage,
}
STAGE_PLUGINS = "flowalign.algorithms"  # entry points: name of a stage -> its config class


def stage_names() -> list[str]:
    return list(dict.fromkeys([*STAGES, *sorted(p.name for p in entry_points(STAGE_PLUGINS))]))


def stage_class(name: str) -> type[Stage]:
    """The config class of a stage. A plugin is imported now. Raises ConfigError if that fails."""
    if name in STAGES:
        return STAGES[name]
    (point, *_) = entry_points(STAGE_PLUGINS).select(name=name)
    try:
        kind = point.load()
        if not issubclass(kind, TrainingStage):
            raise TypeError(f"{kind.__name__} is no TrainingStage")
    except Exception as error:
        text = f"stage: the plugin {name!r} ({point.value}) cannot be loaded: {error}"
        raise ConfigError([text]) from error
    return kind


def most_like(name: str) -> str:
    """The stage of the library whose settings suit a stage; for a plugin, that is its base
    class."""
    if name in STAGES or name not in stage_names():
        return name
    bases = {like: STAGES[like].__bases__[0] for like in ("nft", "grpo", "opd")}
    kind = stage_class(name)
    return next((like for like, base in bases.items() if issubclass(kind, base)), "opd")


def variant_keys(variant: Mapping[str, Any], name: str) -> Any:
    """The keys that a variant lays over a stage."""
    return variant.get(name, variant.get(most_like(name), {}))
