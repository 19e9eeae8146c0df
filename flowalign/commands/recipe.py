"""A list of stages, each with its folder: teachers -> merge or sft -> student -> table.

All of a recipe is checked before its first stage runs. A stage that is finished is skipped when
the recipe is run again, and one that was killed continues from its last checkpoint. A finished
stage proves itself by a manifest; one that is damaged is run again, as if it had been killed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils.memory import clear_device_cache

from flowalign.backbone.adapters import file_digest
from flowalign.checks import Launch, enforce, refused, stage_problems
from flowalign.commands.card import write_card
from flowalign.config import (
    ConfigError,
    MergeStage,
    Stage,
    overlay,
    parse,
    read,
    stage_class,
    stage_names,
    to_yaml,
)
from flowalign.config.loading import override, varied
from flowalign.config.stages import variant_keys
from flowalign.eval.evaluation import evaluate
from flowalign.eval.suite import image_sets
from flowalign.report import page
from flowalign.report.progress import recorded
from flowalign.system import files, manifest
from flowalign.system.manifest import Damaged
from flowalign.teachers import merge as merging
from flowalign.training.inputs import Inputs
from flowalign.training.run import lock, processes
from flowalign.training.run.resume import changed_rewards, rewards_code
from flowalign.types import Problem

HERE = Launch(resume=False)  # by one process
STAGE_REFERENCE = "stage:"

log = logging.getLogger("flowalign")


def run_recipe(
    config: Stage, home: Path, train: Callable[[Any], object], *, any_world: bool = False
) -> Path:
    """Run the unfinished stages of a recipe, or a merge; returns the output folder. home: where
    `use` files are looked for.

    train runs one stage, and resumes where there are checkpoints. any_world: these may be of
    another number of processes. Raises ConfigError, before any stage runs, with everything that is
    wrong in any of them.
    """
    stages, problems = read_stages(config, home)
    state = processes.state(*stages.values())  # one group of processes serves all stages
    main = state.is_main_process
    launch = Launch(state.num_processes, any_world=any_world)
    problems += _problems(config, stages, launch, Inputs(config.model))
    enforce(problems, told=not main)
    folder = Path(config.output)
    record = main and config.is_recipe
    with lock.holding(folder, record):
        if record:
            complete = {name: stage.model_dump(mode="json") for name, stage in stages.items()}
            with files.replacing(config.folder.config) as part:  # without the files that it uses
                part.write_text(to_yaml(config.model_copy(update={"stages": complete})))
        if main:
            files.remove_leftovers(folder)
        with recorded(folder, record):
            for number, (name, stage) in enumerate(stages.items(), 1):
                head = f"[{number}/{len(stages)}] {name} ({stage.stage})"
                _run_stage(stage, head, main, train)
                if record:
                    page.write(folder)
                state.wait_for_everyone()
    return folder


def _run_stage(stage: Any, head: str, main: bool, train: Callable[[Any], object]) -> None:
    """Run a stage unless it is finished. head: what names it in the output of the main process."""
    damage = damage_of(stage)
    if damage is None:
        if changed := _stale(stage):  # by an earlier stage that ran again
            raise ConfigError(changed)
        if main:
            print(f"{head}: finished before", flush=True)
        return
    if damage and main:
        log.warning("%s was finished, and %s. It is run again.", stage.output, damage)
    if main:
        print(f"{head} -> {stage.output}", flush=True)
    if stage.trains:
        train(stage)
    elif not stage.merges:
        evaluate(stage, told=True)
    elif main:
        print(f"  {run_merge(stage).summary}", flush=True)
    clear_device_cache(garbage_collection=True)  # the stage's models refer to one another
    if main:
        inputs = {source: file_digest(source) for source in stage.inputs.values()}
        folder = stage.folder
        vouched = [  # files that later stages and people read
            *folder.adapter.glob("*.safetensors"), *folder.adapter.glob("*.json"),
            folder.config, folder.log, folder.merge, folder.results, folder.table,
        ]  # fmt: skip
        paths = [path.relative_to(folder.path).as_posix() for path in vouched if path.exists()]
        about = {"inputs": inputs, "rewards": rewards_code(stage)}
        done = {"config": stage.model_dump(mode="json"), **about}
        manifest.write_manifest(folder.path, done, paths, file=folder.done.name)


def run_merge(stage: MergeStage) -> merging.MergeReport:
    """Merge into <output>/adapter, with its card; <output>/report.md says what was done."""
    folder = stage.folder
    with lock.holding(folder.path):
        shutil.rmtree(folder.adapter, ignore_errors=True)  # of a merge that was killed
        settings = stage.model_dump(exclude={"stage", "output", "model", "adapters"})
        report = merging.merge(stage.adapters, folder.adapter, model=stage.model.id, **settings)
        folder.merge.write_text(f"{report}\n")
        folder.config.write_text(to_yaml(stage))
        write_card(folder.path, stage)
    return report


# Planning --------------------------------------------------------------------------------------


def stages_and_problems(
    config: Any, home: Path, launch: Launch = HERE, inputs: Inputs | None = None
) -> tuple[dict[str, Stage], list[Problem]]:
    """The configs of all stages that can be read, by name, and the problems of all stages. A stage
    outside a recipe is named after its folder. inputs: keeps what is opened."""
    inputs = inputs or Inputs(config.model)
    stages, problems = read_stages(config, home)
    if config.is_recipe or config.merges:
        return stages, [*problems, *_problems(config, stages, launch, inputs)]
    problems = stage_problems(config, launch, inputs)
    if not config.trains and config.given and not refused(problems):
        model = config.model if config.adapters else None
        _, wrong = image_sets(config.benchmarks, "benchmarks", model, config.given, inputs)
        problems += wrong
    return stages, problems


def read_stages(config: Any, home: Path) -> tuple[dict[str, Stage], list[Problem]]:
    """The stages that can be read, and the problems of the others."""
    if not config.is_recipe:
        return {Path(config.output).name: config}, []
    stages: dict[str, Stage] = {}
    problems: list[Problem] = []
    adapters: dict[str, str] = {}  # of the earlier stages
    for name in config.stages:
        try:
            stages[name] = _read_stage(config, name, home, adapters)
        except ConfigError as error:
            problems += [replace(problem, stage=name) for problem in error.problems]
        adapters[name] = str(config.folder.stage(name).adapter)
    return stages, problems


def _read_stage(config: Any, name: str, home: Path, adapters: Mapping[str, str]) -> Stage:
    """The config of one stage, from the layers of flowalign.config.loading. adapters: {name:
    folder} of adapters that earlier stages write."""
    keys = dict(config.stages[name])
    use = keys.pop("use", None)
    changes = keys.pop("set", [])
    if use is not None and not isinstance(use, str):
        raise ConfigError([Problem("use", f"got {use!r}; want the name of a YAML file.")])
    if not isinstance(changes, list) or not all(isinstance(text, str) for text in changes):
        raise ConfigError(
            [Problem("set", f"got {changes!r}; want a list of texts, key.path=value.")]
        )
    if moved := [text for text in changes if text.partition("=")[0].strip() == "output"]:
        raise ConfigError(
            [Problem("set", f"{moved[0]!r}, but a stage writes below the recipe's output.")]
        )
    base = {} if use is None else read(home / os.path.expanduser(use))
    data = overlay(base if isinstance(base, Mapping) else {}, keys)
    kind = str(data.get("stage"))
    if kind == "recipe":
        raise ConfigError(
            [Problem("stage", "'recipe' inside a recipe. List its stages here instead.")]
        )
    data["model"] = config.model.model_dump(mode="json")  # all stages have one base
    data = varied(data, variant_keys(config.variant, kind), source="variant")
    data["output"] = str(config.folder.stage(name).path)
    stage = stage_class(kind) if kind in stage_names() else Stage
    if "seed" in stage.model_fields and "seed" not in keys:
        data["seed"] = config.seed
    data, problems = override(data, changes)
    if problems:
        raise ConfigError(problems)
    return parse(_resolve(data, adapters), source=name, stage=Stage)


def _resolve(value: Any, adapters: Mapping[str, str]) -> Any:
    """The value with every `stage:NAME` in it replaced by the adapter of that stage."""
    if isinstance(value, Mapping):
        return {key: _resolve(item, adapters) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, adapters) for item in value]
    if not isinstance(value, str) or not value.startswith(STAGE_REFERENCE):
        return value
    name = value.removeprefix(STAGE_REFERENCE)
    if name not in adapters:
        raise ConfigError(
            [Problem(value, f"no earlier stage has this name; there are {list(adapters)}.")]
        )
    return adapters[name]


def _problems(
    config: Any, stages: Mapping[str, Stage], launch: Launch, inputs: Inputs
) -> list[Problem]:
    """The problems of the stages that can be read."""
    problems: list[Problem] = []
    damages = {name: damage_of(stage) for name, stage in stages.items()}
    pending: dict[str, Stage | None] = {}  # of wrong stages, too, which are reported once
    names = list(config.stages if config.is_recipe else stages)
    for name in names:
        stage = stages.get(name)
        if stage:
            resume = None if damages[name] is None else True
            start = replace(launch, resume=resume, pending=pending)
            place = name if config.is_recipe else ""
            for problem in stage_problems(stage, start, inputs):
                problems.append(replace(problem, stage=place))
        pending[str(config.folder.stage(name).adapter)] = stage
    dtypes = {n: s.model.dtype for n, s in stages.items() if s.trains}
    if len({dtype == "float16" for dtype in dtypes.values()}) > 1:
        # accelerate scales the loss, as float16 needs, in all of a process or not at all
        problems.append(
            Problem(
                "stages",
                f"model.dtype is float16 in some ({dtypes}). Use it in all of them, or in none.",
            )
        )
    # Only a sound recipe is compared with what ran before.
    if len(stages) == len(names) and not refused(problems):
        again = [stage.output for name, stage in stages.items() if damages[name] is not None]
        for name, stage in stages.items():
            if damages[name] is None:
                problems += _stale(stage, again)
    return problems


def damage_of(stage: Stage) -> str | None:
    """None for a finished stage, "" for one that is not. Otherwise what is damaged, or which
    rewards have new code."""
    if not stage.folder.done.exists():
        return ""
    try:
        done = manifest.check_manifest(stage.output, file=stage.folder.done.name).about
    except Damaged as error:
        return str(error)
    return "; ".join(map(str, changed_rewards(stage, done))) or None


def _stale(stage: Stage, again: Collection[str] = ()) -> list[Problem]:
    """What differs in a finished stage from what the recipe asks for now. again: the folders of
    stages that run first; their contents are compared after that."""
    done = manifest.read_manifest(stage.output, file=stage.folder.done.name).about
    remedy = f"Delete {stage.output} to run it again, or choose another `output`."
    now = stage.model_dump(mode="json")
    then = done["config"]
    changed = sorted(key for key in now.keys() | then if now.get(key) != then.get(key))
    if changed:
        return [Problem(stage.output, f"finished with another {', '.join(changed)}. {remedy}")]
    for key, source in stage.inputs.items():
        if str(Path(source).parent) in again:
            continue
        if file_digest(source) != done["inputs"].get(source):
            return [Problem(stage.output, f"finished with another {key} ({source}). {remedy}")]
    return []
