"""How long a rank waits for the others before the run is taken for dead.

Ranks meet at the end of every rollout and of every set of images that is evaluated. In between each
has its own share of the calls of rewards, and a call that hangs costs `score_seconds` before its
images become invalid. A shorter timeout would end the run that this is meant to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowalign.config.schema import BenchmarkConfig, EvalStage, Stage, TrainingStage

# Seconds for all that has no limit of its own: one rank downloads, merges, writes a report or a
# checkpoint, or computes more slowly than another.
SLACK = 3600.0
# Seconds to sample one batch of an evaluation. One rank may have all its batches to sample while
# another, whose images lie on disk from before, has none.
SAMPLING = 600.0
FOREVER = 30 * 24 * 3600.0  # 30 days, if a reward has no time limit; a timedelta cannot be infinite


def group_timeout(config: Stage, processes: int) -> float:
    """Seconds that a rank waits for another: `timeout_seconds` of the config, or longer than all
    calls of a reward in turn may take."""
    given = None
    if isinstance(config, TrainingStage):
        given = config.train.timeout_seconds
    elif isinstance(config, EvalStage):
        given = config.timeout_seconds
    if given is not None:
        return given
    return min(SLACK + max(_waits(config, processes), default=0.0), FOREVER)


def _waits(config: Stage, processes: int) -> Iterator[float]:
    """The longest time between two meetings, of every kind."""

    def evaluation(benchmark: BenchmarkConfig, size: int, call: float) -> float:
        prompts = _count(benchmark.prompts)
        prompts = min(prompts, benchmark.limit or prompts)
        batches = _batches(prompts, max(1, size // benchmark.images), processes)
        # the judges of a set take turns at every batch; a set without judges is only sampled
        return batches * (SAMPLING + (len(benchmark.judges) * call if benchmark.judges else 0))

    if isinstance(config, EvalStage):
        call = config.score_seconds or math.inf
        for benchmark in config.benchmarks:
            yield evaluation(benchmark, config.sampling.batch_size, call)
    if not isinstance(config, TrainingStage):
        return
    call = config.train.score_seconds or math.inf
    if config.learns_from_rewards:
        images = math.ceil(config.rollout.images / processes)
        yield math.ceil(images / config.rollout.batch_size) * call
    if config.evaluation is None:
        return
    size = config.evaluation_sampling.batch_size
    for task in config.tasks:
        if task.validation and task.reward:
            prompts = min(config.evaluation.prompts, _count(task.validation))
            yield _batches(prompts, size, processes) * (SAMPLING + call)
            yield 2 * call  # both rows of before_after.png, which the main process scores alone
    for benchmark in config.watched:
        yield evaluation(benchmark, size, call)


def _batches(prompts: int, size: int, processes: int) -> int:
    """The most batches that a rank has."""
    return math.ceil(math.ceil(prompts / size) / processes)  # batches are dealt out in turn


def _count(source: str) -> int:
    """The prompts of a set; none of one that cannot be read, which is refused elsewhere."""
    from flowalign.training.data import PromptError, load_prompts

    try:
        return len(load_prompts(source, ""))
    except (PromptError, OSError):
        return 0
