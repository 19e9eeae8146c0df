"""How long a process may wait for the others before the run is taken for dead.

Processes meet at the end of every rollout and of every set of images that is evaluated. On the way
each has its own share of the rewards' calls, and a call that hangs costs `score_seconds` before it
is masked. A group that gives up sooner ends the run that masking was to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowalign.config.schema import (
    BenchmarkConfig,
    EvalStage,
    GrpoStage,
    OpdStage,
    Stage,
    TrainingStage,
)

SLACK = 3600.0
"""Seconds for all that has no limit of its own: one process downloads, merges, writes a report or a
checkpoint, or computes more slowly than another."""
SAMPLING = 600.0
"""Seconds to sample one batch of an evaluation. A process may have all its batches to sample while
another, whose images lie on disk from before, has none."""
FOREVER = 30 * 24 * 3600.0
"""Where a reward may take as long as it likes."""


def patience(config: Stage, processes: int) -> float:
    """Seconds that a process waits for another: `timeout_seconds` of the config, or longer than
    every call of a reward in turn may take."""
    told = config.train.timeout_seconds if isinstance(config, TrainingStage) else None
    if isinstance(config, EvalStage):
        told = config.timeout_seconds
    if told is not None:
        return told
    waits = [SLACK + wait for wait in _waits(config, processes)]
    return min(max(waits, default=SLACK), FOREVER)


def _waits(config: Stage, processes: int) -> Iterator[float]:
    """The longest time between two meetings, of every kind."""
    if isinstance(config, EvalStage):
        for mark in config.benchmarks:
            yield _evaluation(mark, config.sampling.batch_size, config.score_seconds, processes)
    if not isinstance(config, TrainingStage):
        return
    each = _seconds(config.train.score_seconds)
    scored = isinstance(config, OpdStage) and config.student.reward_weight > 0
    if scored or isinstance(config, GrpoStage):
        images = math.ceil(config.rollout.prompts * config.rollout.copies / processes)
        yield math.ceil(images / config.rollout.batch_size) * each
    if config.evaluation is None:
        return
    size = config.evaluation.batch_size or config.rollout.batch_size
    for task in config.tasks:
        if task.validation and task.reward:
            prompts = min(config.evaluation.prompts, _count(task.validation))
            yield _share(prompts, size, processes) * (SAMPLING + each)
            yield 2 * each  # the first and the last grid, which the main process scores alone
    for mark in config.evaluation.watch:
        yield _evaluation(mark, size, config.train.score_seconds, processes)


def _evaluation(mark: BenchmarkConfig, size: int, seconds: float | None, processes: int) -> float:
    """One set of images: its judges take turns at every batch."""
    prompts = _count(mark.prompts)
    batches = _share(min(prompts, mark.limit or prompts), max(1, size // mark.images), processes)
    return batches * (SAMPLING + (len(mark.judges) * _seconds(seconds) if mark.judges else 0))


def _share(prompts: int, size: int, processes: int) -> int:
    """The most batches that a process has."""
    return math.ceil(math.ceil(prompts / size) / processes)


def _seconds(limit: float | None) -> float:
    return math.inf if limit is None else limit


def _count(source: str) -> int:
    """The prompts of a set; none of one that cannot be read, which is refused elsewhere."""
    from flowalign.data import PromptError, load_prompts

    try:
        return len(load_prompts(source, ""))
    except (PromptError, OSError):
        return 0
