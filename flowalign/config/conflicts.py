"""Values of a config that are possible alone but not together. Nothing is read from disk."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowalign.config.schema import (
    STAGES,
    BenchmarkConfig,
    EvalStage,
    GrpoStage,
    MergeStage,
    OpdStage,
    RecipeStage,
    RolloutConfig,
    SftStage,
    Stage,
    TrainingStage,
    routing,
)


def conflicts(config: Stage) -> Iterator[tuple[list[str], str]]:
    """(the keys involved, the problem) for values that are possible alone but not together."""
    if isinstance(config, TrainingStage):
        yield from _noise_conflicts(config)
        yield from _window_conflicts(config.rollout)
        yield from _reward_conflicts(config)
        yield from _sharing_conflicts(config)
        watched = config.evaluation.watch if config.evaluation else []
        yield from _same_names("tasks", [task.name for task in config.tasks])
        if watched:
            columns = [name for mark in watched for name in mark.judges]
            names = [*columns, *(task.name for task in config.tasks)]
            yield from _same_names("evaluation.watch", names)
            yield from _judge_conflicts("evaluation.watch", watched)
            yield from _layouts_of_a_run(watched)
        yield from _validation_conflicts(config)
    if isinstance(config, OpdStage | SftStage):
        yield from _routing_conflicts(config)
    if isinstance(config, OpdStage):
        yield from _student_conflicts(config)
    if isinstance(config, MergeStage):
        yield from _merge_conflicts(config)
    if isinstance(config, RecipeStage):
        yield from _file_names("stages", config.stages)
        yield from variant_conflicts(config.variant, "variant.")
    if isinstance(config, EvalStage):
        yield from _same_names("benchmarks", [mark.name for mark in config.benchmarks])
        yield from _same_columns(config.benchmarks)
        yield from _file_names("benchmarks", [mark.name for mark in config.benchmarks])
        yield from _judge_conflicts("benchmarks", config.benchmarks)
        yield from _file_names("models", config.models)
        yield from _column_names(config.benchmarks)
        yield from _unknown_models(config)


def variant_conflicts(
    variant: Mapping[str, Any], place: str = ""
) -> Iterator[tuple[list[str], str]]:
    """What in a variant is not keys for a kind of stage."""
    kinds = [kind for kind in STAGES if kind != "recipe"]
    for kind, keys in variant.items():
        if kind not in kinds:
            yield (
                [f"{place}{kind}"],
                f"{place}{kind}: a variant has keys for kinds of stages, which are "
                f"{', '.join(kinds)}. Put it under one of them.",
            )
        elif not isinstance(keys, Mapping):
            yield [f"{place}{kind}"], f"{place}{kind}: got {keys!r}; want keys of that stage."


def _merge_conflicts(config: MergeStage) -> Iterator[tuple[list[str], str]]:
    if config.weights is not None and len(config.weights) != len(config.adapters):
        yield (
            ["weights", "adapters"],
            f"weights: {len(config.weights)} for {len(config.adapters)} adapters. Give one each, "
            "or null.",
        )
    if config.rank is not None and config.method == "concat":
        yield (
            ["rank", "method"],
            f"rank: {config.rank}, but method 'concat' has the sum of the ranks. Use 'svd', or "
            "leave it out.",
        )


def _sharing_conflicts(config: TrainingStage) -> Iterator[tuple[list[str], str]]:
    prompts, updates = config.rollout.prompts, config.optimizer.updates_per_rollout
    if prompts % updates:
        yield (
            ["rollout.prompts", "optimizer.updates_per_rollout"],
            f"rollout.prompts: {prompts} prompts cannot be shared evenly among "
            f"optimizer.updates_per_rollout = {updates}; a group stays whole. "
            f"Use a multiple of {updates}, for example {-(-prompts // updates) * updates}.",
        )


def _same_names(key: str, names: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        places = ", ".join(f"{key}.{i}" for i, other in enumerate(names) if other == name)
        yield [key], f"{places}: all are named {name!r}. Give each its own name."


def _file_names(key: str, names: Iterable[str]) -> Iterator[tuple[list[str], str]]:
    for name in names:
        if not re.fullmatch(r"[\w-]+", name):
            yield (
                [key],
                f"{key}: the name {name!r} is to stand in file names and tables. "
                "Use letters, digits, _ and - only.",
            )


def _judge_conflicts(key: str, marks: Sequence[BenchmarkConfig]) -> Iterator[tuple[list[str], str]]:
    """Who judges the images: `reward`, `rewards`, or nobody where a layout is all that is asked."""
    for index, mark in enumerate(marks):
        place = f"{key}.{index}"
        if mark.reward and mark.rewards:
            yield (
                [f"{place}.reward", f"{place}.rewards"],
                f"{place}.rewards: there is a `reward`, too. Make it one of the `rewards`, or "
                "leave one of them out.",
            )
        elif not mark.judges and not mark.layout:
            yield (
                [f"{place}.reward", f"{place}.rewards", f"{place}.layout"],
                f"{place}.reward: missing. Add `reward:` with the keys name, options; or "
                "`rewards:` for several judges; or `layout:` to sample the images only.",
            )
        yield from _file_names(f"{place}.rewards", mark.rewards)


def _layouts_of_a_run(watched: Sequence[BenchmarkConfig]) -> Iterator[tuple[list[str], str]]:
    for index, mark in enumerate(watched):
        if mark.layout:
            place = f"evaluation.watch.{index}.layout"
            yield (
                [place],
                f"{place}: {mark.layout!r}, but a run keeps no images of its evaluations. Use it "
                "under `benchmarks` of an evaluation.",
            )


def _same_columns(marks: Sequence[BenchmarkConfig]) -> Iterator[tuple[list[str], str]]:
    """A judge's name that meets another benchmark's: a_b with c, and a with b_c."""
    places: dict[str, list[str]] = {}
    for index, mark in enumerate(marks):
        for column in mark.judges:
            places.setdefault(column, []).append(f"benchmarks.{index}")
    plain = [mark.name for mark in marks]
    for column, found in places.items():
        if len(found) > 1 and column not in [n for n in plain if plain.count(n) > 1]:
            yield (
                found,
                f"{', '.join(found)}: more than one column is called {column!r} "
                "(NAME_JUDGE for each of `rewards`). Give one of them another name.",
            )


def _column_names(benchmarks: Sequence[BenchmarkConfig]) -> Iterator[tuple[list[str], str]]:
    for index, mark in enumerate(benchmarks):
        if mark.name in ("average", "fidelity"):
            yield (
                [f"benchmarks.{index}.name"],
                f"benchmarks.{index}.name: {mark.name!r} is a column that every table has for "
                "itself. Choose another name.",
            )


def _unknown_models(config: EvalStage) -> Iterator[tuple[list[str], str]]:
    for name, others in config.compare.items():
        for model in (name, *others):
            if model not in config.models:
                close = difflib.get_close_matches(model, config.models, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                yield (
                    [f"compare.{name}", "models"],
                    f"compare.{name}: no model is named {model!r}.{hint} "
                    f"Possible: {', '.join(config.models)}.",
                )
        if name in others:
            yield [f"compare.{name}"], f"compare.{name}: compared with itself. Leave it out."


def _validation_conflicts(config: TrainingStage) -> Iterator[tuple[list[str], str]]:
    for index, task in enumerate(config.tasks):
        if config.evaluation and task.validation is None:
            yield (
                ["evaluation", f"tasks.{index}.validation"],
                f"tasks.{index}.validation: missing, though `evaluation` is on. Name a prompt set "
                "that is not trained on, or write `evaluation: null`.",
            )


def _noise_conflicts(config: TrainingStage) -> Iterator[tuple[list[str], str]]:
    """The noise that a stage cannot do without."""
    rollout, need = config.rollout, _noise_needed(config)
    keys = ["rollout.kind", "rollout.noise_level"]
    if rollout.kind == "ode" and need:
        yield (
            ["rollout.kind"],
            f"rollout.kind: 'ode' adds no noise, so {need}. Use 'sde' or 'cps'.",
        )
    elif rollout.kind != "ode" and rollout.noise_level == 0 and need:
        yield (
            keys,
            f"rollout.noise_level: 0 adds no noise, so {need}. "
            "Use a value above 0, for example 0.7.",
        )
    elif rollout.kind == "cps" and rollout.noise_level > 1:
        yield (
            keys,
            f"rollout.noise_level: {rollout.noise_level} with kind 'cps', whose angle a*pi/2 ends "
            "at a = 1. Use a value in (0, 1].",
        )


def _noise_needed(config: TrainingStage) -> str:
    """What a rollout without noise would lack for this config ("" = nothing)."""
    if isinstance(config, GrpoStage):
        return "grpo has nothing to learn from"
    if not isinstance(config, OpdStage):
        return ""
    if config.student.reward_weight > 0:
        return "the reward (student.reward_weight) has nothing to learn from"
    if config.student.gradient != "pathwise":
        return f"student.gradient {config.student.gradient!r} has no log-probabilities"
    if config.student.weighting in ("kl", "published"):
        return f"student.weighting {config.student.weighting!r} (a KL) is infinite"
    return ""


def _reward_conflicts(config: TrainingStage) -> Iterator[tuple[list[str], str]]:
    """Rewards and groups where rewards are learnt from, or evaluated."""
    learns = isinstance(config, GrpoStage) or (
        isinstance(config, OpdStage) and config.student.reward_weight > 0
    )
    if learns and config.rollout.copies < 2:
        yield (
            ["rollout.copies"],
            f"rollout.copies: got {config.rollout.copies}; an advantage is relative to the other "
            "images of a prompt. Use 2 or more.",
        )
    for index, task in enumerate(config.tasks):
        if task.reward is None and (learns or config.evaluation):
            why = "this run learns from it" if learns else "`evaluation` is on"
            yield (
                [f"tasks.{index}.reward", "evaluation"],
                f"tasks.{index}.reward: missing, and {why}. Add `reward:` with the keys name, "
                "options" + ("." if learns else ", or write `evaluation: null`."),
            )
        if task.teacher is not None and isinstance(config, GrpoStage):
            yield (
                [f"tasks.{index}.teacher"],
                f"tasks.{index}.teacher: {task.teacher!r}, but the stage 'grpo' has no teachers. "
                "Leave it out, or use the stage 'opd'.",
            )


def _routing_conflicts(config: OpdStage | SftStage) -> Iterator[tuple[list[str], str]]:
    names, routed = sorted(config.teachers), routing(config)
    for index, task in enumerate(config.tasks):
        if routed[task.name] not in names:
            yield (
                [f"tasks.{index}.teacher", "teachers"],
                f"tasks.{index}.teacher: task {task.name!r} is routed to "
                f"{routed[task.name]!r}, and there are only {names}. Name one of these, or add "
                "that teacher under `teachers`.",
            )
    for name in sorted(config.teachers.keys() - set(routed.values())):
        yield (
            ["teachers", "tasks"],
            f"teachers.{name}: no task is routed to it. Give a task `teacher: {name}`, or leave "
            "it out.",
        )
    for name in names:
        if "." in name:  # an adapter is a module's name in torch
            yield (
                ["teachers"],
                f"teachers: the name {name!r} has a dot, which an adapter's name cannot hold; "
                f"write {name.replace('.', '_')!r}.",
            )
    yield from _file_names("teachers", names)


def _student_conflicts(config: OpdStage) -> Iterator[tuple[list[str], str]]:
    student, rollout = config.student, config.rollout
    if student.gradient in ("published", "detached") and student.weighting != "published":
        yield (
            ["student.gradient", "student.weighting"],
            f"student.weighting: {student.weighting!r} with gradient {student.gradient!r}, which "
            "is the published arithmetic. Use weighting 'published', or gradient 'pathwise'.",
        )
    if student.gradient != "pathwise" or student.reward_weight > 0:
        if config.guidance != rollout.guidance:
            yield (
                ["student.guidance", "rollout.guidance"],
                f"student.guidance: {config.guidance}, but the rollout has {rollout.guidance}: the "
                "ratio of new and old policy needs one policy. Use the same, or gradient "
                "'pathwise' without a reward.",
            )
    if student.reward_to_go and student.gradient != "policy":
        yield (
            ["student.reward_to_go", "student.gradient"],
            f"student.reward_to_go: true, but gradient {student.gradient!r} has no rewards over "
            "time. Use gradient 'policy', or leave it out.",
        )
    start, stop = rollout.trained
    if student.states.select != "all" and student.states.count > stop - start:
        yield (
            ["student.states", "rollout.window", "rollout.steps"],
            f"student.states.count: {student.states.count}, and rollout.window has only "
            f"{stop - start} steps. Use at most {stop - start}.",
        )


def _window_conflicts(rollout: RolloutConfig) -> Iterator[tuple[list[str], str]]:
    keys = ["rollout.window", "rollout.steps", "rollout.kind"]
    steps = rollout.steps
    if rollout.window is None:
        if steps == 1:
            yield (
                keys[:2],
                "rollout.steps: 1, and the default window is all steps but the last, which leaves "
                "none to train. Use more steps.",
            )
        return
    start, stop = rollout.window
    if not 0 <= start < stop <= steps:
        yield (
            keys[:2],
            f"rollout.window: [{start}, {stop}] is not a non-empty part of [0, {steps}] "
            f"(rollout.steps = {steps}). Want 0 <= start < stop <= {steps}.",
        )
    elif rollout.kind == "cps" and stop == steps:
        yield (
            keys,
            f"rollout.window: [{start}, {stop}] holds the last step, which is noiseless under "
            f"'cps'. Let it stop at {steps - 1} or earlier, or use kind 'sde'.",
        )
