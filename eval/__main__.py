"""Score models on held-out prompts: `python -m flowalign.eval --config FILE [key.path=value ...]`.

Writes results.json, table.md, report.html (one page with tables and images), images/ (with every
image's scores: `flowalign.eval.store`) and one grid_<benchmark>.png per benchmark into `output`.
The same command goes on where a killed run stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.checks import check_world
from flowalign.config import ConfigError, EvalConfig, load

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, device

    from flowalign.backbone import Backbone
    from flowalign.config import Benchmark as Mark
    from flowalign.eval.reference import Reference
    from flowalign.eval.store import Store
    from flowalign.eval.suite import Benchmark, Judged, Settings

CLIP = "flowalign.rewards.clip:Clip"


def parser() -> argparse.ArgumentParser:
    """The command line of `eval`."""
    found = argparse.ArgumentParser("flowalign eval", description="Score models from a config.")
    found.add_argument("--config", required=True, help="a YAML file, such as configs/tiny/eval...")
    found.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """`compare A B`, or an evaluation. Exit status: 0 done, 2 refused, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "compare":
        from flowalign.eval.compare import main as compare

        return compare(argv[1:])
    args = parser().parse_args(argv)
    from flowalign import parallel
    from flowalign.backbone import ModelError

    try:
        evaluate(load(args.config, args.overrides, stage=EvalConfig))
        parallel.part()
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; no table was written. The same command goes on from here.",
            file=sys.stderr,
        )
        return 130
    return 0


def evaluate(config: EvalConfig) -> Path:
    """Score every model on every benchmark; returns the folder of the results.

    Raises ConfigError before any image is sampled.
    """
    from accelerate import Accelerator

    from flowalign import parallel
    from flowalign.backbone import Backbone
    from flowalign.eval.files import write
    from flowalign.eval.store import fingerprint, open_stores
    from flowalign.eval.table import Results
    from flowalign.progress import quiet

    quiet()
    parallel.state()
    accelerator = Accelerator()
    check_world(config, accelerator.num_processes)
    benchmarks = wire(config.benchmarks, "benchmarks")
    reference = wire_reference(config, benchmarks, accelerator.device)
    backbone = Backbone.load(config.model, accelerator.device)
    weights = fingerprint(backbone)
    load_adapters(backbone, config)
    stores = open_stores(config, benchmarks, weights, accelerator)
    judged = judge(backbone, config, benchmarks, reference, accelerator, stores)
    if accelerator.is_main_process:
        distances = (
            {m: reference.distance(of.values()) for m, of in judged.items()} if reference else {}
        )
        results = Results(benchmarks, judged, distances)
        show(write(config, results, settings(config)))
    parallel.finish(accelerator)
    return Path(config.output)


def wire(marks: Sequence[Mark], place: str) -> list[Benchmark]:
    """The benchmarks at a place of a config, with their prompts and rewards; ConfigError if one
    cannot be built."""
    from flowalign import rewards
    from flowalign.data import load_prompts
    from flowalign.eval.suite import Benchmark

    found, problems = [], []
    for index, mark in enumerate(marks):
        prompts = load_prompts(mark.prompts, mark.name)
        count = min(len(prompts), mark.limit or len(prompts))
        try:
            reward = rewards.build(mark.reward.name, **mark.reward.options)
        except (ImportError, ValueError, OSError) as error:
            problems.append(f"{place}.{index}.reward: {error}")
            continue
        found.append(Benchmark(mark.name, prompts.select(range(count)), reward, mark.images))
    if problems:
        raise ConfigError(problems)
    return found


def wire_reference(
    config: EvalConfig, benchmarks: Sequence[Benchmark], device: device
) -> Reference | None:
    """What fidelity is measured with, None where it is not; ConfigError if that cannot work."""
    if config.fidelity is None:
        return None
    from flowalign.eval import reference

    try:
        features = _features(config.fidelity.features, device)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError([f"fidelity.features: {error}"]) from error
    return reference.build(config, benchmarks, features, device)


def _features(name: str, device: device) -> Callable[[Tensor], Tensor]:
    """Images [B,3,H,W] -> [B,D]: of a CLIP, or by a dotted path "package.module:function"."""
    from flowalign import rewards

    if ":" in name:
        return rewards.load(name, "features")
    return rewards.load(CLIP, "features")(name, device=device).image_features


def settings(config: EvalConfig) -> Settings:
    """How the images are sampled."""
    from flowalign.eval.suite import Settings

    return Settings(**config.sampling.model_dump())


def load_adapters(backbone: Backbone, config: EvalConfig) -> None:
    """All of them before the first image, so that a broken one costs no evaluation."""
    for name, folder in config.models.items():
        if folder is None:
            continue
        try:
            backbone.load_adapter(_adapter(name), Path(folder).expanduser())
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise ConfigError(
                [
                    f"models.{name}: {folder!r} does not load onto {config.model.id} ({reason}). "
                    "Name an adapter that was trained on this base, or the base it belongs to."
                ]
            ) from error
    if config.model.compile:
        backbone.core.compile()


def _adapter(name: str) -> str:
    """The name inside the model; a bare `attn`, say, would also match the model's own layers."""
    return f"eval_{name}"


@contextmanager
def using(backbone: Backbone, config: EvalConfig, name: str) -> Iterator[None]:
    """One of the config's models, inside the `with`."""
    if config.models[name] is not None:
        backbone.core.set_adapter(_adapter(name))
        yield
    elif any(config.models.values()):
        with backbone.base():
            yield
    else:  # there is no adapter that could be switched off
        yield


def judge(
    backbone: Backbone,
    config: EvalConfig,
    benchmarks: Sequence[Benchmark],
    reference: Reference | None,
    accelerator: Accelerator,
    stores: Mapping[tuple[str, str], Store],
) -> dict[str, dict[str, Judged]]:
    """{model: {benchmark: its judged images}}, with a bar on a terminal and a line for each.

    stores {(model, benchmark): where its images and rows lie, or will}.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    from flowalign.eval.suite import EvalReport, headline, judge_images, rows_of

    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), Left())
    found: dict[str, dict[str, Judged]] = {name: {} for name in config.models}
    sampling, world = settings(config), accelerator.num_processes
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        total = len(config.models) * sum(len(mark.prompts) * mark.images for mark in benchmarks)
        images = bar.add_task("images", total=total)
        for name in config.models:
            for mark in benchmarks:
                bar.update(images, description=f"{name}: {mark.name}")
                with using(backbone, config, name):
                    judged = judge_images(
                        backbone,
                        mark,
                        sampling,
                        accelerator,
                        keep=config.report.images,
                        features=reference.features if reference else None,
                        advance=lambda count: bar.advance(images, count * world),
                        seconds=config.score_seconds,
                        store=stores[name, mark.name],
                    )
                found[name][mark.name] = judged
                report = EvalReport(rows_of(mark, judged.rows), {}, {})
                console.print(f"{name}: {mark.name} {headline(report, [mark]):.3f}")
    return found


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
