"""Read a config, build the parts of a run, run it: `accelerate launch train.py` and the CLI."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.config import (
    ConfigError,
    Job,
    MergeStage,
    RecipeStage,
    TrainingStage,
    load,
    to_yaml,
)
from flowalign.system import files
from flowalign.system.signals import Clock
from flowalign.training.preflight import Inputs, check_launch, check_world, start
from flowalign.training.run import lock
from flowalign.training.run.resume import why_no_checkpoint

if TYPE_CHECKING:  # --help need not import diffusers
    from accelerate import Accelerator

    from flowalign.training.loop import Loop
    from flowalign.types import Reward

log = logging.getLogger("flowalign")


def parser() -> argparse.ArgumentParser:
    """The command line of `train`."""
    parser = argparse.ArgumentParser("flowalign train", description="Train from a config file.")
    parser.add_argument("--config", required=True, help="a YAML file, such as configs/tiny/...")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    help = "resume with another number of processes, though the last digits then differ"
    parser.add_argument("--allow-world-change", action="store_true", help=help)
    parser.add_argument("--dry-run", action="store_true", help="print the plan; write nothing")
    help = "dry run: also import the code that the config names, to check it"
    parser.add_argument("--trust", action="store_true", help=help)
    parser.add_argument("--variant", help="a YAML file of keys by stage: other hardware")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the run had to stop, 2 the config is refused; interrupted, 130 by
    Ctrl-C, 143 by SIGTERM, and 75 by SIGUSR1 or the clock."""
    began = time.monotonic()
    args = parser().parse_args(argv)
    try:
        config = load(args.config, args.overrides, stage=Job, variant=args.variant)
        if not args.dry_run and int(os.environ.get("RANK") or 0) == 0:
            lock.check_free(config.output)
    except ConfigError as error:  # before the libraries are imported, which takes many seconds
        print(error, file=sys.stderr)
        return 2
    from flowalign.training.report.progress import quiet

    quiet()  # before diffusers is imported, which logs while it is
    from flowalign import rewards
    from flowalign.backbone import ModelError
    from flowalign.eval.suite import EvaluationError
    from flowalign.training.algorithm import TrainingError
    from flowalign.training.report import results
    from flowalign.training.run import processes

    status = processes.ExitStatus(
        refused=(ConfigError, ModelError),
        stopped=(TrainingError, EvaluationError),
        interrupted="--resume continues from the last checkpoint, if there is one",
    )
    rewards.add_config_folder(args.config)
    with status:
        if args.dry_run:
            from flowalign.commands.doctor import dry

            home, any_world = Path(args.config).parent, args.allow_world_change
            dry.run(config, home, args.resume, any_world, args.trust)
        else:
            run(config, Path(args.config).parent, args.resume, began, args.allow_world_change)
            if processes.state().is_main_process:
                print(results.summary(config), flush=True)
    return status.code


def run(
    given: Job,
    home: Path,
    resume: bool,
    began: float | None = None,
    any_world: bool = False,
) -> Path:
    """Whatever `flowalign train` can run. home: the folder of the config file. resume, any_world:
    `--resume` and `--allow-world-change`; a recipe always resumes. began: as a Clock has it; None =
    now."""
    from flowalign.training.run import processes

    began = time.monotonic() if began is None else began
    if isinstance(given, TrainingStage):
        processes.state(given)
        resume = resume or processes.restarted(Path(given.output))
        text = why_no_checkpoint(Path(given.output)) if resume else ""
        if text and processes.state(given).is_main_process:
            log.warning(text)
        clock = Clock(began, given.train.max_minutes)
        return train(given, resume=resume, any_world=any_world, clock=clock)
    from flowalign.commands import recipe, watch
    from flowalign.eval.evaluation import evaluate

    config = given
    if isinstance(config, MergeStage):
        config = recipe.alone(config)
    assert isinstance(config, RecipeStage)
    whole = isinstance(given, RecipeStage)
    limit, name = config.max_minutes, "max_minutes"

    def train_stage(stage: TrainingStage) -> Path:
        own = Clock(began, stage.train.max_minutes)
        clock = Clock(began, limit, name) if limit else own
        return train(stage, resume=True, any_world=any_world, clock=clock)

    folder = recipe.run(config, home, train_stage, evaluate, record=whole, any_world=any_world)
    if whole and processes.state().is_main_process:
        watch.write(folder)  # the recipe's report
    return folder


def train(
    config: TrainingStage,
    *,
    resume: bool = False,
    any_world: bool = False,
    clock: Clock | None = None,
) -> Path:
    """Train one stage to its end; returns the folder of the resulting adapter. resume: go on from
    the newest sound checkpoint; any_world: which another number of processes may have written.

    clock: how long it may take; None = train.max_minutes from the first update on. Raises
    ConfigError before any model is loaded, TrainingError if the run has to stop, Interrupted if it
    is asked to.
    """
    from flowalign.commands import watch
    from flowalign.commands.build import wire
    from flowalign.training.run import processes, ranks
    from flowalign.training.run.determinism import deterministic

    world = processes.state(config).num_processes
    check_launch(world)
    inputs = check_world(config, world, resume=resume, any_world=any_world)
    folder, main = Path(config.output), processes.state().is_main_process
    if main and (begin := start(config.lora, inputs)):
        log.info(begin.text)
        for text in begin.ignored:
            log.warning("%s. Leave it out, or start without lora.init.", text)
    unscored = [task.name for task in config.tasks if not task.evaluated]
    if main and config.evaluation and unscored:
        last = "" if config.evaluates else "; the adapter of the last update is kept"
        log.info("not evaluated, without `validation` and `reward`: %s%s", unscored, last)
    rank = ranks.watch()
    rank.at("loading the models")
    with lock.holding(folder, main), deterministic(config.train.deterministic):
        loop, report, rewards = wire(config, clock, inputs)
        if main:
            files.remove_leftovers(folder)
        if not (resume and loop.resume(any_world=any_world)):
            loop.begin()
        if main:
            with files.replacing(folder / "config.yaml", durable=True) as part:
                part.write_text(to_yaml(config))
        loop.accelerator.wait_for_everyone()
        _hint_threads(loop.accelerator)
        with report.live(loop.update), rank.explained():
            loop.run()
            rank.at("pictures and model card")
            finish(loop, config, rewards, inputs)
        if main:
            watch.write(folder)  # the run's report
        processes.finish(loop.accelerator)
    return folder / "adapter"


def _hint_threads(accelerator: Accelerator) -> None:
    """Say so if a run on CPUs leaves some idle: accelerate gives a process one thread."""
    import torch

    used, cores = torch.get_num_threads() * accelerator.num_processes, os.cpu_count() or 1
    if accelerator.device.type == "cpu" and used < cores:
        accelerator.print(
            f"using {used} of {cores} CPU cores; "
            f"accelerate launch --num_cpu_threads_per_process {cores} uses all, as does "
            "flowalign train without OMP_NUM_THREADS"
        )


def finish(
    loop: Loop, config: TrainingStage, rewards: Mapping[str, Reward], inputs: Inputs
) -> None:
    """After the last update: a warning if it was in vain, the metrics plot, the model card and the
    before/after grid."""
    from flowalign.commands.build import held_out
    from flowalign.commands.card import write_card
    from flowalign.eval.before_after import before_after
    from flowalign.training.report import results, trackers
    from flowalign.training.report.pictures import metrics_plot

    folder, main = Path(config.output), loop.accelerator.is_main_process
    if main:
        if warning := results.untrained(config):
            log.warning(warning)
        metrics_plot(folder / "metrics.jsonl", folder / "metrics.png", title=folder.name)
        write_card(folder, config, sys.argv)
    if config.evaluates and (main or loop.backbone.sharded):  # sharded: all must sample
        path = folder / "before_after.png" if main else None
        before_after(loop.backbone, config, held_out(config, rewards, inputs), path)
        if path:
            trackers.image(loop.accelerator, path.stem, path, loop.update)
