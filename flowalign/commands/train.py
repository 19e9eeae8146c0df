"""Read a config, build the parts of a run, run it: `accelerate launch train.py` and the CLI."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.config import (
    AwmStage,
    ConfigError,
    GrpoStage,
    Job,
    MergeStage,
    NftStage,
    OpdStage,
    RecipeStage,
    SftStage,
    TeacherConfig,
    TrainingStage,
    load,
    to_yaml,
)
from flowalign.system import files
from flowalign.system.signals import Clock
from flowalign.training.preflight import (
    check_launch,
    check_world,
    group_problems,
    parts_problems,
    start,
)
from flowalign.training.run import lock
from flowalign.training.run.resume import anew

if TYPE_CHECKING:  # --help need not import diffusers
    import torch
    from accelerate import Accelerator

    from flowalign.backbone import Backbone
    from flowalign.eval.suite import Benchmark
    from flowalign.teachers.bank import Bank
    from flowalign.training.algorithm import Algorithm
    from flowalign.training.loop import Loop
    from flowalign.training.report.drift.monitor import Monitor
    from flowalign.training.report.progress import Progress
    from flowalign.types import EvalReport, Reward

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
    rewards.look_beside(args.config)
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
        if resume and processes.state(given).is_main_process and (text := anew(Path(given.output))):
            log.warning(text)
        clock = Clock(began, given.train.max_minutes)
        return train(given, resume=resume, any_world=any_world, clock=clock)
    from flowalign.commands import recipe, watch
    from flowalign.eval.run import evaluate

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
    from flowalign.training.run import processes, ranks
    from flowalign.training.run.determinism import deterministic

    world = processes.state(config).num_processes
    check_launch(world)
    check_world(config, world, resume=resume, any_world=any_world)
    folder, main = Path(config.output), processes.state().is_main_process
    if main and (begin := start(config.lora)):
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
        loop, report, rewards = wire(config, clock)
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
            finish(loop, config, rewards)
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


# The parts of a run ------------------------------------------------------------------------------


def wire(
    config: TrainingStage, clock: Clock | None = None
) -> tuple[Loop, Progress, dict[str, Reward]]:
    """Build every part of a run from its config -> the loop, its display, its rewards."""
    from accelerate.utils import set_seed

    from flowalign import rewards
    from flowalign.training.data import PromptSampler
    from flowalign.training.loop import Loop
    from flowalign.training.report import trackers
    from flowalign.training.report.progress import Progress
    from flowalign.training.run import processes

    accelerator = processes.start(config)
    set_seed(config.seed)  # for the LoRA's initial A; all else has generators of its own
    built = _rewards(config, accelerator.device)
    # a reward of the user's may say only now that it is groupwise
    whole = [name for name, reward in built.items() if getattr(reward, "groupwise", False)]
    problems = list(group_problems(config, whole, accelerator.num_processes))
    # nor do we know before which parts it sums
    single = [name for name, reward in built.items() if not rewards.weights_of(reward)]
    if problems := [*problems, *parts_problems(config, single)]:
        raise ConfigError(problems)
    backbone = student(config, accelerator.device)
    progress = Progress(config, accelerator.is_main_process)
    loop = Loop(
        config,
        backbone,
        accelerator,
        PromptSampler.of(config),
        algorithm(config, backbone, built, accelerator),
        evaluator(config, backbone, built, accelerator),
        progress.update,
        clock,
        monitor(config, backbone, built, accelerator),
    )
    trackers.begin(accelerator, config)
    for place, scale in config.mixtures.items() if accelerator.is_main_process else ():
        log.warning(
            "%s: labels at guidance %g for a student that is trained at %g: a mixture, which "
            "teaches the student that scale, too", place, scale, config.guidance
        )  # fmt: skip
    return loop, progress, built


def _rewards(config: TrainingStage, device: torch.device) -> dict[str, Reward]:
    """The reward of each task; ConfigError for those that cannot be built."""
    from flowalign import rewards

    built, problems = {}, []
    for index, task in enumerate(config.tasks):
        try:
            if task.reward:
                built[task.name] = rewards.build_on(device, task.reward.name, task.reward.options)
        except (ImportError, ValueError, OSError) as error:
            problems.append(f"tasks.{index}.reward: {error}")
    if problems:
        raise ConfigError(problems)
    return built


def student(config: TrainingStage, device: torch.device) -> Backbone:
    """The base model with the student's adapter on it, fresh or read from lora.init."""
    from flowalign.backbone import Backbone
    from flowalign.training.algorithm import STUDENT

    backbone, lora = Backbone.load(config.model, device), config.lora
    if lora.init:
        backbone.load_adapter(STUDENT, lora.init)
    else:
        backbone.add_adapter(STUDENT, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    if config.model.compile:
        backbone.compile()
    return backbone


def algorithm(
    config: TrainingStage,
    backbone: Backbone,
    rewards: Mapping[str, Reward],
    accelerator: Accelerator,
) -> Algorithm[Any]:
    """What the stage of a config learns, with the teachers that it names."""
    from flowalign.teachers.awm import Awm
    from flowalign.teachers.grpo import Grpo
    from flowalign.teachers.nft import Nft
    from flowalign.training.student.opd import Opd
    from flowalign.training.student.sft import Sft

    if isinstance(config, GrpoStage):
        return Grpo(config, backbone, accelerator, rewards)
    if isinstance(config, NftStage):
        return Nft(config, backbone, accelerator, rewards)
    if isinstance(config, AwmStage):
        return Awm(config, backbone, accelerator, rewards)
    if isinstance(config, SftStage):
        return Sft(config, backbone, bank(config, backbone, config.teachers, config.routing))
    assert isinstance(config, OpdStage)
    teachers = bank(config, backbone, config.teachers, config.routing)
    anchor = grpo = None
    if config.anchor:
        everywhere = dict.fromkeys(config.routing, "anchor")  # it labels every task
        anchor = bank(config, backbone, {"anchor": config.anchor}, everywhere)
    if config.learns_from_rewards:
        grpo = Grpo(config, backbone, accelerator, rewards)
    return Opd(config, backbone, accelerator, teachers, anchor, grpo)


def bank(
    config: OpdStage | SftStage,
    backbone: Backbone,
    teachers: Mapping[str, TeacherConfig],
    routing: Mapping[str, str],
) -> Bank:
    """Teachers on the student's base. Raises ConfigError if one does not fit it."""
    from flowalign.backbone import DTYPES
    from flowalign.teachers.bank import Bank, Member

    members = {name: Member(t.adapter, config.guidance_of(t)) for name, t in teachers.items()}
    labels = {}
    if isinstance(config, OpdStage):  # those of sft sample, and label nothing
        dtype = DTYPES[config.student.label_dtype]
        labels = {"dtype": dtype, "batch_size": config.student.label_batch}
    try:
        return Bank(backbone, members, routing, **labels)
    except ValueError as error:
        raise ConfigError([f"teachers: {error}"]) from error


# Evaluation and pictures -------------------------------------------------------------------------


def evaluator(
    config: TrainingStage,
    backbone: Backbone,
    rewards: Mapping[str, Reward],
    accelerator: Accelerator,
) -> Callable[[], tuple[float, EvalReport]] | None:
    """What the loop calls to score the current adapter on held-out prompts."""
    from flowalign.eval import suite
    from flowalign.training.report import samples

    if config.evaluation is None or not config.evaluates:
        return None
    benchmarks, settings = held_out(config, rewards), config.evaluation_sampling
    seconds, share = config.train.score_seconds, config.evaluation.max_invalid_share
    place, device = "evaluation.watch", accelerator.device
    watched = suite.build_sets(config.watched, place, device, config.model)
    sets = [*map(suite.ImageSet.of, benchmarks), *watched]

    def evaluate() -> tuple[float, EvalReport]:
        report = suite.run(
            backbone, sets, settings, accelerator,
            seconds=seconds, max_invalid_share=share, shown=samples.HELD_OUT,
        )  # fmt: skip
        return suite.headline(report, benchmarks), report

    return evaluate


def monitor(
    config: TrainingStage,
    backbone: Backbone,
    rewards: Mapping[str, Reward],
    accelerator: Accelerator,
) -> Monitor | None:
    """What the loop asks for the drift of its images; None without `alarm`."""
    from flowalign.training.report.drift.monitor import Lens, Monitor

    if config.alarm is None:
        return None
    sets = held_out(config, rewards) if config.evaluates else []
    lens, prompts = Lens.of(backbone, rewards), [benchmark.prompts for benchmark in sets]
    return Monitor(config, backbone, accelerator, lens, prompts)


def held_out(config: TrainingStage, rewards: Mapping[str, Reward]) -> list[Benchmark]:
    """The validation benchmarks of a config, at most evaluation.prompts a task."""
    from flowalign.eval.suite import Benchmark
    from flowalign.training.data import load_prompts, subset

    assert config.evaluation
    count, benchmarks = config.evaluation.prompts, []
    for task in config.tasks:
        if task.validation and task.reward:
            prompts = subset(load_prompts(task.validation, task.name), count)
            prompts = replace(prompts, bucket=config.model.bucket(task.size))
            benchmarks.append(Benchmark(task.name, prompts, rewards[task.name]))
    return benchmarks


def finish(loop: Loop, config: TrainingStage, rewards: Mapping[str, Reward]) -> None:
    """After the last update: a warning if it was in vain, the metrics plot, the model card and the
    before/after grid."""
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
        before_after(loop.backbone, config, held_out(config, rewards), path)
        if path:
            trackers.image(loop.accelerator, path.stem, path, loop.update)
