"""Score models on held-out prompts: `python -m flowalign.eval --config FILE [key.path=value ...]`.

Writes results.json, table.md, report.html (one page with tables and images), images/ (with every
image's scores: `flowalign.eval.store`), one grid_<benchmark>.png per benchmark and layouts/ (where
a benchmark asks for it) into `output`. The same command goes on where a killed run stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.config import ConfigError, EvalStage, load
from flowalign.preflight import check_launch, check_world

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, device

    from flowalign.backbone import Backbone
    from flowalign.config import BenchmarkConfig as Mark
    from flowalign.eval.layouts import Export
    from flowalign.eval.reference import Reference
    from flowalign.eval.store import Store
    from flowalign.eval.suite import ImageSet, Judged, Settings
    from flowalign.types import PromptBatch

CLIP = "flowalign.rewards.clip:Clip"


def parser() -> argparse.ArgumentParser:
    """The command line of `eval`."""
    found = argparse.ArgumentParser("flowalign eval", description="Score models from a config.")
    found.add_argument("--config", required=True, help="a YAML file, such as configs/tiny/eval...")
    found.add_argument("--variant", help="a YAML file of keys by stage: other hardware")
    found.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """`compare A B`, or an evaluation. Exit status: 0 done, 1 too many images have no score, 2
    refused, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "compare":
        from flowalign.eval.compare import main as compare

        return compare(argv[1:])
    args = parser().parse_args(argv)
    from flowalign import parallel
    from flowalign.backbone import ModelError
    from flowalign.eval.store import StoreError
    from flowalign.eval.suite import EvaluationError

    try:
        evaluate(load(args.config, args.overrides, stage=EvalStage, variant=args.variant))
        parallel.part()
    except (ConfigError, ModelError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    except EvaluationError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted; no table was written. The same command goes on from here.",
            file=sys.stderr,
        )
        return 130
    return 0


def evaluate(config: EvalStage) -> Path:
    """Score every model on every benchmark; returns the folder of the results.

    Raises ConfigError before any image is sampled, EvaluationError after a set of images of which
    more than `max_invalid_share` have no score.
    """
    from flowalign import parallel
    from flowalign.backbone import Backbone
    from flowalign.eval.files import write
    from flowalign.eval.store import admit, fingerprint, open_stores
    from flowalign.eval.table import Results
    from flowalign.progress import quiet

    quiet()
    accelerator = parallel.accelerator(config)
    check_launch(accelerator.num_processes)
    check_world(config, accelerator.num_processes)
    check_layouts(config)
    sets = wire(config.benchmarks, "benchmarks", accelerator.device)
    reference = wire_reference(config, sets, accelerator.device)
    backbone = Backbone.load(config.model, accelerator.device)
    weights = fingerprint(backbone)
    load_adapters(backbone, config)
    stores = open_stores(config, sets, weights, accelerator)
    exports = wire_exports(config, sets, stores)
    admit(stores.values(), exports, accelerator)
    judged = judge(backbone, config, sets, reference, accelerator, stores)
    if accelerator.is_main_process:
        first = [of.judges[0].name for of in sets if of.judges]  # the images of a set count once
        distances = (
            {m: reference.distance(of[name] for name in first) for m, of in judged.items()}
            if reference
            else {}
        )
        benchmarks = [mark for of in sets for mark in of.judges]
        results = Results(benchmarks, judged, distances)
        show(write(config, results, settings(config)))
        for export in exports:
            export.write()
            print(f"{export.of.layout}: {export.folder}")
    parallel.finish(accelerator)
    return Path(config.output)


def wire(marks: Sequence[Mark], place: str, device: device) -> list[ImageSet]:
    """The benchmarks at a place of a config, those that share images together, with their prompts
    and rewards, which compute on the device; ConfigError if one cannot be built."""
    from flowalign import rewards
    from flowalign.eval.suite import Benchmark, ImageSet

    found, problems = [], []
    for index, mark in enumerate(marks):
        prompts, judges = prompts_of(mark), []
        for name, spec in mark.judges.items():
            try:
                reward = rewards.build_on(device, spec.name, spec.options)
            except (ImportError, ValueError, OSError) as error:
                key = "reward" if mark.reward else f"rewards.{name.removeprefix(f'{mark.name}_')}"
                problems.append(f"{place}.{index}.{key}: {error}")
                continue
            source = mark.name if mark.rewards else None
            judges.append(Benchmark(name, prompts, reward, mark.images, source))
        found.append(ImageSet(mark.name, prompts, mark.images, tuple(judges), mark.layout))
    if problems:
        raise ConfigError(problems)
    return found


def prompts_of(mark: Mark) -> PromptBatch:
    """A benchmark's prompts, the first `limit` of its set."""
    from flowalign.data import load_prompts

    prompts = load_prompts(mark.prompts, mark.name)
    return prompts.select(range(min(len(prompts), mark.limit or len(prompts))))


def check_layouts(config: EvalStage) -> None:
    """ConfigError for prompts that an official layout cannot hold."""
    from flowalign.eval.layouts import check_layout

    problems, size = [], (config.model.height, config.model.width)
    for index, mark in enumerate(config.benchmarks):
        try:
            if mark.layout:
                check_layout(mark.layout, prompts_of(mark), (mark.images, *size))
        except ValueError as error:
            problems.append(f"benchmarks.{index}.layout: {error}")
    if problems:
        raise ConfigError(problems)


def wire_exports(
    config: EvalStage, sets: Sequence[ImageSet], stores: Mapping[tuple[str, str], Store]
) -> list[Export]:
    """The layout folders to be written."""
    from flowalign.eval.layouts import Export

    output = Path(config.output)
    return [
        Export(output, model, of, stores[model, of.name])
        for model in config.models
        for of in sets
        if of.layout
    ]


def wire_reference(config: EvalStage, sets: Sequence[ImageSet], device: device) -> Reference | None:
    """What fidelity is measured with, None where it is not; ConfigError if that cannot work."""
    if config.fidelity is None:
        return None
    from flowalign.eval import reference

    try:
        features = _features(config.fidelity.features, device)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError([f"fidelity.features: {error}"]) from error
    return reference.build(config, [of for of in sets if of.judges], features, device)


def _features(name: str, device: device) -> Callable[[Tensor], Tensor]:
    """Images [B,3,H,W] -> [B,D]: of a CLIP, or by a dotted path "package.module:function"."""
    from flowalign import rewards

    if ":" in name:
        return rewards.load(name, "features")
    return rewards.load(CLIP, "features")(name, device=device).image_features


def settings(config: EvalStage) -> Settings:
    """How the images are sampled."""
    from flowalign.eval.suite import Settings

    return Settings(**config.sampling.model_dump())


def load_adapters(backbone: Backbone, config: EvalStage) -> None:
    """All of them before the first image, so that a broken one costs no evaluation."""
    for name, folder in config.models.items():
        if folder is None:
            continue
        try:
            backbone.load_adapter(_adapter(name), folder, frozen=True)
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            lines = (str(error) or type(error).__name__).strip().splitlines()
            reason = " ".join(line.strip() for line in lines[:2])  # torch: what, then the first
            raise ConfigError(
                [
                    f"models.{name}: {folder!r} does not load onto {config.model.id} ({reason}). "
                    "Name an adapter that was trained on this base, or the base it belongs to."
                ]
            ) from error
    if config.model.compile:
        backbone.compile()


def _adapter(name: str) -> str:
    """The name inside the model; a bare `attn`, say, would also match the model's own layers."""
    return f"eval_{name}"


def using(backbone: Backbone, config: EvalStage, name: str) -> AbstractContextManager[None]:
    """One of the config's models, inside the `with`."""
    return backbone.adapter(_adapter(name) if config.models[name] is not None else None)


def judge(
    backbone: Backbone,
    config: EvalStage,
    sets: Sequence[ImageSet],
    reference: Reference | None,
    accelerator: Accelerator,
    stores: Mapping[tuple[str, str], Store],
) -> dict[str, dict[str, Judged]]:
    """{model: {benchmark: its judged images}}, with a bar on a terminal and a line for each.

    stores {(model, set of images): where its images and rows lie, or will}.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    from flowalign.eval.suite import EvalReport, headline, judge_set, rows_of

    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), Left())
    found: dict[str, dict[str, Judged]] = {name: {} for name in config.models}
    sampling, world = settings(config), accelerator.num_processes
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        total = sum(len(of.prompts) * of.images * max(1, len(of.judges)) for of in sets)
        images = bar.add_task("images", total=total * len(config.models))
        for name in config.models:
            for of in sets:
                bar.update(images, description=f"{name}: {of.name}")
                with using(backbone, config, name):
                    judged = judge_set(
                        backbone,
                        of,
                        sampling,
                        accelerator,
                        keep=config.report.images if of.judges else 0,
                        features=reference.features if reference and of.judges else None,
                        advance=lambda count: bar.advance(images, count * world),
                        seconds=config.score_seconds,
                        store=stores[name, of.name],
                    )
                for mark, its in zip(of.judges, judged, strict=True):
                    found[name][mark.name] = its
                    report = EvalReport(rows_of(mark, its.rows), {}, {})
                    console.print(f"{name}: {mark.name} {headline(report, [mark]):.3f}")
                _check(name, of, judged, config.max_invalid_share)
    return found


def _check(model: str, images: ImageSet, judged: Sequence[Judged], share: float) -> None:
    """EvaluationError if a judge lost too many images; what follows would be sampled in vain if it
    is broken."""
    from flowalign.eval.stats import lost
    from flowalign.eval.suite import EvaluationError

    found = [lost(mark, its.rows, share) for mark, its in zip(images.judges, judged, strict=True)]
    if problems := [f"{model}, {text}" for text in found if text]:
        raise EvaluationError(
            f"{'; '.join(problems)}. No table was written. Mend the reward and give the same "
            "command again: only what has no score is scored."
        )


def show(table: str) -> None:
    """Print a Markdown table: drawn on a terminal, as it is in a log."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if console.is_terminal:
        console.print(Markdown(table))
    else:
        print(table)


if __name__ == "__main__":
    sys.exit(main())
