"""Read a config, wire the rooms, run: what `accelerate launch train.py` and the CLI call."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.config import (
    ConfigError,
    GrpoStage,
    Job,
    MergeStage,
    OpdStage,
    RecipeStage,
    SftStage,
    TrainingStage,
    load,
    mixtures,
    routing,
    to_yaml,
)
from flowalign.preflight import check_launch, check_world, start

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor

    from flowalign.backbone import Backbone
    from flowalign.config import TeacherConfig as TeacherSettings
    from flowalign.eval.suite import Benchmark, Settings
    from flowalign.loop import Algorithm, Loop
    from flowalign.progress import Progress
    from flowalign.student.opd import Student
    from flowalign.teachers.bank import Bank
    from flowalign.teachers.grpo import Grpo
    from flowalign.types import EvalReport, Reward

log = logging.getLogger("flowalign")


def parser() -> argparse.ArgumentParser:
    """The command line of `train`."""
    found = argparse.ArgumentParser("flowalign train", description="Train from a config file.")
    found.add_argument("--config", required=True, help="a YAML file, such as configs/tiny/...")
    found.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    found.add_argument("--variant", help="a YAML file of keys by stage: other hardware")
    found.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the run had to stop, 2 the config is refused, 130 interrupted."""
    args = parser().parse_args(argv)
    from flowalign.progress import quiet

    quiet()  # before diffusers is imported
    from flowalign import parallel
    from flowalign.backbone import ModelError
    from flowalign.eval.suite import EvaluationError
    from flowalign.loop import TrainingError

    try:
        config = load(args.config, args.overrides, stage=Job, variant=args.variant)
        run(config, Path(args.config).parent, args.resume)
        parallel.part()
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    except (TrainingError, EvaluationError) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; continue from the last checkpoint with --resume", file=sys.stderr)
        return 130
    return 0


def run(config: Job, home: Path, resume: bool) -> Path:
    """Whatever `flowalign train` can run. home: the folder of the config file."""
    if isinstance(config, TrainingStage):
        return train(config, resume=resume)
    from flowalign import recipe
    from flowalign.eval.run import evaluate

    if isinstance(config, MergeStage):
        name = Path(config.output).name
        stages = {name: config.model_dump(mode="json", exclude={"output", "model"})}
        parent = str(Path(config.output).parent)
        config = RecipeStage(stage="recipe", output=parent, model=config.model, stages=stages)
    assert isinstance(config, RecipeStage)
    return recipe.run(config, home, lambda stage: train(stage, resume=True), evaluate)


def train(config: TrainingStage, *, resume: bool = False) -> Path:
    """Train one stage to its end; returns the folder of the resulting adapter.

    Raises ConfigError before any model is loaded, TrainingError if the run has to stop.
    """
    from flowalign import parallel
    from flowalign.determinism import deterministic

    processes = parallel.state(config).num_processes
    check_launch(processes)
    check_world(config, processes)
    folder = Path(config.output)
    _check_folder(folder, config, resume)
    _say_start(config, parallel.state().is_main_process)
    with deterministic(config.train.deterministic):
        loop, report, rewards = wire(config)
        if loop.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(to_yaml(config))
        loop.accelerator.wait_for_everyone()
        if resume and not loop.resume():
            log.info("no checkpoint under %s: starting anew", folder)
        _hint_threads(loop.accelerator)
        report.begin(loop)
        try:
            loop.run()
        finally:
            report.end()
        finish(loop, config, rewards)
        parallel.finish(loop.accelerator)
    return folder / "adapter"


def _say_start(config: TrainingStage, main: bool) -> None:
    """Where the adapter starts, and which keys of `lora` that overrules."""
    if main and (found := start(config.lora)):
        log.info(found.text)
        for text in found.ignored:
            log.warning("%s. Leave it out, or start without lora.init.", text)


def _hint_threads(accelerator: Accelerator) -> None:
    """Say so where a run on CPUs leaves some idle: accelerate gives a process one thread."""
    import torch

    used = torch.get_num_threads() * accelerator.num_processes
    cores = os.cpu_count() or 1
    if accelerator.device.type == "cpu" and used < cores:
        accelerator.print(
            f"using {used} of {cores} CPU cores; "
            f"accelerate launch --num_cpu_threads_per_process {cores} uses all, as does "
            "flowalign train without OMP_NUM_THREADS"
        )


def _check_folder(folder: Path, config: TrainingStage, resume: bool) -> None:
    """Refuse to overwrite another run, or to resume one that was configured otherwise."""
    saved = folder / "config.yaml"
    if not resume and any((folder / "checkpoints").glob("update_*")):
        raise ConfigError(
            [
                f"output: {folder} holds the checkpoints of a run. Continue it with --resume, "
                "choose another `output`, or delete the folder."
            ]
        )
    if resume and saved.exists():
        free = {"train", "evaluation", "output"}
        old = load(saved).model_dump(exclude=free)
        new = config.model_dump(exclude=free)
        changed = sorted(key for key in new if new[key] != old[key])
        if changed:
            raise ConfigError(
                [
                    f"--resume: {', '.join(changed)} differ from {saved}. A resumed run keeps its "
                    "config (but for train and evaluation); undo the change or choose another "
                    "`output`."
                ]
            )


def wire(config: TrainingStage) -> tuple[Loop, Progress, dict[str, Reward]]:
    """Build every part of a run from its config -> the loop, its display, its rewards."""
    from accelerate.utils import set_seed

    from flowalign import parallel, rewards, trackers
    from flowalign.data import PromptSampler, load_prompts
    from flowalign.loop import Loop
    from flowalign.progress import Progress

    accelerator = parallel.start(config)
    set_seed(config.seed)  # the LoRA's initial A; all else has generators of its own
    built = {
        t.name: rewards.build_on(accelerator.device, t.reward.name, t.reward.options)
        for t in config.tasks
        if t.reward
    }
    _check_groups(config, built, accelerator.num_processes)
    backbone = student(config, accelerator.device)
    sampler = PromptSampler(
        {t.name: load_prompts(t.prompts, t.name) for t in config.tasks},
        {t.name: t.weight for t in config.tasks},
        config.rollout.prompts,
        config.seed,
    )
    progress = Progress(config.train.updates, accelerator.is_main_process)
    loop = Loop(
        config,
        backbone,
        accelerator,
        sampler,
        algorithm(config, backbone, built, accelerator),
        evaluator(config, backbone, built, accelerator),
        progress.update,
        lambda path, images, captions: draw(config, path, images, captions),
    )
    trackers.begin(accelerator, config)
    if accelerator.is_main_process:
        for place, scale in mixtures(config).items():
            log.warning(
                "%s: labels at guidance %g for a student that is trained at %g: a mixture, which "
                "teaches the student that scale, too", place, scale, config.guidance
            )  # fmt: skip
    return loop, progress, built


def _check_groups(config: TrainingStage, rewards: Mapping[str, Reward], processes: int) -> None:
    """Refuse a reward that must see a whole group where the images of a prompt would lie on
    several processes."""
    rollout, updates = config.rollout, config.optimizer.updates_per_rollout
    whole = sorted(name for name, reward in rewards.items() if getattr(reward, "groupwise", False))
    if whole and rollout.prompts // updates % processes:
        unit = updates * processes
        raise ConfigError(
            [
                f"rollout.prompts: the reward of task {whole[0]!r} compares all images of a "
                f"prompt, and {rollout.prompts} prompts over optimizer.updates_per_rollout = "
                f"{updates} cannot be shared whole by {processes} processes. Use a multiple of "
                f"{unit}, for example rollout.prompts={-(-rollout.prompts // unit) * unit}."
            ]
        )


def algorithm(
    config: TrainingStage,
    backbone: Backbone,
    rewards: Mapping[str, Reward],
    accelerator: Accelerator,
) -> Algorithm:
    """What the stage of a config learns."""
    if isinstance(config, GrpoStage):
        return grpo(config, backbone, rewards, accelerator)
    if isinstance(config, OpdStage):
        return opd(config, backbone, rewards, accelerator)
    assert isinstance(config, SftStage)
    from flowalign.student.sft import Sft

    return Sft(
        bank(backbone, config, config.teachers, routing(config)),
        backbone.sigmas(config.rollout.steps),
        states=config.sft.states,
        shift=backbone.shift,
        guidance=config.rollout.guidance,
        seed=config.seed,
    )


def grpo(
    config: GrpoStage | OpdStage,
    backbone: Backbone,
    rewards: Mapping[str, Reward],
    accelerator: Accelerator,
) -> Grpo:
    """Learning from the tasks' rewards."""
    from flowalign.loop import schedule
    from flowalign.rewards.scoring import ByTask
    from flowalign.teachers.grpo import Grpo

    score, train = ByTask(rewards), config.train
    return Grpo(
        config.grpo,
        score,
        backbone,
        schedule(backbone, config),
        accelerator,
        guidance=config.rollout.guidance,
        max_invalid_share=train.max_invalid_share,
        while_sampling=train.score_while_sampling and not score.groupwise,
        seconds=train.score_seconds,
    )


def opd(
    config: OpdStage,
    backbone: Backbone,
    rewards: Mapping[str, Reward],
    accelerator: Accelerator,
) -> Student:
    """Learning from routed teachers, an anchor and, where asked, the rewards as well."""
    from flowalign.loop import schedule
    from flowalign.student.opd import Student

    s, routed, anchor = config.student, routing(config), config.anchor
    everywhere = dict.fromkeys(routed, "anchor")
    storage = {"dtype": s.label_dtype, "batch_size": s.label_batch}
    return Student(
        s,
        bank(backbone, config, config.teachers, routed, **storage),
        backbone,
        schedule(backbone, config),
        accelerator,
        guidance=config.guidance,
        seed=config.seed,
        micro_batch=config.optimizer.micro_batch,
        anchor=bank(backbone, config, {"anchor": anchor}, everywhere, **storage)
        if anchor
        else None,
        anchor_weight=anchor.weight if anchor else 0.0,
        grpo=grpo(config, backbone, rewards, accelerator) if s.reward_weight > 0 else None,
    )


def bank(
    backbone: Backbone,
    config: TrainingStage,
    teachers: Mapping[str, TeacherSettings],
    routed: Mapping[str, str],
    *,
    dtype: str = "float32",
    batch_size: int = 64,
) -> Bank:
    """The teachers of a config on the student's base; ConfigError if one does not fit it."""
    from flowalign.backbone import DTYPES
    from flowalign.teachers.bank import Bank, Member

    members = {name: Member(t.adapter, config.guidance_of(t)) for name, t in teachers.items()}
    try:
        return Bank(backbone, members, routed, dtype=DTYPES[dtype], batch_size=batch_size)
    except ValueError as error:
        raise ConfigError([f"teachers: {error}"]) from error


def student(config: TrainingStage, device: torch.device) -> Backbone:
    """The base model with the student's adapter on it, fresh or read from lora.init."""
    from flowalign.backbone import Backbone
    from flowalign.loop import STUDENT

    backbone, lora = Backbone.load(config.model, device), config.lora
    if lora.init:
        backbone.load_adapter(STUDENT, lora.init)
    else:
        backbone.add_adapter(STUDENT, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    if config.model.compile:
        backbone.compile()
    return backbone


def evaluator(
    config: TrainingStage,
    backbone: Backbone,
    rewards: Mapping[str, Reward],
    accelerator: Accelerator,
) -> Callable[[], tuple[float, EvalReport]] | None:
    """What the loop calls to score the current adapter on held-out prompts."""
    from flowalign.eval import suite

    if config.evaluation is None:
        return None
    benchmarks, settings = held_out(config, rewards), eval_settings(config)
    seconds, share = config.train.score_seconds, config.evaluation.max_invalid_share
    watched = suite.build_sets(config.evaluation.watch, "evaluation.watch", accelerator.device)
    everything = [*map(suite.ImageSet.of, benchmarks), *watched]

    def evaluate() -> tuple[float, EvalReport]:
        report = suite.run(
            backbone, everything, settings, accelerator, seconds=seconds, max_invalid_share=share
        )
        return suite.headline(report, benchmarks), report

    return evaluate


def draw(config: TrainingStage, path: Path, images: Tensor, captions: Sequence[str]) -> None:
    """The sample grid of a rollout: up to four copies of each of eight prompts."""
    from flowalign.pictures import grid

    stride = max(1, config.rollout.copies // 4)
    grid(path, images[::stride][:32], captions[::stride][:32], title=path.stem)


def held_out(config: TrainingStage, rewards: Mapping[str, Reward]) -> list[Benchmark]:
    """The validation benchmarks of a config, at most evaluation.prompts a task."""
    from flowalign.data import load_prompts, subset
    from flowalign.eval.suite import Benchmark

    assert config.evaluation
    found = []
    for task in config.tasks:
        if task.validation and task.name in rewards:
            prompts = subset(load_prompts(task.validation, task.name), config.evaluation.prompts)
            found.append(Benchmark(task.name, prompts, rewards[task.name]))
    return found


def eval_settings(config: TrainingStage) -> Settings:
    """How the evaluations of a run sample: as its rollouts do, where the config is silent."""
    from flowalign.eval.suite import Settings

    e, r = config.evaluation, config.rollout
    assert e
    return Settings(
        steps=e.steps or r.steps,
        guidance=r.guidance if e.guidance is None else e.guidance,
        seed=e.seed,
        batch_size=e.batch_size or r.batch_size,
    )


def finish(loop: Loop, config: TrainingStage, rewards: Mapping[str, Reward]) -> None:
    """After the last update: the metrics plot, the before/after grid and the model card, by the
    main process; under FSDP2 all of them sample the grid."""
    from flowalign import trackers
    from flowalign.pictures import metrics_plot
    from flowalign.publish.card import write_card

    folder, main = Path(config.output), loop.accelerator.is_main_process
    if main:
        metrics_plot(folder / "metrics.jsonl", folder / "metrics.png", title=folder.name)
        write_card(folder, config, sys.argv)
    if config.evaluation and (main or loop.backbone.sharded):
        path = folder / "before_after.png" if main else None
        compare(loop.backbone, config, rewards, path)
        if path:
            trackers.image(loop.accelerator, path.stem, path, loop.update)


def compare(
    backbone: Backbone,
    config: TrainingStage,
    rewards: Mapping[str, Reward],
    path: Path | None,
    count: int = 16,
) -> None:
    """Base and result on the same held-out prompts and noise, as one picture; path None: sample
    them for nothing, as the process that draws samples them too."""
    from flowalign.data import subset
    from flowalign.eval.suite import generate
    from flowalign.loop import STUDENT
    from flowalign.pictures import read_metrics, side_by_side
    from flowalign.rewards.scoring import Ahead, ByTask

    settings = eval_settings(config)
    backbone.replace_adapter(STUDENT, Path(config.output) / "adapter")
    benchmark = held_out(config, rewards)[0]
    prompts = subset(benchmark.prompts, count)
    with backbone.base():
        before = generate(backbone, prompts, settings)
    after = generate(backbone, prompts, settings)
    if path is None:
        return
    captions, scoring = [], Ahead(ByTask(rewards), config.train.score_seconds)
    for images in (before, after):  # other processes wait: no reward may keep them for ever
        scoring.submit(images, prompts)
    for found in scoring.answers():
        value = found.parts.get(benchmark.headline or "", found.value)
        captions.append(
            [f"{p}\n{v:.2f}" for p, v in zip(prompts.prompts, value.tolist(), strict=True)]
        )
    scoring.forget()
    scores = read_metrics(path.parent / "metrics.jsonl")["eval/headline"]
    best = f"{max(value for _, value in scores):.3f}"
    known = scores[0][0] == 0  # an evaluation of the base that lost images is not among them
    title = (
        f"{path.parent.name}: base above, trained below, same prompts and noise. "
        f"On all held-out prompts: {f'{scores[0][1]:.3f} -> {best}' if known else best}"
    )
    side_by_side(path, (list(before), list(after)), captions, title=title)
