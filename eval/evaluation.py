"""An evaluation from its config to its files: models, image sets, stores, scores, report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import Progress

from flowalign import rewards
from flowalign.backbone import Backbone, ModelError, placement
from flowalign.backbone.compilation import compile_blocks
from flowalign.checks import Launch, check_stage
from flowalign.config import ConfigError, EvalStage
from flowalign.eval.fidelity import Reference, load_reference
from flowalign.eval.report import write_report
from flowalign.eval.stats import headline_rows, lost
from flowalign.eval.store import Store, StoreError, open_stores
from flowalign.eval.suite import (
    EvaluationError,
    ImageSet,
    JudgedImages,
    build_sets,
    judge_set,
    matrix_benchmarks,
)
from flowalign.eval.table import Results
from flowalign.report import summary
from flowalign.report.alarm import Alarm
from flowalign.report.drift.compare import Pair, check_drift
from flowalign.report.page import Panel
from flowalign.report.progress import quiet
from flowalign.system import files
from flowalign.system.escape import harmless
from flowalign.training.inputs import Inputs
from flowalign.training.run import lock, processes

log = logging.getLogger("flowalign")


def run_command(config: EvalStage, file: str) -> int:
    """The command `eval`, from a config that was read from `file`: its exit status."""
    status = processes.ExitStatus(  # docs/evaluation.md documents the statuses
        refused=(ConfigError, ModelError, StoreError),
        stopped=(EvaluationError,),
        interrupted="no table was written. The same command continues from here.",
    )
    rewards.add_config_folder(file)
    with status:
        evaluate(config)
        if processes.state().is_main_process:
            print(summary.stage_summary(config), flush=True)
    return status.code


def evaluate(config: EvalStage, told: bool = False) -> Path:
    """Score every model on every benchmark; returns the folder of the results. told: whether the
    notes of the checks were already logged, as a recipe does for all its stages at its start.

    Raises ConfigError before any image is sampled, EvaluationError if more than `max_invalid_share`
    of a benchmark's images have no score.
    """
    quiet()
    accelerator = processes.accelerator(config)
    main = accelerator.is_main_process
    inputs = check_stage(config, Launch(accelerator.num_processes, resume=True), told or not main)
    with lock.holding(config.output, main):
        _evaluate(config, accelerator, inputs)
    processes.finish(accelerator)
    return Path(config.output)


def _evaluate(config: EvalStage, accelerator: Accelerator, inputs: Inputs) -> None:
    main = accelerator.is_main_process
    if main:
        files.remove_leftovers(config.output)
    accelerator.wait_for_everyone()
    backbone = None
    weights = ""
    digests = {}
    columns = [name for benchmark in config.benchmarks for name in benchmark.judges]
    if config.matrix:
        config = config.model_copy(
            update={"benchmarks": matrix_benchmarks(config.benchmarks, inputs)}
        )
    model = config.model if config.adapters else None
    device = accelerator.device
    sets = build_sets(config.benchmarks, "benchmarks", device, model, inputs, config.given)
    if not model and (size := sets[0].size):  # without a model, the files decide the size
        update = {"height": size[0], "width": size[1]}
        config = config.model_copy(update={"model": config.model.model_copy(update=update)})
    reference = load_reference(config, sets, device)
    if model:
        backbone = Backbone.load(model, device)
        base = (backbone.core, backbone.pipe.vae, *backbone.family.encoders)
        weights = placement.fingerprint(base)  # before the adapters
        load_adapters(backbone, config, inputs)
        drawn = sum(len(images.prompts) * images.copies for images in sets)
        compile_blocks(backbone, config.model, drawn * len(config.adapters), main=main)
        for name, source in config.adapters.items():
            digests[name] = inputs.adapter(source).digest if source else None
        update = {"max_sequence_length": backbone.text.max_sequence_length}  # if it is null
        config = config.model_copy(update={"model": model.model_copy(update=update)})
    stores = open_stores(config, sets, weights, digests, accelerator)
    problems = dict[str, str]()
    for store in stores.values():
        try:
            store.check()
        except StoreError as error:  # a problem that several folders share is reported once
            problems.setdefault(str(error).replace(str(store.folder), ""), f"output: {error}")
    if listed := sorted(set(gather_object([*problems.values()]))):  # from any process
        raise ConfigError(listed)  # the last check: files are written from here on
    if accelerator.is_main_process:
        for store in stores.values():
            store.prepare()
    accelerator.wait_for_everyone()
    judged = score_models(backbone, config, sets, reference, accelerator, stores)
    if accelerator.is_main_process:
        # one judge per image set, so that fidelity counts every image once
        shared = [images.judges[0].name for images in sets]
        distances = {
            model: reference.distance([scored[name] for name in shared])
            for model, scored in judged.items()
            if reference
        }
        benchmarks = [judge for images in sets for judge in images.judges]
        panels = drift_panels(config, backbone, sets, judged)
        seeds = {config.settings_of(model)["seed"] for model in config.models}
        alike = "same prompts"
        if len(seeds) == 1 and None not in seeds:
            alike += " and noise"
        print(write_report(config, Results(benchmarks, judged, distances, panels, alike, columns)))
        warn_of_drift(config, panels)


def load_adapters(backbone: Backbone, config: EvalStage, inputs: Inputs) -> None:
    """Load the adapters of all models."""
    for name, source in config.adapters.items():
        if source is not None:
            backbone.load_adapter(adapter_name(name), inputs.adapter(source), frozen=True)


def adapter_name(name: str) -> str:
    """The name of a model's adapter on the base."""
    return f"eval_{name}"  # a bare `attn`, say, would also match the model's layers


def score_models(
    backbone: Backbone | None,
    config: EvalStage,
    sets: Sequence[ImageSet],
    reference: Reference | None,
    accelerator: Accelerator,
    stores: Mapping[tuple[str, str], Store],
) -> dict[str, dict[str, JudgedImages]]:
    """Sample and score the images of all models: {model: {benchmark: its judged images}}.

    Shows a progress bar on a terminal, and prints one line per model and benchmark. Raises
    EvaluationError as soon as a judge lost too many images, so that no more images are sampled.
    """
    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    judged: dict[str, dict[str, JudgedImages]] = {name: {} for name in config.models}
    with Progress(console=console, disable=not console.is_terminal) as bar:
        total = sum(len(images.prompts) * images.copies for images in sets)
        task = bar.add_task("images", total=total * len(config.models))
        for name, images in product(config.models, sets):
            model = None if name in config.given else backbone
            adapter = adapter_name(name) if config.adapters.get(name) else None
            with model.adapter(adapter) if model else nullcontext():
                scored = judge_set(
                    model,
                    images,
                    config.sampling_of(name),
                    accelerator,
                    keep=config.report.images,
                    features=reference.extract if reference else None,
                    advance=lambda count: bar.advance(task, count * accelerator.num_processes),
                    seconds=config.score_seconds,
                    store=stores[name, images.name],
                )
            problems = []
            for benchmark, result in zip(images.judges, scored, strict=True):
                judged[name][benchmark.name] = result
                number = headline_rows(benchmark, result.scores)[0].mean
                old = result.taken_over
                counts = f"{old} scores taken over, {len(result.scores) - old} made"
                line = f"{name}: {benchmark.name} {number:.3f} ({counts})"
                console.print(harmless(line), markup=False)
                if reason := lost(benchmark, result.scores, config.max_invalid_share):
                    problems.append(f"{name}, {reason}")
            if problems:
                raise EvaluationError(
                    f"{'; '.join(problems)}. No table was written. Fix the reward and run the same "
                    "command again: it scores only the images that have no score."
                )
    return judged


# The alarm ---------------------------------------------------------------------------------------


def drift_panels(
    config: EvalStage,
    backbone: Backbone | None,
    sets: Sequence[ImageSet],
    judged: Mapping[str, Mapping[str, JudgedImages]],
) -> list[Panel]:
    """The drift of every model from the base on every image set, over the kept pictures. Empty
    without `alarm`, or if the base is not among the models."""
    base = next((name for name, adapter in config.adapters.items() if adapter is None), None)
    panels: list[Panel] = []
    if config.alarm is None or base is None or backbone is None:
        return panels
    family = backbone.family
    for images, first in ((images, images.judges[0].name) for images in sets):
        before = judged[base][first]
        pictured = before.pictured(images.copies)  # the same for all models
        numbers = [prompt for prompt in pictured for _ in range(images.copies)]
        about = list(zip(numbers, images.prompts.select(numbers).prompts, strict=True))
        for model in (name for name in config.models if name != base and pictured):
            both = zip(before.pictures, judged[model][first].pictures, strict=True)
            pairs = [Pair(*two, images.name, *rest) for two, rest in zip(both, about, strict=True)]
            check = check_drift(pairs, family.factor * family.patch)
            panels.append(Panel(f"{model} on {images.name}", config.alarm.warn, check))
    return panels


def warn_of_drift(config: EvalStage, panels: Sequence[Panel]) -> None:
    """Log a warning for each statistic beyond alarm.warn. Raises EvaluationError if one is beyond
    alarm.stop."""
    too_far = []
    for panel in panels:
        assert config.alarm  # else there are no panels
        drifts = panel.check.by_size
        for text in Alarm().drift_warnings(drifts, panel.warn, panel.title):
            log.warning(text)
        too_far += [f"{panel.title}: {d}" for d in drifts if d.beyond(config.alarm.stop)]
    if too_far:
        raise EvaluationError(
            f"images drift from the base, beyond alarm.stop: {'; '.join(too_far)}. The report is "
            f"written: look at {config.folder.page}."
        )
