"""`flowalign train --dry-run`: the plan of a run, from what is known before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flowalign.commands import recipe
from flowalign.commands.doctor import predictions
from flowalign.commands.doctor.estimate import evaluated_images
from flowalign.commands.doctor.findings import Finding, fault, note, show
from flowalign.commands.doctor.pace import GPUS
from flowalign.config import ConfigError, Job, Stage, TrainingStage
from flowalign.training.data import PromptSampler
from flowalign.training.preflight import Launch, against_card, scale_problems, unexamined
from flowalign.training.run.processes import state

PROMPTS = 6  # of the first batch that are printed


def run(config: Job, home: Path, launch: Launch, gpu: str | None = None) -> None:
    """Print the plan of every stage. Writes nothing; ConfigError with what `train` would refuse.
    gpu: that it is planned for."""
    if gpu not in (None, *GPUS):
        raise ConfigError([f"--gpu: got {gpu!r}; want one of {', '.join(GPUS)}."])
    stages, problems = recipe.examine(config, home, launch)
    if problems:
        raise ConfigError(problems)
    if not state().is_main_process:
        return
    show(map(fault, scale_problems(stages)))
    if not launch.trust:
        show(map(note, unexamined(stages)))
    forecasts = predictions.forecasts(stages, predictions.Device(launch.processes, gpu))
    for number, forecast in enumerate(forecasts, 1):
        stage = forecast.stage
        print(f"\n[{number}/{len(stages)}] {forecast.name} ({stage.stage}) -> {stage.output}")
        for text in _lines(stage, launch.processes):
            print(f"  {text}")
        if isinstance(stage, TrainingStage):
            show(Finding(level, text) for level, text in against_card(stage))
        forecast.time()
    print()
    predictions.show_total(forecasts)
    print("Nothing was written, and no weight was loaded.")


def _lines(stage: Stage, processes: int) -> Iterator[str]:
    """The plan of a stage, a line each."""
    model = stage.model
    yield f"model: {model.id} in {model.dtype}, VAE in {model.vae_dtype}, {model.listed_sizes}"
    for key, source in stage.inputs.items():
        yield f"{key}: {source}"
    for key, base in stage.bases.items():
        yield f"{key}.base: {base.id} in {base.quantization or base.dtype}"
    if isinstance(stage, TrainingStage):
        rollout, optimizer = stage.rollout, stage.optimizer
        yield (
            f"rollout: {rollout.prompts} prompts x {rollout.copies} images = {rollout.images}, "
            f"{rollout.images // processes} on each of {processes} process(es); {rollout.steps} "
            f"steps ({rollout.kind}, {rollout.solver}) at guidance {rollout.guidance:g}"
        )
        yield (
            f"run: {stage.train.updates} rollouts x {optimizer.updates_per_rollout} = "
            f"{stage.optimizer_steps} optimizer steps, in micro-batches of {optimizer.micro_batch}"
        )
        yield from _first_batch(stage)
    if stage.evaluations:
        sampling = stage.evaluation_sampling
        listed = ", ".join(f"{name} {n}" for name, n in evaluated_images(stage).items())
        yield (
            f"evaluation: {stage.evaluations} time(s), {sampling.steps} steps at guidance "
            f"{sampling.guidance:g}, in batches of B = {sampling.batch_size}; images: {listed}"
        )


def _first_batch(stage: TrainingStage) -> Iterator[str]:
    """The prompts of the first rollout, with task, and teacher or reward."""
    batch = PromptSampler.of(stage).batch(0)
    sources = {task.name: f"reward {task.reward.name}" for task in stage.tasks if task.reward}
    sources |= {task: f"teacher {teacher}" for task, teacher in stage.routing.items()}
    yield "first batch of prompts (task, teacher or reward, prompt):"
    for task, prompt in list(zip(batch.tasks, batch.prompts, strict=True))[:PROMPTS]:
        yield f"  {task} | {sources[task]} | {prompt}"
    if len(batch) > PROMPTS:
        yield f"  and {len(batch) - PROMPTS} more"
