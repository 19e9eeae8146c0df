"""Can the rewards be built, and judge what they are given; is the user's own code there?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flowalign import rewards
from flowalign.backbone.tiny.scenes import rendered
from flowalign.checks.launch import Launch, message
from flowalign.checks.model import missing
from flowalign.checks.prompts import judged_prompts
from flowalign.config import Stage, TrainingStage
from flowalign.config.learning import ADVANTAGES
from flowalign.rewards import RewardSpec
from flowalign.system.images import IMAGE_SUFFIXES, image_files
from flowalign.training.algorithm import advantage_function, algorithm_class
from flowalign.training.inputs import Inputs
from flowalign.types import Problem


def scoring(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Rewards that cannot be built, or cannot judge the prompts, or do not fit the number of
    processes or the advantage; prompt sets that are not there."""
    groupwise = set[str]()
    weightless = set[str]()
    for judged in config.judged:
        sound = []
        for key, reward in judged.rewards.items():
            spec = RewardSpec(reward.name, reward.options)
            if not launch.trust and spec.own_code:
                continue
            where = f"{judged.place}.{key}"
            try:
                spec.check()
                packages = spec.missing_packages
            except (ValueError, KeyError, TypeError, ImportError) as error:
                yield Problem(where, message(error))
                continue
            for name in packages:
                yield missing(where, name)
            graded = judged.place.startswith("tasks.") and config.trains
            if graded and algorithm_class(config).needs_gradients:
                if not spec.differentiable:
                    have = ", ".join(n for n in rewards.REWARDS if RewardSpec(n).differentiable)
                    yield Problem(
                        where,
                        f"{reward.name!r} has no gradient, which {config.stage} learns from. Use "
                        f"one of {have}, or stage nft.",
                    )
            sound.append(reward)
            if spec.groupwise:
                groupwise.add(judged.name)
            if not spec.may_be_sum:
                weightless.add(judged.name)
        yield from judged_prompts(judged, sound, inputs)
    if config.trains:
        yield from fitting(config, groupwise, weightless, launch.processes)


def fitting(
    config: TrainingStage, groupwise: Set[str], weightless: Set[str], processes: int
) -> Iterator[Problem]:
    """Images of an optimizer step that the processes cannot share evenly; rewards without parts,
    where the advantage normalises parts. groupwise: the tasks whose reward compares all images of a
    prompt, which must be on one process; an algorithm may need this, too. weightless: the tasks
    whose reward sums no parts."""
    rollout = config.rollout
    updates = config.optimizer.updates_per_rollout
    prompts = rollout.prompts // updates  # of a step
    tasks = [task.name for task in config.tasks if task.name in groupwise]
    text = unit = ""
    if prompts * rollout.group_size % processes:
        text = f"{prompts * rollout.group_size} images an optimizer step"
        unit = processes // math.gcd(rollout.group_size, processes) * updates
    elif prompts % processes and (tasks or algorithm_class(config).needs_groups):
        who = f"task {min(tasks)!r}" if tasks else f"stage {config.stage!r}"
        text = f"{prompts} groups an optimizer step, which {who} needs complete"
        unit = processes * updates
    if unit:
        yield Problem(
            "rollout.prompts",
            f"{processes} processes cannot share evenly {text}. Use a multiple of {unit}: "
            f"rollout.prompts={-(-rollout.prompts // unit) * unit}.",
        )
    if not (config.credited and config.credited.advantage == "gdpo"):
        return
    for index, task in enumerate(config.tasks):
        if task.reward and task.name in weightless:
            yield Problem(
                f"tasks.{index}.reward",
                f"'gdpo' normalises parts of a reward, and {task.reward.name!r} is no weighted "
                "sum. Use 'weighted', or advantage 'group_std'.",
            )


def advantage(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """An advantage of the user's that cannot be imported, or gives none to two prompts' images."""
    if not config.credited or config.credited.advantage in ADVANTAGES or not launch.trust:
        return
    value = torch.tensor([0.0, 1.0, 0.5, 0.5])
    valid = torch.ones(4, dtype=torch.bool)
    try:
        function = advantage_function(config.credited.advantage)
        function(value, torch.tensor([0, 0, 1, 1]), valid=valid, task=torch.zeros(4))
    except Exception as error:  # whatever the user's code raises
        yield Problem(f"{config.stage}.advantage", message(error))


def fidelity(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Features that cannot be imported; a folder of reference images that holds none; prompts from
    outside the tiny world, if its scenes are the reference."""
    settings = getattr(config, "fidelity", None)
    if not settings:
        return
    key = "fidelity.reference"
    if launch.trust and ":" in settings.features:
        try:
            rewards.load(settings.features, "features")
        except (ValueError, ImportError) as error:
            yield Problem("fidelity.features", message(error))
    if settings.reference != "tiny":
        folder = Path(settings.reference)
        if not image_files(folder):
            inside = f"the folder holds no {', '.join(IMAGE_SUFFIXES)}"
            seen = inside if folder.is_dir() else "no such folder"
            yield Problem(key, f"{str(folder)!r}: {seen}. Name a folder of images, or 'tiny'.")
        return
    for benchmark in config.benchmarks:
        # another check reports these
        with suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
            rows = inputs.prompts(benchmark.prompts, benchmark.name).metadata
            try:
                rendered(rows[:: max(1, len(rows) // 16)], seed=0)
            except ValueError:
                yield Problem(
                    key,
                    f"'tiny' needs prompts of the tiny world, and {benchmark.prompts} has others. "
                    "Name a folder of images, or fidelity=null.",
                )


def unexamined(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """The user's code that is not trusted, and therefore not run."""
    if launch.trust:
        return
    for key, listed in own_code(config).items():
        yield Problem(
            "not examined",
            f"{key} names {', '.join(listed)}, which runs code. Read that code, then say --trust.",
            "note",
        )


def own_code(config: Stage) -> dict[str, list[str]]:
    """{key of the config: the dotted paths there}: modules whose code runs where the stage is
    checked or run. Nothing is imported here."""
    paths = {
        f"{judged.place}.{key}": RewardSpec(reward.name, reward.options).own_code
        for judged in config.judged
        for key, reward in judged.rewards.items()
    }
    fidelity = getattr(config, "fidelity", None)
    if fidelity and ":" in fidelity.features:
        paths["fidelity.features"] = [fidelity.features]
    if config.credited and ":" in config.credited.advantage:
        paths[f"{config.stage}.advantage"] = [config.credited.advantage]
    return {key: listed for key, listed in paths.items() if listed}
