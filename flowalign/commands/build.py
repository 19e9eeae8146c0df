"""Build the parts of a run from its config, from the rewards to the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from flowalign.backbone import DTYPES, Backbone
from flowalign.backbone.compilation import compile_blocks
from flowalign.checks import enforce
from flowalign.checks.rewards import fitting
from flowalign.config import ConfigError, StudentConfig, TrainingStage
from flowalign.eval import suite
from flowalign.eval.stats import headline_row
from flowalign.eval.suite import Benchmark
from flowalign.report.alarm import Alarm
from flowalign.report.drift.monitor import Monitor
from flowalign.report.log import RunLog
from flowalign.report.page import Page
from flowalign.report.pictures import png
from flowalign.report.progress import Progress
from flowalign.report.samples import HELD_OUT, Samples
from flowalign.report.watched import WatchedJudges
from flowalign.rewards import RewardBase, RewardSpec
from flowalign.system.devices import resolve
from flowalign.system.signals import Clock
from flowalign.teachers.bank import Bank, Member
from flowalign.teachers.distinct import base_states, indistinct
from flowalign.training.algorithm import STUDENT, Parts, algorithm_class
from flowalign.training.data import PromptSampler, spread, subset
from flowalign.training.evaluations import Evaluate
from flowalign.training.events import Listener
from flowalign.training.inputs import Inputs
from flowalign.training.loop import Loop
from flowalign.training.rollout import generate
from flowalign.training.run import processes
from flowalign.types import EvalReport, EvalRow, Example, Problem, Watched

# The parts of a run ------------------------------------------------------------------------------


def wire(
    config: TrainingStage, clock: Clock | None = None, inputs: Inputs | None = None
) -> tuple[Loop, Progress]:
    """Build every part of a run from its config -> the loop, its display. inputs: what the checks
    have opened; None = nothing yet."""
    inputs = inputs or Inputs(config.model)
    accelerator = processes.start(config)
    set_seed(config.seed)  # for the LoRA's initial A; everything else has its generators
    built = build_rewards(config, accelerator.device)
    # a reward of the user's may say only now that it is groupwise, and which parts it sums
    groupwise = {name for name, reward in built.items() if reward.groupwise}
    weightless = {name for name, reward in built.items() if not reward.weights}
    if problems := list(fitting(config, groupwise, weightless, accelerator.num_processes)):
        raise ConfigError(problems)
    set_seed(config.seed)  # again: what built a reward may have drawn or seeded
    backbone = student(config, accelerator.device, inputs)
    main = accelerator.is_main_process
    compile_blocks(backbone, config.model, config.images, main=main)
    progress = Progress(config, main)
    sets = {task.name: inputs.prompts(task.prompts, task.name) for task in config.tasks}
    held_out = {
        task.name: inputs.prompts(task.validation or task.prompts, task.name)
        for task in config.tasks
    }
    labelled = banks(config, backbone, inputs)
    if teachers := labelled[0]:
        states = base_states(config, backbone, sets)
        enforce([*indistinct(teachers, states, config.optimizer.micro_batch)], told=not main)
    parts = Parts(config, backbone, accelerator, built, *labelled, sets, held_out)
    loop = Loop(
        config,
        backbone,
        accelerator,
        PromptSampler.of(config, inputs.prompts),
        algorithm_class(config)(parts),
        evaluator(parts, inputs),
        listeners(config, backbone, accelerator, progress, inputs),
        clock,
    )
    return loop, progress


def listeners(
    config: TrainingStage,
    backbone: Backbone,
    accelerator: Accelerator,
    progress: Progress,
    inputs: Inputs,
) -> list[Listener]:
    """The listeners of a run, in order. The log follows the alarm, because it writes its figures;
    the page comes last, because it shows the log."""
    alarm = Alarm({task.name: task.reward.name for task in config.tasks if task.reward})
    heard_by: list[Listener] = [Samples(config, accelerator), alarm]
    if config.alarm:
        heard_by.append(monitor(config, backbone, alarm, inputs))
    heard_by.append(WatchedJudges(config))
    return [*heard_by, RunLog(config, accelerator, progress), Page(config)]


def monitor(config: TrainingStage, backbone: Backbone, alarm: Alarm, inputs: Inputs) -> Monitor:
    assert config.alarm
    start = None
    if config.alarm.reference == "start" and config.lora.init:
        start = inputs.adapter(config.lora.init)
    return Monitor(config, backbone, alarm, start)


def build_rewards(config: TrainingStage, device: torch.device) -> dict[str, RewardBase]:
    """Build the reward of each task. Raises ConfigError for those that cannot be built."""
    built = {}
    problems = []
    for index, task in enumerate(config.tasks):
        if not task.reward:
            continue
        try:
            built[task.name] = RewardSpec(task.reward.name, task.reward.options).build(device)
        except (ImportError, ValueError, OSError) as error:
            problems.append(Problem(f"tasks.{index}.reward", str(error)))
    if problems:
        raise ConfigError(problems)
    return built


def student(config: TrainingStage, device: torch.device, inputs: Inputs) -> Backbone:
    backbone = Backbone.load(config.model, device)
    lora = config.lora
    if lora.init:
        backbone.load_adapter(STUDENT, inputs.adapter(lora.init))
    else:
        backbone.add_adapter(STUDENT, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    return backbone


def banks(
    config: TrainingStage, backbone: Backbone, inputs: Inputs
) -> tuple[Bank | None, Bank | None]:
    """The teachers of a stage, and its anchor; None where it has none. They are on the student's
    base or on their own. Raises ConfigError if one does not fit its base."""
    loaded: dict[str, Backbone] = {}  # by their settings: several teachers have one base
    bases: dict[str, Backbone] = {}
    for key, model in config.bases.items():
        device = config.labellers[key].device
        if (settings := f"{device} {model}") not in loaded:
            where = backbone.device
            if device and where.type != "meta":
                where = resolve(device)
            loaded[settings] = Backbone.load(model, where, beside=backbone)
        bases[key] = loaded[settings]
    members = {
        key.removeprefix("teachers."): Member(
            teacher.adapter and inputs.adapter(teacher.adapter),
            config.guidance_of(teacher),
            **teacher.model_dump(include={"extrapolate", "reference"}),
            base=bases.get(key),
        )
        for key, teacher in config.labellers.items()
    }
    labels = getattr(config, "student", StudentConfig())
    start = config.lora.init and inputs.adapter(config.lora.init)

    def bank(members: Mapping[str, Member], routing: Mapping[str, str]) -> Bank | None:
        if not members:
            return None
        try:
            dtype = DTYPES[labels.label_dtype]
            size = labels.label_batch
            return Bank(
                backbone, members, routing, batch_size=size, dtype=dtype, start=start,
                substeps=labels.substeps,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError([Problem("teachers", str(error))]) from error

    anchor = {"anchor": members.pop("anchor")} if "anchor" in config.labellers else {}
    to_anchor = {task.name: "anchor" for task in config.tasks}
    return bank(members, config.routing), bank(anchor, to_anchor)


# Evaluation --------------------------------------------------------------------------------------


def evaluator(parts: Parts, inputs: Inputs) -> Evaluate | None:
    """A function for the loop: it scores the current adapter on held-out prompts, at most
    evaluation.prompts a task, or samples a few of them if nothing has a reward. None without
    held-out prompts."""
    config: TrainingStage = parts.config
    if config.evaluation is None or not config.evaluates:
        return None
    benchmarks = []
    for task in config.tasks:
        if task.validation and task.reward:
            prompts = subset(parts.held_out[task.name], config.evaluation.prompts)
            benchmarks.append(Benchmark(task.name, prompts, parts.rewards[task.name]))
    settings = config.evaluation_sampling
    share = config.evaluation.max_invalid_share
    key = "evaluation.watch"
    device = parts.accelerator.device
    watched = suite.build_sets(config.watched, key, device, config.model, inputs)
    sets = [*map(suite.ImageSet.of, benchmarks), *watched]
    judges = [judge for images in watched for judge in images.judges]

    def evaluate() -> tuple[EvalRow | None, EvalReport]:
        report = suite.run(
            parts.backbone, sets, settings, parts.accelerator,
            seconds=config.train.score_seconds, max_invalid_share=share, shown=HELD_OUT,
            whole={images.name for images in watched},
        )  # fmt: skip
        seen = {
            judge.name: Watched(headline_row(judge, report.rows), judge.image_set)
            for judge in judges
            if judge.name not in report.lost
        }
        report = replace(report, watched=seen)
        if benchmarks:
            return suite.headline(report, benchmarks), report
        return None, replace(report, examples=[*report.examples, *pictured()])

    def pictured() -> Iterator[Example]:
        # on every process: a sharded base needs all in a forward pass
        for prompts in parts.held_out.values():
            shown = spread(len(prompts), HELD_OUT)
            some = prompts.select(shown)
            images = generate(parts.backbone, some, settings, shown)
            for prompt, image in zip(some.prompts, images, strict=True):
                yield Example(prompt, None, png(image))

    return evaluate
