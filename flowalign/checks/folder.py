"""Checks of the output folder: does it hold another run, and can it be written?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowalign.backbone.adapters import file_digest
from flowalign.checks.launch import Launch
from flowalign.config import ConfigError, TrainingStage, load
from flowalign.system.files import read_lines
from flowalign.system.folder import RunFolder
from flowalign.training import metrics
from flowalign.training.inputs import Inputs
from flowalign.training.run import lock
from flowalign.training.run.resume import (
    DELETE,
    changed_keys,
    changed_rewards,
    checkpoints,
    newest,
)
from flowalign.types import Problem


def earlier_run(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Contents of the output folder that conflict with this run."""
    if not config.trains or launch.resume is None:
        return
    run = Path(config.output)
    if checkpoints(run) and not launch.resume:
        yield Problem(
            "output",
            f"{run} holds the checkpoints of a run. Continue it with --resume, choose another "
            "`output`, or delete the folder.",
        )
        return
    try:
        saved = newest(run, config)
    except ConfigError as error:
        yield from error.problems
        return
    if saved is None:
        yield from unfinished(run, config)
        return
    for key, source in config.inputs.items():
        # None: another check reports it
        now = None if source in launch.pending else file_digest(source)
        if now is not None and now != saved.about["inputs"].get(key):
            yield Problem(
                key,
                f"{source!r} has changed since {saved.folder} was written. Put the adapter of that "
                "time back, or choose another `output` to start with this one.",
            )
    if not config.train.allow_changed_rewards:
        for problem in changed_rewards(config, saved.about):
            yield Problem(
                problem.key,
                f"{problem.text} since {saved.folder} was written. Put it back, choose another "
                "`output`, or, if its scores are the same, go on with "
                "train.allow_changed_rewards=true.",
            )
    before = saved.about["processes"]
    if not launch.any_world and before != launch.processes:
        yield Problem(
            "--resume",
            f"{saved.folder} was written by {before} process(es), and there are "
            f"{launch.processes} now: prompts and noise stay the same, but gradients are summed in "
            "another order, so that the last digits differ, and rewards that draw random numbers "
            "draw others. Start as many as before, or accept that with --allow-world-change.",
        )


def unfinished(run: Path, config: TrainingStage) -> Iterator[Problem]:
    """A log or an adapter in a folder without checkpoints, unless a run of this config wrote it and
    ended before its first checkpoint."""
    folder = RunFolder(run)
    numbers = (row.get(metrics.UPDATE) for row in read_lines(folder.log))
    updates = [number for number in numbers if isinstance(number, int)]
    if not updates and not folder.adapter.exists():
        return
    try:
        old = load(folder.config)
        # a run writes its card at its end
        early = max(updates) <= old.train.checkpoint_every and not folder.card.exists()
        ours = not changed_keys(config, old.model_dump(mode="json"))
    except (ConfigError, OSError, ValueError, AttributeError):
        early = ours = False
    if not (early and ours):
        yield Problem(
            "output",
            f"{run} holds the log or adapter of another run, or of one whose checkpoints are gone. "
            f"{DELETE}",
        )


def writable(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """A folder of another user, or one that is read-only."""
    if launch.resume is not None and (path := lock.unwritable(config.output)):
        yield Problem("output", f"{path} cannot be written by this user. Choose another `output`.")
