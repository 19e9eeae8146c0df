"""Are the prompt sets here, can they be judged and learnt from, and does the model see them?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any

from flowalign.backbone.structure import cut_prompts, known
from flowalign.checks.launch import Launch, message
from flowalign.config import Judged
from flowalign.config.learning import RewardConfig
from flowalign.rewards import RewardSpec
from flowalign.training.algorithm import algorithm_class
from flowalign.training.data import PromptError, subset
from flowalign.training.inputs import Inputs
from flowalign.types import Problem

BAD_ROWS = 5  # of a prompt set that are named, at most
FEW_HELD_OUT = 16
SAMPLED_PROMPTS = 500  # prompts of a set, about, whose length is checked


def judged_prompts(
    judged: Judged, judges: Iterable[RewardConfig], inputs: Inputs, without: Collection[str] = ()
) -> Iterator[Problem]:
    """Prompt sets that cannot be read, or that one of the rewards cannot judge. without: sets that
    are skipped."""
    for key, source in judged.prompts.items():
        if source.partition("#")[0] in without:
            continue
        try:
            batch = inputs.prompts(source, judged.name)
            for reward in judges:
                spec = RewardSpec(reward.name, reward.options)
                spec.check_prompts(batch.prompts, batch.metadata)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            where = "" if isinstance(error, PromptError | OSError) else f"{source}, "
            yield Problem(f"{judged.place}.{key}", f"{where}{message(error)}")


def rows(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Rows that the algorithm cannot learn from."""
    if not config.trains:
        return
    for index, task in enumerate(config.tasks):
        with suppress(PromptError, OSError):  # reported before
            key = f"tasks.{index}.prompts"
            prompts = inputs.prompts(task.prompts, task.name)
            texts = list(algorithm_class(config).row_problems(config, task.prompts, prompts))
            for text in texts[:BAD_ROWS]:
                yield Problem(key, text)
            if len(texts) > BAD_ROWS:
                yield Problem(key, f"{len(texts)} problems; {BAD_ROWS} are named.")


def overlap(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Validation prompts that a task trains on."""
    trained = {p for t in config.tasks for p in inputs.prompts(t.prompts, t.name).prompts}
    for task in config.tasks:
        if not (config.evaluation and task.validation):
            continue
        validation = inputs.prompts(task.validation, task.name)
        prompts = subset(validation, config.evaluation.prompts).prompts
        if shared := [prompt for prompt in prompts if prompt in trained]:
            yield Problem(
                "validation",
                f"{len(shared)} of {len(prompts)} prompts of {task.validation} (task "
                f"{task.name!r}) are trained on, such as {shared[0]!r}. Remove them from one set.",
                "fault" if len(shared) > len(prompts) / 4 else "note",
            )


def shared(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Prompts that two tasks have with different teachers: the student learns the mean of both."""
    routed = [task for task in config.tasks if task.name in config.routing]
    prompts = {task.name: {*inputs.prompts(task.prompts, task.name).prompts} for task in routed}
    for one, other in combinations(routed, 2):
        common = prompts[one.name] & prompts[other.name]
        if not common or config.routing[one.name] == config.routing[other.name]:
            continue
        fewer = min(len(prompts[one.name]), len(prompts[other.name]))
        yield Problem(
            "prompts",
            f"tasks {one.name!r} and {other.name!r} share {len(common)} prompts, such as "
            f"{min(common)!r}, but have different teachers, whose mean the student learns there. "
            "Give each task its own prompts: those of a style LoRA have its trigger words.",
            "fault" if len(common) > fewer / 4 and not (one.reward and other.reward) else "note",
        )


def few(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Validation sets so small that chance chooses the adapter, and the end by patience."""
    for task in config.tasks:
        if not (config.evaluation and task.validation):
            continue
        count = len(inputs.prompts(task.validation, task.name))
        if count < FEW_HELD_OUT:
            text = f"{count} prompts in {task.validation} (task {task.name!r}). On so few, chance"
            text += f" says which adapter is kept, and when patience ends. Use {FEW_HELD_OUT}"
            yield Problem("validation", f"{text} or more.", "note")


def lengths(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Prompts that the text encoder cuts. Prompts of which nothing is left are refused."""
    spec = known(config.model)
    if spec is None:
        return
    for task in config.tasks:
        prompts = inputs.prompts(task.prompts, task.name).prompts
        # of all parts: many sets are sorted
        prompts = prompts[:: max(1, len(prompts) // SAMPLED_PROMPTS)]
        cut = cut_prompts(config.model, prompts)
        about = ""
        if cut is None:  # without its tokenizer: about 4 tokens for 3 words
            cut = [p for p in prompts if len(p.split()) * 4 // 3 + 1 > spec.length]
            about = "about "
        if cut:
            share = len(cut) / len(prompts)
            yield Problem(
                "length",
                f"{about}{share:.0%} of the prompts of task {task.name!r} have more than "
                f"model.max_sequence_length = {spec.length} tokens and are cut, such as "
                f"{cut[0][:60]!r}. Raise it (up to {spec.family.longest}).",
                "fault" if share > 0.05 else "note",
            )
