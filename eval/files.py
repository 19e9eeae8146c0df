"""The files of an evaluation: results.json, table.md, report.html, grid.png, manifest.json.

Where nothing was judged, only results.json.
"""

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
from flowalign.eval.fidelity import GROUPS
from flowalign.eval.stats import AVERAGE, FIDELITY, part_of
from flowalign.eval.suite import Benchmark, environment
from flowalign.eval.table import Results, details, markdown, tables
from flowalign.rewards import describe
from flowalign.system import manifest
from flowalign.system.escape import escaped
from flowalign.system.files import replacing, to_json
from flowalign.training.data import spread, spread_text
from flowalign.training.report.pictures import (
    COLUMNS,
    Block,
    comparison,
    pixels_of,
    scored_row,
)
from flowalign.types import EvalRow


def write(config: EvalStage, results: Results) -> str:
    """Write all files into config.output, and their manifest; returns the tables as Markdown,
    without the details."""
    short, names = _write_all(config, results)
    manifest.write_manifest(config.output, {}, names)
    return short


def _write_all(config: EvalStage, results: Results) -> tuple[str, list[str]]:
    """The tables, and the names of what was written."""
    folder, versions = Path(config.output), environment()
    content = to_json(document(config, results, versions))  # JSON has no NaN
    _write(folder / "results.json", json.dumps(content, allow_nan=False, indent=1))
    if not results.benchmarks:
        return "No benchmark has a reward: images only.\n", ["results.json"]
    written, notes = tables(results, config.compare), conditions(config, results, versions)
    short, long = "\n".join(map(markdown, written)), details(results.rows)
    said = escaped(" ".join(notes), length=10_000)
    _write(folder / "table.md", f"{short}\nEvery metric:\n\n{long}\n{said}\n")
    model = config.model.id
    title = config.report.title or f"flowalign eval: {len(results.judged)} models on {model}"
    page = report.render(
        results, written, title=title, conditions=notes, config=to_yaml(config), model=model
    )
    _write(folder / "report.html", page)
    names = ["results.json", "table.md", "report.html"]
    if config.report.images:
        comparison(folder / "grid.png", blocks(results), title=f"{title}.")
        names.append("grid.png")
    return short, names


def _write(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def document(config: EvalStage, results: Results, versions: Mapping[str, str]) -> dict[str, Any]:
    """results.json: every number, every image's scores, and who scored them."""

    def listed(rows: Mapping[str, EvalRow]) -> list[dict[str, Any]]:
        return [vars(row) for row in rows.values()]

    sampling = config.sampling.model_dump() | config.model.model_dump(mode="json")
    models = {}
    for model, judged in results.judged.items():
        scores, first = results.scores(model), next(iter(results.judged))
        models[model] = {
            "adapter": config.models[model],
            "rows": [vars(row) for row in results.rows[model]],
            "settings": sampling,
            "environment": versions,
            "fidelity": vars(scores[FIDELITY]) if FIDELITY in scores else None,
            "average": vars(scores[AVERAGE]) if AVERAGE in scores else None,
            "difference": listed(results.difference(model, first)) if model != first else [],
            "images": {name: images.rows for name, images in judged.items()},
        }
    benchmarks = {}
    for benchmark in results.benchmarks:  # what their numbers depend on
        about = describe(benchmark.reward)
        reward = {"reward": about.pop("name"), "headline": benchmark.headline}
        benchmarks[benchmark.name] = reward | about
    return {
        "version": VERSION,
        "config": config.model_dump(mode="json"),
        "benchmarks": benchmarks,
        "models": models,
        "compare": {
            model: {other: listed(results.difference(model, other)) for other in others}
            for model, others in config.compare.items()
        },
    }


def conditions(config: EvalStage, results: Results, versions: Mapping[str, str]) -> list[str]:
    """How the numbers were measured, one sentence each."""
    s, m, f = config.sampling, config.model, config.fidelity
    # benchmarks that share images also share prompts, which are counted once
    sets = {benchmark.source or benchmark.name: benchmark for benchmark in results.benchmarks}
    counts = ", ".join(
        f"{len(benchmark.prompts)} prompts of {name}{_distinct(benchmark)}"
        + (f" with {benchmark.copies} images each" if benchmark.copies > 1 else "")
        for name, benchmark in sets.items()
    )
    sentences = [
        f"Images of {m.id} ({m.dtype}, {m.listed_sizes}) for {counts}: {s.steps} Euler steps, "
        f"guidance {s.guidance:g}, seed {s.seed}; scored at 8 bits a channel."
    ]
    if len(results.benchmarks) > 1:
        sentences.append("average: the unweighted mean of the benchmarks.")
    for names, what in _dependent(results.benchmarks):
        sentences.append(
            f"{' and '.join(names)} {what}, yet the average's error takes them as independent."
        )
    for benchmark in config.benchmarks:
        if benchmark.layout:
            sentences.append(
                f"The images of {benchmark.name} are also in the official layout of "
                f"{benchmark.layout}: layouts/MODEL/{benchmark.name}."
            )
    if f:
        sentences.append(
            f"fidelity: Fréchet distance, lower is better, between the {f.features!r} features of "
            f"all images of a model and of the reference {f.reference!r}; its error is a "
            f"jackknife over up to {GROUPS} groups of prompts."
        )
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [*sentences, f"Measured with {listed}."]


def _distinct(benchmark: Benchmark) -> str:  # errors are over distinct prompts
    distinct = len(set(benchmark.prompts.prompts))
    return f" ({distinct} distinct)" if distinct < len(benchmark.prompts) else ""


def _dependent(benchmarks: Sequence[Benchmark]) -> Iterator[tuple[list[str], str]]:
    """(names of benchmarks whose numbers are correlated, why)."""
    sources = dict.fromkeys(benchmark.source for benchmark in benchmarks if benchmark.source)
    for source in sources:
        names = [benchmark.name for benchmark in benchmarks if benchmark.source == source]
        if len(names) > 1:
            yield names, f"judge the same images of {source}"
    sets = {b.source or b.name: set(b.prompts.prompts) for b in benchmarks}
    for a, b in combinations(sets, 2):
        if sets[a] & sets[b]:
            yield [a, b], "share prompts"


def blocks(results: Results) -> list[Block]:
    """grid.png: a block per image set, with the first image of some of the report's prompts."""
    sets: dict[str, list[Benchmark]] = {}
    for benchmark in results.benchmarks:
        sets.setdefault(benchmark.source or benchmark.name, []).append(benchmark)
    return [_block(name, judges, results) for name, judges in sets.items()]


def _block(name: str, judges: Sequence[Benchmark], results: Results) -> Block:
    first, copies = judges[0], judges[0].copies
    pictured = next(iter(results.judged.values()))[first.name].shown(
        copies
    )  # the same for all models
    chosen = spread(len(pictured), COLUMNS)
    indices = [pictured[i] for i in chosen]
    title = f"{name}: {spread_text(indices, len(first.prompts))}"
    if copies > 1:
        title += f"; the first of {copies} images each"
    rows = []
    for model, judged in results.judged.items():
        pictures, numbers = judged[first.name].pictures, results.scores(model)
        images = [pixels_of(pictures[i * copies]) for i in chosen]
        scores = {
            judge.name: [
                judged[judge.name].rows[index * copies].get(part_of(judge), math.nan)
                for index in indices
            ]
            for judge in judges
        }
        means = {judge.name: numbers[judge.name].mean for judge in judges}
        rows.append(scored_row(model, images, scores, means))
    return Block(title, [first.prompts.prompts[index] for index in indices], rows)
