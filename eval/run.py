"""Score models on held-out prompts: `python -m flowalign.eval --config FILE [key.path=value ...]`.

Writes into `output`: results.json, table.md, report.html (one page with tables and images), images/
(with the scores of every image: `flowalign.eval.store`), grid.png (some images of every model) and
layouts/ where a benchmark asks for it. The same command continues a run that was killed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.config import ConfigError, EvalStage, load
from flowalign.system.escape import harmless
from flowalign.training.preflight import check_launch, check_world
from flowalign.training.run import lock

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flowalign.backbone import Backbone
    from flowalign.eval.fidelity import Reference
    from flowalign.eval.layouts import Export
    from flowalign.eval.store import Store
    from flowalign.eval.suite import ImageSet, Judged

log = logging.getLogger("flowalign")


def parser() -> argparse.ArgumentParser:
    """The command line of `eval`."""
    arguments = argparse.ArgumentParser("flowalign eval", description="Score models from a config.")
    arguments.add_argument("--config", required=True, help="a YAML file: configs/tiny/eval.yaml")
    arguments.add_argument("--variant", help="a YAML file of keys by stage: other hardware")
    arguments.add_argument("overrides", nargs="*", metavar="key.path=value",
                           help="change the config")  # fmt: skip
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """`compare A B`, or an evaluation.

    Exit status: 0 done, 1 too many images have no score, 2 refused; interrupted, 130 by Ctrl-C, 143
    by SIGTERM, 75 by SIGUSR1.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "compare":
        from flowalign.eval.compare import main as compare

        return compare(argv[1:])
    args = parser().parse_args(argv)
    try:
        config = load(args.config, args.overrides, stage=EvalStage, variant=args.variant)
        if int(os.environ.get("RANK") or 0) == 0:
            lock.check_free(config.output)
    except ConfigError as error:  # before the libraries are imported, which takes many seconds
        print(error, file=sys.stderr)
        return 2
    from flowalign import rewards
    from flowalign.backbone import ModelError
    from flowalign.eval.store import StoreError
    from flowalign.eval.suite import EvaluationError
    from flowalign.training.report import results
    from flowalign.training.run import processes

    status = processes.ExitStatus(  # docs/evaluation.md documents the statuses
        refused=(ConfigError, ModelError, StoreError),
        stopped=(EvaluationError,),
        interrupted="no table was written. The same command continues from here.",
    )
    rewards.look_beside(args.config)
    with status:
        evaluate(config)
        if processes.state().is_main_process:
            print(results.summary(config), flush=True)
    return status.code


def evaluate(config: EvalStage) -> Path:
    """Score every model on every benchmark; returns the folder of the results.

    Raises ConfigError before any image is sampled, EvaluationError if more than
    `max_invalid_share` of a benchmark's images have no score.
    """
    from flowalign.training.report.progress import quiet
    from flowalign.training.run import processes

    quiet()
    accelerator = processes.accelerator(config)
    check_launch(accelerator.num_processes)
    check_world(config, accelerator.num_processes)
    with lock.holding(config.output, accelerator.is_main_process):
        _evaluate(config, accelerator)
    processes.finish(accelerator)
    return Path(config.output)


def _evaluate(config: EvalStage, accelerator: Accelerator) -> None:
    from flowalign.backbone import Backbone, placement
    from flowalign.eval.drift import drift_report
    from flowalign.eval.fidelity import load_reference
    from flowalign.eval.files import write
    from flowalign.eval.layouts import Export
    from flowalign.eval.store import open_stores
    from flowalign.eval.suite import EvaluationError, build_sets
    from flowalign.eval.table import Results
    from flowalign.system import files
    from flowalign.training.run import ranks

    if accelerator.is_main_process:
        files.remove_leftovers(config.output)
    accelerator.wait_for_everyone()
    ranks.watch().at("loading the models")
    sets = build_sets(config.benchmarks, "benchmarks", accelerator.device, config.model)
    reference = load_reference(config, sets, accelerator.device)
    backbone = Backbone.load(config.model, accelerator.device)
    base = (backbone.core, backbone.pipe.vae, *backbone.family.encoders)
    weights = placement.fingerprint(base)  # before the adapters
    digests = load_adapters(backbone, config)
    stores = open_stores(config, sets, weights, digests, accelerator)
    exports = [
        Export(Path(config.output), model, images, stores[model, images.name])
        for model in config.models
        for images in sets
        if images.layout
    ]
    admit(stores.values(), exports, accelerator)  # the last check: from here on, it writes
    judged = score_models(backbone, config, sets, reference, accelerator, stores)
    ranks.watch().at("the report")
    if accelerator.is_main_process:
        # of each image set one judge, so that fidelity counts every image once
        shared = [images.judges[0].name for images in sets if images.judges]
        distances = {}
        if reference:
            for model, results in judged.items():
                distances[model] = reference.distance([results[name] for name in shared])
        benchmarks = [judge for images in sets for judge in images.judges]
        drift = drift_report(config, backbone, sets, judged)
        show(write(config, Results(benchmarks, judged, distances, drift.panels)))
        for export in exports:
            export.write()
            print(f"{export.images.layout}: {export.folder}")
        for text in drift.warnings:
            log.warning(text)
        if drift.too_far:
            raise EvaluationError(
                f"images drift from the base, beyond alarm.stop: {'; '.join(drift.too_far)}. "
                f"The report is written: look at {Path(config.output) / 'report.html'}."
            )


def load_adapters(backbone: Backbone, config: EvalStage) -> dict[str, str | None]:
    """Load the adapters of all models -> {model: its digest, None for the base}, or ConfigError."""
    from flowalign.backbone.adapters.files import read_lora

    digests: dict[str, str | None] = {}
    for name, folder in config.models.items():
        digests[name] = None
        if folder is None:
            continue
        try:
            lora = read_lora(folder)  # once, for its digest and for loading
            digests[name] = lora.digest
            backbone.load_adapter(_adapter(name), lora, frozen=True)
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            lines = (str(error) or type(error).__name__).strip().splitlines()
            # torch's own message: what is wrong, then one line per weight
            reason = " ".join(line.strip() for line in lines[:2])
            raise ConfigError(
                [
                    f"models.{name}: {folder!r} does not load onto {config.model.id} ({reason}). "
                    "Name an adapter that was trained on this base, or the base it belongs to."
                ]
            ) from error
    if config.model.compile:  # after the adapters: they change the layers
        backbone.compile()
    return digests


def _adapter(name: str) -> str:
    return f"eval_{name}"  # a bare `attn`, say, would also match the model's layers


def using(backbone: Backbone, config: EvalStage, name: str) -> AbstractContextManager[None]:
    """One of the config's models, inside the `with`."""
    return backbone.adapter(None if config.models[name] is None else _adapter(name))


def admit(stores: Iterable[Store], exports: Sequence[Export], accelerator: Accelerator) -> None:
    """Prepare the stores for writing; ConfigError if a folder holds images of another run."""
    from accelerate.utils import gather_object

    from flowalign.eval.store import StoreError

    stores, problems = list(stores), []
    for folder in (*stores, *exports):
        try:
            folder.check()
        except StoreError as error:
            problems.append(f"output: {error}")
    if problems := sorted(set(gather_object(problems))):  # on all processes, whoever saw it
        raise ConfigError(problems)
    if accelerator.is_main_process:
        for store in stores:
            store.prepare()
    accelerator.wait_for_everyone()


def score_models(
    backbone: Backbone,
    config: EvalStage,
    sets: Sequence[ImageSet],
    reference: Reference | None,
    accelerator: Accelerator,
    stores: Mapping[tuple[str, str], Store],
) -> dict[str, dict[str, Judged]]:
    """Sample and score the images of all models: {model: {benchmark: its judged images}}.

    Shows a progress bar on a terminal, and prints one line per model and benchmark. Raises
    EvaluationError as soon as a judge lost too many images: the rest would be sampled in vain.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    from flowalign.eval.stats import headline_rows, lost
    from flowalign.eval.suite import EvaluationError, judge_set
    from flowalign.training.run import ranks

    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    name_of = TextColumn("{task.description}", markup=False)
    columns = (name_of, BarColumn(20), MofNCompleteColumn(), Left())
    judged: dict[str, dict[str, Judged]] = {name: {} for name in config.models}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        total = sum(len(images.prompts) * images.copies for images in sets)
        task = bar.add_task("images", total=total * len(config.models))
        for name, images in product(config.models, sets):
            bar.update(task, description=harmless(f"{name}: {images.name}"))
            ranks.watch().at(f"the evaluation of {name} on {images.name}")
            with using(backbone, config, name):
                results = judge_set(
                    backbone,
                    images,
                    config.sampling,
                    accelerator,
                    keep=config.report.images if images.judges else 0,
                    features=reference.extract if reference and images.judges else None,
                    advance=lambda count: bar.advance(task, count * accelerator.num_processes),
                    seconds=config.score_seconds,
                    store=stores[name, images.name],
                )
            problems = []
            for benchmark, result in zip(images.judges, results, strict=True):
                judged[name][benchmark.name] = result
                number = headline_rows(benchmark, result.rows)[0].mean
                console.print(harmless(f"{name}: {benchmark.name} {number:.3f}"), markup=False)
                if reason := lost(benchmark, result.rows, config.max_invalid_share):
                    problems.append(f"{name}, {reason}")
            if problems:
                raise EvaluationError(
                    f"{'; '.join(problems)}. No table was written. Fix the reward and run the same "
                    "command again: it scores only the images that have no score."
                )
    return judged


def show(table: str) -> None:
    """Print a Markdown table: rendered on a terminal, as it is in a log."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if console.is_terminal:
        console.print(Markdown(table))
    else:  # rich would break its lines
        print(table)
