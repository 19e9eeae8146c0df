"""What is wrong with a config, found before any model is loaded: one list of `Problem`.

A check is a generator of problems, asked (config, launch, inputs). `train`, `eval` and a recipe
refuse a stage with a problem of level "refuse", and log the others; the doctor shows all of them.
What a check opens stays in the `Inputs`, so that no file is read twice.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from flowalign.checks import adapters, folder, model, numbers, prompts, rewards
from flowalign.checks.launch import Launch, LaunchCheck
from flowalign.config import ConfigError, Stage
from flowalign.training.inputs import Inputs
from flowalign.types import Problem

CHECKS: tuple[LaunchCheck, ...] = (
    model.installation,
    adapters.readable,
    model.settings,
    rewards.scoring,
    rewards.advantage,
    rewards.fidelity,
    rewards.unexamined,
    model.bases,
    model.training,
    prompts.rows,
    folder.earlier_run,
    folder.writable,
    adapters.misused,
    numbers.card,
)
ADVICE: tuple[LaunchCheck, ...] = (  # of a training stage that can start, for the doctor
    numbers.scales,
    numbers.noise,
    numbers.volume,
    numbers.slow_average,
    prompts.overlap,
    prompts.shared,
    prompts.few,
    prompts.lengths,
    adapters.trained,
)

log = logging.getLogger("flowalign")


def stage_problems(config: Stage, launch: Launch, inputs: Inputs | None = None) -> list[Problem]:
    """The problems of a stage that is started in this way. inputs: keeps what is opened."""
    inputs = inputs or Inputs(config.model)
    problems = [problem for check in CHECKS for problem in check(config, launch, inputs)]
    if launch.advise and config.trains and not refused(problems):
        problems += [problem for check in ADVICE for problem in check(config, launch, inputs)]
    return problems


def check_stage(config: Stage, launch: Launch, told: bool = True) -> Inputs:
    """Enforce the problems of a stage; returns what was opened for them. told: as for `enforce`."""
    inputs = Inputs(config.model)
    enforce(stage_problems(config, launch, inputs), told)
    return inputs


def enforce(problems: Sequence[Problem], told: bool = True) -> None:
    """Raise ConfigError with the problems that refuse. The others become warnings in the log; told:
    they were logged before, or another process logs them."""
    if hard := refused(problems):
        raise ConfigError(once(hard))
    if not told:
        for problem in problems:
            log.warning("%s", problem)


def refused(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.level == "refuse"]


def once(problems: Iterable[Problem]) -> list[Problem]:
    """Merge problems with the same text and level into one, at the key of the first."""
    places = defaultdict[tuple[str, str], list[str]](list)
    for problem in problems:
        places[problem.text, problem.level].append(problem.place)
    merged = []
    for (text, level), (first, *others) in places.items():
        more = f" and {len(others)} more" if others else ""
        merged.append(Problem(f"{first}{more}", text, level))
    return merged
