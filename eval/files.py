"""What an evaluation leaves behind: results.json, table.md, report.html, grid_<benchmark>.png; only
the first where nothing was judged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from flowalign.config import EvalStage, to_yaml
from flowalign.eval import report
from flowalign.eval.compare import VERSION
from flowalign.eval.stats import GROUPS
from flowalign.eval.suite import Benchmark, Judged, Settings, environment
from flowalign.eval.table import Results, Table, details, markdown, tables
from flowalign.pictures import pixels_of, side_by_side
from flowalign.rewards import describe
from flowalign.types import EvalReport, EvalRow

SHOWN = 16  # prompts of a grid_<benchmark>.png


def write(config: EvalStage, results: Results, settings: Settings) -> str:
    """Write all of them into config.output; returns the tables as Markdown, without the details."""
    folder, around = Path(config.output), environment()
    folder.mkdir(parents=True, exist_ok=True)
    sampling = vars(settings) | config.model.model_dump(mode="json")
    reports = {m: EvalReport(results.rows(m), sampling, around) for m in results.judged}
    content = _plain(document(config, results, reports))
    (folder / "results.json").write_text(json.dumps(content, allow_nan=False, indent=1))
    if not results.benchmarks:
        return "No benchmark has a reward: images only.\n"
    found = tables(results, config.compare)
    said, short = conditions(config, results, around), "\n".join(map(markdown, found))
    long = details({model: its.rows for model, its in reports.items()})
    (folder / "table.md").write_text(f"{short}\nEvery metric:\n\n{long}\n{' '.join(said)}\n")
    (folder / "report.html").write_text(page(config, results, found, said), encoding="utf-8")
    for mark in results.benchmarks:
        judged = {model: of[mark.name] for model, of in results.judged.items()}
        if config.report.images:
            draw(folder / f"grid_{mark.name}.png", mark, judged)
    return short


def document(
    config: EvalStage, results: Results, reports: Mapping[str, EvalReport]
) -> dict[str, Any]:
    """results.json: every number, every image's scores, and who scored them."""

    def listed(rows: Mapping[str, EvalRow]) -> list[dict[str, Any]]:
        return [vars(row) for row in rows.values()]

    models = {}
    for model, found in reports.items():
        scores, first = results.scores(model), results.first
        models[model] = {
            "adapter": config.models[model],
            "rows": [vars(row) for row in found.rows],
            "settings": found.settings,
            "environment": found.environment,
            "fidelity": vars(scores["fidelity"]) if "fidelity" in scores else None,
            "average": vars(scores["average"]) if "average" in scores else None,
            "difference": listed(results.difference(model, first)) if model != first else [],
            "images": {mark: judged.rows for mark, judged in results.judged[model].items()},
        }
    compared = {
        model: {other: listed(results.difference(model, other)) for other in others}
        for model, others in config.compare.items()
    }
    return {
        "version": VERSION,
        "config": config.model_dump(mode="json"),
        "benchmarks": {mark.name: _judge(mark) for mark in results.benchmarks},
        "models": models,
        "compare": compared,
    }


def _judge(benchmark: Benchmark) -> dict[str, Any]:
    """{"reward": its name, "headline": ..., "engine": ..., ...}: what its numbers depend on."""
    found = describe(benchmark.reward)
    return {"reward": found.pop("name"), "headline": benchmark.headline, **found}


def _plain(value: Any) -> Any:
    """The same for JSON: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def conditions(config: EvalStage, results: Results, environment: Mapping[str, str]) -> list[str]:
    """What the numbers hold for, a sentence each."""
    s, m, f = config.sampling, config.model, config.fidelity
    sets = {mark.source or mark.name: mark for mark in results.benchmarks}
    counts = ", ".join(
        f"{len(mark.prompts)} prompts of {name}"
        + (f" with {mark.images} images each" if mark.images > 1 else "")
        for name, mark in sets.items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in environment.items())
    found = [
        f"Images of {m.id} ({m.dtype}, {m.height}x{m.width}) for {counts}: {s.steps} Euler steps, "
        f"guidance {s.guidance:g}, seed {s.seed}; scored at 8 bits a channel."
    ]
    if len(results.benchmarks) > 1:
        found.append("average: the unweighted mean of the benchmarks.")
    for names, what in _dependent(results.benchmarks):
        found.append(
            f"{' and '.join(names)} {what}, yet the average's error takes them as independent."
        )
    for mark in config.benchmarks:
        if mark.layout:
            found.append(
                f"The images of {mark.name} are also in the official layout of {mark.layout}: "
                f"layouts/<model>/{mark.name}."
            )
    if f:
        found.append(
            f"fidelity: Fréchet distance, lower is better, between the {f.features!r} features of "
            f"all images of a model and of the reference {f.reference!r}; its error is a "
            f"jackknife over {GROUPS} groups of images."
        )
    return [*found, f"Measured with {versions}."]


def _dependent(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[list[str], str]]:
    """Names of benchmarks whose numbers go up and down together, and why."""
    sources = dict.fromkeys(mark.source for mark in benchmarks if mark.source)
    for source in sources:
        names = [mark.name for mark in benchmarks if mark.source == source]
        if len(names) > 1:
            yield names, f"judge the same images of {source}"
    sets = {mark.source or mark.name: set(mark.prompts.prompts) for mark in benchmarks}
    for a, b in combinations(sets, 2):
        if sets[a] & sets[b]:
            yield [a, b], "share prompts"


def page(config: EvalStage, results: Results, found: Sequence[Table], said: Sequence[str]) -> str:
    """report.html."""
    title = (
        config.report.title or f"flowalign eval: {len(results.judged)} models on {config.model.id}"
    )
    return report.render(
        results, found, title=title, conditions=said, config=to_yaml(config), model=config.model.id
    )


def draw(path: Path, benchmark: Benchmark, judged: Mapping[str, Judged]) -> None:
    """The first prompts of a benchmark, of each its first image: one row of images per model, its
    score under each."""
    part, copies = benchmark.headline or "value", benchmark.images
    first = slice(0, SHOWN * copies, copies)
    images = [[pixels_of(file) for file in found.pictures[first]] for found in judged.values()]
    captions = [
        [
            f"{name}: {row.get(part, math.nan):.2f}\n{row['prompt']}"
            for row in found.rows[: len(found.pictures)][first]
        ]
        for name, found in judged.items()
    ]
    title = f"{benchmark.name}: same prompts and noise, one row a model"
    if copies > 1:
        title += f"; the first of {copies} images each"
    side_by_side(path, images, captions, title=title)
