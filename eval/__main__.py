"""Score models on held-out prompts: `python -m flowalign.eval --config FILE [key.path=value ...]`.

Writes results.json, table.md and one grid_<benchmark>.png per benchmark into `output`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.config import ConfigError, EvalConfig, check_world, load

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flowalign.backbone import Backbone
    from flowalign.eval.suite import Benchmark, Judged, Settings

SHOWN = 16  # prompts of a grid


def parser() -> argparse.ArgumentParser:
    """The command line of `eval`."""
    found = argparse.ArgumentParser("flowalign eval", description="Score models from a config.")
    found.add_argument("--config", required=True, help="a YAML file, such as configs/tiny/eval...")
    found.add_argument("overrides", nargs="*", metavar="key.path=value", help="change the config")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 the config or its model is refused, 130 interrupted."""
    args = parser().parse_args(argv)
    from flowalign.backbone import ModelError

    try:
        evaluate(load(args.config, args.overrides, stage=EvalConfig))
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def evaluate(config: EvalConfig) -> Path:
    """Score every model on every benchmark; returns the folder of the results.

    Raises ConfigError before any image is sampled.
    """
    from accelerate import Accelerator

    from flowalign.backbone import Backbone
    from flowalign.progress import quiet

    quiet()
    accelerator = Accelerator()
    check_world(config, accelerator.num_processes)
    benchmarks = wire(config)
    backbone = Backbone.load(config.model, accelerator.device)
    load_adapters(backbone, config)
    found = judge(backbone, config, benchmarks, accelerator)
    if accelerator.is_main_process:
        write(config, benchmarks, found)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return Path(config.output)


def wire(config: EvalConfig) -> list[Benchmark]:
    """The benchmarks with their prompts and rewards; ConfigError if one cannot be built."""
    from flowalign import rewards
    from flowalign.data import load_prompts
    from flowalign.eval.suite import Benchmark

    found, problems = [], []
    for index, mark in enumerate(config.benchmarks):
        prompts = load_prompts(mark.prompts, mark.name)
        count = min(len(prompts), mark.limit or len(prompts))
        try:
            reward = rewards.build(mark.reward.name, **mark.reward.options)
        except (ImportError, ValueError, OSError) as error:
            problems.append(f"benchmarks.{index}.reward: {error}")
            continue
        found.append(Benchmark(mark.name, prompts.select(range(count)), reward))
    if problems:
        raise ConfigError(problems)
    return found


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
    accelerator: Accelerator,
) -> dict[str, dict[str, Judged]]:
    """{model: {benchmark: its judged images}}, with a bar on a terminal and a line for each."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    from flowalign.eval.suite import EvalReport, headline, judge_images, rows_of

    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), Left())
    found: dict[str, dict[str, Judged]] = {name: {} for name in config.models}
    sampling, world = settings(config), accelerator.num_processes
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        total = len(config.models) * sum(len(benchmark.prompts) for benchmark in benchmarks)
        images = bar.add_task("images", total=total)
        for name in config.models:
            for mark in benchmarks:
                bar.update(images, description=f"{name}: {mark.name}")
                with using(backbone, config, name):
                    found[name][mark.name] = judge_images(
                        backbone,
                        mark,
                        sampling,
                        accelerator,
                        keep=SHOWN,
                        advance=lambda count: bar.advance(images, count * world),
                    )
                report = EvalReport(rows_of(mark, found[name][mark.name].rows), {}, {})
                console.print(f"{name}: {mark.name} {headline(report, [mark]):.3f}")
    return found


def write(
    config: EvalConfig, benchmarks: Sequence[Benchmark], found: Mapping[str, Mapping[str, Judged]]
) -> None:
    """The three kinds of files of an evaluation; the table is printed, too."""
    from flowalign.eval.suite import EvalReport, difference, environment, markdown, rows_of

    folder, shared = Path(config.output), environment()
    sampling = vars(settings(config)) | config.model.model_dump(mode="json")
    reports, differences = {}, {}
    first = found[next(iter(config.models))]
    for name, judged in found.items():
        rows = [row for mark in benchmarks for row in rows_of(mark, judged[mark.name].rows)]
        reports[name] = EvalReport(rows, sampling, shared)
        if judged is not first:
            differences[name] = [
                difference(mark, first[mark.name].rows, judged[mark.name].rows)
                for mark in benchmarks
            ]
    folder.mkdir(parents=True, exist_ok=True)
    models = {
        name: {
            "adapter": config.models[name],
            **vars(report),
            "rows": [vars(row) for row in report.rows],
            "difference": [vars(row) for row in differences.get(name, [])],
            "images": {mark: judged.rows for mark, judged in found[name].items()},
        }
        for name, report in reports.items()
    }
    results = {"config": config.model_dump(mode="json"), "models": models}
    (folder / "results.json").write_text(json.dumps(_plain(results), allow_nan=False, indent=1))
    table = markdown(reports, differences)
    (folder / "table.md").write_text(f"{table}\n{_conditions(config, shared)}\n")
    for mark in benchmarks:
        draw(folder / f"grid_{mark.name}.png", mark, {n: j[mark.name] for n, j in found.items()})
    show(table)


def _plain(value: Any) -> Any:
    """The same for JSON: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _conditions(config: EvalConfig, environment: Mapping[str, str]) -> str:
    """What the numbers hold for, in two sentences."""
    s, m = config.sampling, config.model
    versions = ", ".join(f"{name} {version}" for name, version in environment.items())
    return (
        f"One image per prompt of {m.id} ({m.dtype}, {m.height}x{m.width}): {s.steps} Euler "
        f"steps, guidance {s.guidance:g}, seed {s.seed}. Measured with {versions}."
    )


def draw(path: Path, benchmark: Benchmark, judged: Mapping[str, Judged]) -> None:
    """The first prompts of a benchmark: one row of images per model, its score under each."""
    from flowalign.pictures import side_by_side

    part = benchmark.headline or "value"
    captions = [
        [
            f"{name}: {row.get(part, math.nan):.2f}\n{row['prompt']}"
            for row in found.rows[: len(found.pictures)]
        ]
        for name, found in judged.items()
    ]
    title = f"{benchmark.name}: same prompts and noise, one row a model"
    side_by_side(path, [list(f.pictures) for f in judged.values()], captions, title=title)


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
