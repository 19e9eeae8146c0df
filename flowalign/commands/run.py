"""Run what a config says: a training stage, a merge or a recipe, from its files to its report."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowalign import rewards
from flowalign.backbone import ModelError
from flowalign.backbone.adapters import span
from flowalign.checks import Launch, check_stage
from flowalign.commands import recipe
from flowalign.commands.build import wire
from flowalign.commands.card import write_card
from flowalign.config import ConfigError, Job, TrainingStage, to_yaml
from flowalign.eval.suite import EvaluationError
from flowalign.report import page, summary
from flowalign.report.progress import OnMetrics, quiet
from flowalign.system import files
from flowalign.system.signals import Clock
from flowalign.training.algorithm import TrainingError
from flowalign.training.run import lock, processes
from flowalign.training.run.resume import checkpoints

log = logging.getLogger("flowalign")


def main(config: Job, args: argparse.Namespace, began: float) -> int:
    """Run `flowalign train` after its parser (`train.parser`, which gives `args`); returns the exit
    status."""
    quiet()
    rewards.add_config_folder(args.config)
    with processes.ExitStatus(
        refused=(ConfigError, ModelError),
        stopped=(TrainingError, EvaluationError),
        interrupted="--resume continues from the last checkpoint, if there is one",
    ) as status:
        home = Path(args.config).parent
        run_job(config, home, args.resume, began, args.allow_world_change)
        if processes.state().is_main_process:
            print(summary.stage_summary(config), flush=True)
    return status.code


def run_job(
    job: Job, home: Path, resume: bool, began: float | None = None, any_world: bool = False,
    on_update: OnMetrics | None = None,
) -> Path:  # fmt: skip
    """Run anything that `flowalign train` can run. home: the folder of the config file. resume,
    any_world: `--resume` and `--allow-world-change`; a recipe always resumes. began: as in a Clock;
    None = now. on_update: as for `train`."""
    began = time.monotonic() if began is None else began
    config: Any = job

    def train_stage(stage: TrainingStage, resume: bool = True, told: bool = True) -> Path:
        clock = Clock(began, stage.train.max_minutes)
        if config.is_recipe and config.max_minutes:
            clock = Clock(began, config.max_minutes, "max_minutes")
        return train(
            stage, resume=resume, any_world=any_world, clock=clock, on_update=on_update, told=told
        )

    if not config.trains:
        return recipe.run_recipe(config, home, train_stage, any_world=any_world)
    if resume and not checkpoints(Path(config.output)):
        text = "--resume: no checkpoint in %s: from the first update"
        log.warning(text, config.folder.checkpoints)
    return train_stage(config, resume, told=False)


def train(
    config: TrainingStage,
    *,
    resume: bool = False,
    any_world: bool = False,
    clock: Clock | None = None,
    on_update: OnMetrics | None = None,
    told: bool = False,
) -> Path:
    """Train one stage to its end; returns the folder of the resulting adapter. resume: go on from
    the newest sound checkpoint; any_world: another number of processes may have written it.

    clock: how long it may take; None = train.max_minutes from the first update on. on_update: is
    called with each row of metrics. told: whether the notes of the checks were logged, as those of
    a recipe's stages are at its start. Raises ConfigError before any model is loaded, TrainingError
    if the run has to stop, Interrupted if it is asked to.
    """
    state = processes.state(config)
    main = state.is_main_process
    launch = Launch(state.num_processes, resume, any_world)
    inputs = check_stage(config, launch, told or not main)
    folder = Path(config.output)
    if main and config.lora.init:
        adapter = inputs.adapter(config.lora.init)
        text = "the student starts from %s: its rank (%s), scale and layers, not those of `lora`"
        log.info(text, config.lora.init, span(adapter.ranks))
    unscored = [task.name for task in config.tasks if not task.evaluated]
    if main and config.evaluation and unscored and not config.unrewarded:
        last = "" if config.evaluates else "; the adapter of the last update is kept"
        log.info("not evaluated, without `validation` and `reward`: %s%s", unscored, last)
    with lock.holding(folder, main), deterministic(config.train.deterministic):
        loop, report = wire(config, clock, inputs)
        report.on_update = on_update
        if main:
            files.remove_leftovers(folder)
        if not (resume and loop.resume()):
            loop.begin()
        if main:
            with files.replacing(config.folder.config, durable=True) as part:
                part.write_text(to_yaml(config))
        loop.accelerator.wait_for_everyone()
        with report.live(loop.update):
            loop.run()
            if main:
                if warning := summary.untrained(config):
                    log.warning("%s", warning)
                write_card(folder, config)
                page.write(folder, config)
        processes.finish(loop.accelerator)
    return config.folder.adapter


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """If `on`, torch gives the same bits in every run inside the `with`, or raises. On a CPU every
    run repeats; on a GPU some backward passes sum in whatever order their threads finish."""
    if not on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as torch asks; cuBLAS reads it
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False  # benchmark picks kernels by their speed
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        cudnn.deterministic, cudnn.benchmark = before
