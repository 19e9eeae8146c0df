"""`flowalign train --dry-run`: the plan of a run, from what is known before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flowalign.backbone.structure import without_data
from flowalign.commands import recipe
from flowalign.commands.doctor import predictions
from flowalign.commands.doctor.estimate import evaluated_images
from flowalign.commands.doctor.findings import note, show
from flowalign.config import ConfigError, Job, Stage, TrainingStage, WindowConfig
from flowalign.training.algorithm import algorithm_class
from flowalign.training.data import PromptSampler
from flowalign.training.preflight import unexamined
from flowalign.training.run.processes import state
from flowalign.training.solvers import forwards

PROMPTS = 6  # of the first batch that are printed


def run(config: Job, home: Path, resume: bool, any_world: bool = False, trust: bool = True) -> None:
    """Print the plan of every stage. Writes nothing; ConfigError with what `train` would refuse.
    trust: as for `flowalign.training.preflight.world_problems`."""
    processes = state().num_processes
    stages, problems = recipe.examine(config, home, processes, resume, any_world, trust)
    if problems:
        raise ConfigError(problems)
    if not state().is_main_process:
        return
    if not trust:
        show(map(note, unexamined(stages)))
    forecasts = predictions.forecasts(stages, predictions.Device(processes))
    for number, forecast in enumerate(forecasts, 1):
        stage = forecast.stage
        print(f"\n[{number}/{len(stages)}] {forecast.name} ({stage.stage}) -> {stage.output}")
        for text in _lines(stage, processes):
            print(f"  {text}")
        if forecast.estimate:
            forecast.time(forecast.estimate)
            if forecast.estimate.device_type == "cpu":
                forecast.source += " (a guess; `flowalign doctor` measures)"
    print()
    predictions.show_total(forecasts)
    print("Nothing was written, and no weight was loaded.")


def _lines(stage: Stage, processes: int) -> Iterator[str]:
    """The plan of a stage, a line each."""
    for key, source in stage.inputs.items():
        yield f"{key}: {source}"
    if stage.samples:
        yield from _shapes(stage)
    if isinstance(stage, TrainingStage):
        yield from _training(stage, processes)
        yield from _first_batch(stage)
    if stage.evaluations:
        sampling = stage.evaluation_sampling
        listed = ", ".join(f"{name} {n}" for name, n in evaluated_images(stage).items())
        yield (
            f"evaluation: {stage.evaluations} time(s), {sampling.steps} steps at guidance "
            f"{sampling.guidance:g}, in batches of B = {sampling.batch_size}; images: {listed}"
        )


def _shapes(stage: Stage) -> Iterator[str]:
    """Of what passes through the model. B images, P prompts."""
    model = stage.model
    try:
        backbone = without_data(model)
    except LookupError:
        yield f"model: {model.id}, whose shapes are not known here"
        return
    latents = " or ".join(f"[B, {', '.join(map(str, s))}]" for s in backbone.latent_shapes)
    images = " or ".join(f"[B, 3, {height}, {width}]" for height, width in model.image_sizes)
    shapes = backbone.family.text_shapes(model.max_sequence_length).values()
    text = " and ".join(f"[P, {', '.join(map(str, shape))}]" for shape in shapes)
    yield f"model: {model.id} in {model.dtype}, VAE in {model.vae_dtype}"
    yield f"shapes: latents {latents} float32, images {images}, text {text} {model.dtype}"


def _training(stage: TrainingStage, processes: int) -> Iterator[str]:
    """Images, batches and updates of a process, and the evaluations."""
    rollout, optimizer = stage.rollout, stage.optimizer
    images = rollout.images // processes
    batch = min(rollout.batch_size, images)
    (start, stop), moving = rollout.trained, rollout.window
    passes = forwards(rollout.solver, rollout.steps)
    solver = "" if rollout.solver == "euler" else f", {rollout.solver}: {passes} forward passes"
    yield (
        f"rollout: {rollout.prompts} prompts x {rollout.copies} images = {rollout.images}; each of "
        f"{processes} process(es) samples {images}, in batches of B = {batch}; {rollout.steps} "
        f"steps ({rollout.kind}{solver}) at guidance {rollout.guidance:g}"
    )
    states = f"steps {start} to {stop - 1}"
    count = rollout.width
    if isinstance(moving, WindowConfig):
        how = "drawn again" if moving.random else "moves on"
        states = f"{count} of {states}, a window that {how} every {moving.every} update(s)"
    algorithm = algorithm_class(stage)
    if levels := algorithm.keeps(stage).noise_levels:
        count, states = levels, f"{levels} noise levels"
    elif (drawn := len(algorithm.trained_steps(stage, 0))) < count:
        count, states = drawn, f"{drawn} of {states}, drawn for each update"
    pairs = images * count // optimizer.updates_per_rollout
    yield (
        f"update: {states}; {optimizer.updates_per_rollout} optimizer step(s) a rollout, each on "
        f"{pairs} (image, step) pairs a process, in micro-batches of "
        f"{min(optimizer.micro_batch, pairs)}"
    )
    yield f"run: {stage.train.updates} rollouts, {stage.optimizer_steps} optimizer steps"


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
