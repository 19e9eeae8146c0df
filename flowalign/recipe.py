"""A list of stages, each with its folder: teachers -> merge or sft -> student -> table.

A recipe is checked as a whole before its first stage runs. A stage that is finished is skipped when
the recipe is run again, and one that was killed continues from its last checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.adapters.files import file_digest
from flowalign.config import (
    STAGES,
    ConfigError,
    EvalStage,
    MergeStage,
    RecipeStage,
    Stage,
    TrainingStage,
    overlay,
    parse,
    read,
    to_yaml,
)
from flowalign.preflight import adapters, check_launch, check_world
from flowalign.publish.card import REPORT, write_card

if TYPE_CHECKING:
    from flowalign.teachers.merge import MergeReport

REFERENCE = "stage:"
DONE = "done.json"  # what a finished stage leaves: its config, and the inputs it was made from


def run(
    config: RecipeStage,
    home: Path,
    train: Callable[[TrainingStage], object],
    evaluate: Callable[[EvalStage], object],
) -> Path:
    """Run what is not finished; returns the output folder. home: where `use` files are looked for.

    train and evaluate run one stage each; train resumes where there are checkpoints. Raises
    ConfigError, before any stage runs, with everything that is wrong in any of them.
    """
    from flowalign import parallel

    state = parallel.state(*_drafts(config, home))
    check_launch(state.num_processes)
    stages = plan(config, home, state.num_processes)
    show = print if state.is_main_process else (lambda *text, **how: None)
    for number, (name, stage) in enumerate(stages.items(), 1):
        head = f"[{number}/{len(stages)}] {name} ({stage.stage})"
        if finished(stage):
            show(f"{head}: finished before", flush=True)
            continue
        show(f"{head} -> {stage.output}", flush=True)
        if isinstance(stage, TrainingStage):
            train(stage)
        elif isinstance(stage, MergeStage):
            if state.is_main_process:
                show(f"  {merged(stage).summary}", flush=True)
        elif isinstance(stage, EvalStage):
            evaluate(stage)
        parallel.release()
        if state.is_main_process:
            _finish(stage)
        state.wait_for_everyone()
    return Path(config.output)


# Planning --------------------------------------------------------------------------------------


def plan(config: RecipeStage, home: Path, num_processes: int = 1) -> dict[str, Stage]:
    """The config of every stage by name, checked; ConfigError with all that is wrong."""
    stages: dict[str, Stage] = {}
    problems: list[str] = []
    pending: list[str] = []
    for name in config.stages:
        try:
            stage = _stage(config, name, home, list(stages))
            check_world(stage, num_processes, pending)
        except ConfigError as error:
            problems += [f"stages.{name}.{text}" for text in error.problems]
            stage = None
        if stage is not None:
            stages[name] = stage
        pending.append(str(_adapter_of(config, name)))  # a broken stage is blamed once
    problems += _mixed_precisions(stages)
    if not problems:
        problems += [text for stage in stages.values() for text in _stale(stage, stages)]
    if problems:
        raise ConfigError(problems)
    return stages


def _drafts(config: RecipeStage, home: Path) -> Iterator[Stage]:
    """The stages that can be read, before it is known how many processes there are: those of a
    recipe share one group. What is wrong with the others is for `plan` to say."""
    names = list(config.stages)
    for number, name in enumerate(names):
        try:
            yield _stage(config, name, home, names[:number])
        except ConfigError:
            continue


def _stage(config: RecipeStage, name: str, home: Path, earlier: list[str]) -> Stage:
    """The config of one stage: its file, its own keys, and what the recipe gives to all."""
    own = deepcopy(config.stages[name])
    use, changes = own.pop("use", None), own.pop("set", [])
    if use is not None and not isinstance(use, str):
        raise ConfigError([f"use: got {use!r}; want the name of a YAML file."])
    if not isinstance(changes, list) or not all(isinstance(text, str) for text in changes):
        raise ConfigError([f"set: got {changes!r}; want a list of texts, key.path=value."])
    data = read(home / use) if use is not None else {}
    data = overlay(data or {}, own)
    data["model"] = config.model.model_dump(mode="json")
    data = overlay(data, config.variant.get(str(data.get("stage")), {}))
    data["output"] = str(Path(config.output) / name)
    kind = STAGES.get(str(data.get("stage")), Stage)
    if "seed" in kind.model_fields and "seed" not in own:
        data["seed"] = config.seed
    if kind is RecipeStage:
        raise ConfigError(["stage: 'recipe' inside a recipe. List its stages here instead."])
    problems: list[str] = []
    data = _resolve(data, lambda ref: _reference(config, ref, earlier, problems))
    if problems:
        raise ConfigError(problems)
    return parse(data, changes, source=name, stage=Stage)


def _resolve(value: Any, resolve: Callable[[str], str]) -> Any:
    """The same with every `stage:NAME` replaced."""
    if isinstance(value, Mapping):
        return {key: _resolve(item, resolve) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, resolve) for item in value]
    if isinstance(value, str) and value.startswith(REFERENCE):
        return resolve(value.removeprefix(REFERENCE))
    return value


def _reference(config: RecipeStage, name: str, earlier: list[str], problems: list[str]) -> str:
    if name not in earlier and name in config.stages:
        problems.append(f"{REFERENCE}{name}: that stage comes later, or is wrong itself.")
    elif name not in config.stages:
        problems.append(f"{REFERENCE}{name}: there is no such stage; earlier ones are {earlier}.")
    return str(_adapter_of(config, name))


def _adapter_of(config: RecipeStage, name: str) -> Path:
    """Where a stage leaves its adapter."""
    return Path(config.output) / name / "adapter"


def _mixed_precisions(stages: Mapping[str, Stage]) -> list[str]:
    """accelerate scales the loss (of float16) in a whole process, or not at all."""
    found = {n: s.model.dtype for n, s in stages.items() if isinstance(s, TrainingStage)}
    if len({dtype == "float16" for dtype in found.values()}) < 2:
        return []
    return [f"stages: model.dtype is float16 in some ({found}). Use it in all of them, or in none."]


# What is finished ------------------------------------------------------------------------------


def finished(stage: Stage) -> bool:
    """Whether the stage has run to its end."""
    return (Path(stage.output) / DONE).is_file()


def _stale(stage: Stage, stages: Mapping[str, Stage]) -> list[str]:
    """A finished stage that is not what the recipe asks for now."""
    if not finished(stage):
        return []
    done = json.loads((Path(stage.output) / DONE).read_text())
    again = f"Delete {stage.output} to run it again, or choose another `output`."
    now, then = stage.model_dump(mode="json"), done["config"]
    changed = sorted(key for key in now.keys() | then if now.get(key) != then.get(key))
    if changed:
        return [f"{stage.output}: finished with another {', '.join(changed)}. {again}"]
    unready = {str(Path(s.output) / "adapter") for s in stages.values() if not finished(s)}
    for place, source in adapters(stage).items():
        if source in unready or file_digest(source) != done["inputs"].get(source):
            return [f"{stage.output}: finished with another {place} ({source}). {again}"]
    return []


def _finish(stage: Stage) -> None:
    """Mark a stage as finished, in one rename."""
    inputs = {source: file_digest(source) for source in adapters(stage).values()}
    text = json.dumps({"config": stage.model_dump(mode="json"), "inputs": inputs}, indent=1)
    part = Path(stage.output) / f"{DONE}.part"
    part.write_text(text)
    os.replace(part, part.with_suffix(""))


def merged(stage: MergeStage) -> MergeReport:
    """Merge into <output>/adapter, with its card; the report, which says what was done, lies beside
    it."""
    from flowalign.teachers import merge as merging

    folder = Path(stage.output)
    shutil.rmtree(folder / "adapter", ignore_errors=True)  # of a merge that was killed
    settings = stage.model_dump(exclude={"stage", "output", "model", "adapters"})
    report = merging.merge(stage.adapters, folder / "adapter", **settings)
    (folder / REPORT).write_text(f"{report}\n")
    (folder / "config.yaml").write_text(to_yaml(stage))
    write_card(folder, stage, sys.argv)
    return report
