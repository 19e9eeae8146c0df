"""The files of an evaluation: results.json, table.md, report.html, grid.png, manifest.json.

The page is the template `templates/report.html.j2`, without other files and without a network; this
module computes what it shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from flowalign.config import EvalStage, to_yaml
from flowalign.eval.compare import VERSION
from flowalign.eval.fidelity import GROUPS
from flowalign.eval.scores import to_row
from flowalign.eval.stats import AVERAGE, FIDELITY, headline_row, part_of
from flowalign.eval.suite import Benchmark, environment
from flowalign.eval.table import Numbers, Results, metric_table, tables
from flowalign.report import page
from flowalign.report.pictures import (
    COLUMNS,
    LONGEST_SIDE,
    Block,
    Row,
    comparison,
    score_text,
    webp,
)
from flowalign.report.summary import unlearnt
from flowalign.rewards import describe
from flowalign.system import manifest
from flowalign.system.escape import escaped
from flowalign.system.files import replacing, to_json
from flowalign.system.images import pixels_of
from flowalign.system.table import Table
from flowalign.training.data import spread, spread_text
from flowalign.types import EvalRow


def write_report(config: EvalStage, results: Results) -> str:
    """Write all files into config.output; returns the tables as Markdown, without the details."""
    folder = config.folder
    versions = environment()
    drawn = []
    count = len(results.judged)
    on = f"{count} model{'s' if count > 1 else ''} on {config.model.id}"
    title = on if config.adapters else ", ".join(config.given)
    title = config.report.title or f"flowalign eval: {title}"
    unlearned = {name: unlearnt(adapter) for name, adapter in config.adapters.items()}
    remarks = [f"{name}: {text}." for name, text in unlearned.items() if text]
    sentences = [*remarks, *conditions(config, results, versions)]
    scores = tables(results, config.compare)
    heads = [f"{escaped(text, length=1000)}\n" for text in remarks]
    short = "\n".join([*heads, *(numbers.markdown() for numbers in scores)])
    metrics = metric_table(results.rows)
    measured = escaped(" ".join(sentences), length=10_000)
    about = {"title": title, "conditions": sentences, "config": to_yaml(config)}
    if config.report.images:
        drawn.append(folder.grid.name)
        legend = f"{results.shared.capitalize()} in every row; below each image its score."
        comparison(folder.grid, [*blocks(results, unlearned)], title=f"{title}. {legend}")
    content = document(config, results, versions)
    content |= {"remarks": remarks, "tables": [numbers.plain() for numbers in scores]}
    texts = {
        folder.table: f"{short}\nEvery metric:\n\n{metrics.markdown()}\n\n{measured}\n",
        folder.page: render(results, scores, metrics, **about),
        # JSON has no NaN
        folder.results: json.dumps(to_json(content), allow_nan=False, indent=1),
    }
    for path, text in texts.items():
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    written = [path.name for path in texts]
    manifest.write_manifest(folder.path, {}, [*written, *drawn])
    return short


def document(config: EvalStage, results: Results, versions: Mapping[str, str]) -> dict[str, Any]:
    """The content of results.json: every number, every image's scores, and who scored them."""

    def plain(row: EvalRow | None) -> dict[str, Any] | None:
        return row and {key: value for key, value in vars(row).items() if key != "influence"}

    def about(benchmark: Benchmark) -> dict[str, Any]:
        described = describe(benchmark.reward)
        return {"reward": described.pop("name"), "headline": benchmark.headline} | described

    def listed(model: str, other: str) -> list[Any]:
        return [plain(row) for row in results.difference(model, other).values()]

    models = {}
    matrix = results.matrix
    first = next(iter(results.judged))
    for model, judged in results.judged.items():
        scores = results.scores(model)
        models[model] = {
            "adapter": config.adapters.get(model),
            "rows": [plain(row) for row in results.rows[model]],
            "settings": config.settings_of(model),
            "environment": versions,
            "fidelity": plain(scores.get(FIDELITY)),
            "average": plain(scores.get(AVERAGE)),
            "difference": listed(model, first) if model != first else [],
            "matrix": {k: plain(r) for k, r in matrix.rows[model].items()} if matrix else None,
            "images": {name: [*map(to_row, images.scores)] for name, images in judged.items()},
        }
    return {
        "version": VERSION,
        "config": config.model_dump(mode="json"),
        "benchmarks": {
            b.name: about(b) | {"average": results.counts_in(b)} for b in results.benchmarks
        },
        "models": models,
        "compare": {
            model: {other: listed(model, other) for other in others}
            for model, others in config.compare.items()
        },
    }


def conditions(config: EvalStage, results: Results, versions: Mapping[str, str]) -> list[str]:
    """How the numbers were measured, one sentence each."""
    s, m, f = config.sampling, config.model, config.fidelity
    scales = [f", {scale:g} for {name}" for name, scale in config.guidance.items()]
    # benchmarks that share images also share prompts, which are counted once
    sets = {benchmark.image_set: benchmark for benchmark in results.benchmarks}
    counts = []
    for name, benchmark in sets.items():
        prompts = benchmark.prompts.prompts
        copies = benchmark.copies
        distinct = len(set(prompts))  # errors are over distinct prompts
        text = f"{len(prompts)} prompts of {name}"
        text += f" ({distinct} distinct)" if distinct < len(prompts) else ""
        counts.append(text + (f" with {copies} images each" if copies > 1 else ""))
    sentences = [
        f"Images of {m.id} ({m.dtype}, {m.height}x{m.width}) for {', '.join(counts)}: {s.steps} "
        f"Euler steps, guidance {s.guidance:g}{''.join(scales)}, seed {s.seed}; "
        "scored at 8 bits a channel."
    ]
    for name, source in config.given.items():
        known = ", ".join(f"{k} {v}" for k, v in config.settings_of(name).items() if v is not None)
        sentences.append(f"Another program made the images of {name} ({source.images}): {known}.")
    if not config.adapters:
        sentences[0] = f"{', '.join(counts)}; scored at 8 bits a channel."
    if len(results.benchmarks) > 1:
        sentences.append(
            "average: the unweighted mean of the benchmarks; its error is over prompts, also where "
            "benchmarks share images or prompts."
        )
    if f:
        sentences.append(
            f"fidelity: Fréchet distance, lower is better, between the {f.features!r} features of "
            f"all images of a model and of the reference {f.reference!r}; its error is a "
            f"jackknife over up to {GROUPS} groups of prompts."
        )
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [*sentences, f"Measured with {listed}."]


# grid.png -----------------------------------------------------------------------------------------


def blocks(results: Results, unlearned: Mapping[str, str]) -> Iterator[Block]:
    """The blocks of grid.png: one per image set, with the first image of some of the report's
    prompts. unlearned: `unlearnt` of each model."""
    for name, group in groupby(results.benchmarks, key=lambda benchmark: benchmark.image_set):
        judges = [*group]
        rows = []
        first = judges[0]
        copies = judges[0].copies
        pictured = results.pictured(judges[0])
        indices = [pictured[i] for i in spread(len(pictured), COLUMNS)]
        for model, judged in results.judged.items():
            captions = []
            for index in indices:
                firsts = [judged[j.name].scores[index * copies].number(part_of(j)) for j in judges]
                captions.append("\n".join(map(score_text, firsts)))
            numbers = [headline_row(judge, results.rows[model]).mean for judge in judges]
            lines = [f"{j.name} {score_text(n)}" for j, n in zip(judges, numbers, strict=True)]
            images = [pixels_of(results.picture(model, first, i, 0)) for i in indices]
            if unlearned.get(model):
                lines.append("kept: update 0")
            rows.append(Row(images, captions, model, "\n".join(lines)))
        title = f"{name}: {spread_text(indices, len(first.prompts))}"
        title += f"; the first of {copies} images each" if copies > 1 else ""
        yield Block(title, [first.prompts.prompts[index] for index in indices], rows)


# report.html --------------------------------------------------------------------------------------


class ScoredImage(NamedTuple):
    """An image with its score."""

    name: str
    picture: bytes  # a PNG file; empty where the report shows none
    score: str
    level: float | None  # 0 = the benchmark's lowest score, 100 = its highest, None = no score
    hint: str  # every part of the score
    reason: str  # the evidence for the score
    failed: bool  # judged wrong; without a verdict: in the lower half of the scores, or no score


class Line(NamedTuple):
    index: int
    prompt: str
    tag: str
    disagree: bool  # result of `disagree`
    cells: Mapping[str, Sequence[ScoredImage]]  # by model, one per image


def render(results: Results, tables: Sequence[Numbers], metrics: Table, **about: Any) -> str:
    """The page. metrics: `metric_table`. about: its title; conditions: how
    the numbers were measured, one sentence each; config: YAML."""
    grids = {benchmark.name: lines(results, benchmark) for benchmark in results.benchmarks}
    pictured = {benchmark.name: results.pictured(benchmark) for benchmark in results.benchmarks}
    there = set[str]()

    def source(cell: ScoredImage) -> str:
        """The image as a data URI; "" where the page has it already."""
        if cell.name in there:
            return ""
        there.add(cell.name)
        return f"data:image/webp;base64,{webp(pixels_of(cell.picture))}"

    return page.render(
        "report.html.j2",
        **about,
        shared=results.shared,
        tables=tables,
        models=list(results.judged),
        metrics=metrics.html(),
        # also as a part of another reward, or behind a URL
        geneval='"geneval"' in json.dumps([describe(b.reward) for b in results.benchmarks]),
        grids=grids if any(pictured.values()) else {},
        pictured=pictured,
        rule=lambda rows, lines: spread_text(rows, len(lines)),
        copies={benchmark.name: benchmark.copies for benchmark in results.benchmarks},
        source=source,
        longest=LONGEST_SIDE,
        drifts=results.drifts,
    )


def lines(results: Results, benchmark: Benchmark) -> list[Line]:
    """Every prompt, with its scores by every model."""
    part = part_of(benchmark)
    copies = benchmark.copies
    judged = {model: of[benchmark.name].scores for model, of in results.judged.items()}
    numbers = [score.number(part) for scores in judged.values() for score in scores]
    finite = list(filter(math.isfinite, numbers))
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    pictured = results.pictured(benchmark)

    def cell(model: str, number: int) -> ScoredImage:
        score = judged[model][number]
        value = score.number(part)
        verdict = score.number("correct")
        level = None if math.isnan(value) else 100.0
        if level and high > low:
            level = 100 * (value - low) / (high - low)
        elif level and verdict == 0:  # all scores are equal: only a verdict says that they are bad
            level = 0.0
        place = divmod(number, copies)  # prompt, copy
        return ScoredImage(
            f"{benchmark.image_set}/{model}/{number}",
            results.picture(model, benchmark, *place) if place[0] in pictured else b"",
            score_text(value),
            level,
            ", ".join(f"{name} {number:.3g}" for name, number in score.numbers.items()),
            score.reason or "",
            level is None or (verdict == 0 if math.isfinite(verdict) else level < 50),
        )

    result = []
    for index, means in enumerate(zip(*(results.means(benchmark, m) for m in judged), strict=True)):
        images = range(index * copies, (index + 1) * copies)
        cells = {model: [cell(model, number) for number in images] for model in judged}
        image = next(iter(judged.values()))[images[0]].image
        tag = str(image.metadata.get("tag", ""))
        result.append(Line(index, image.prompt, tag, disagree(means, high - low), cells))
    return result


def disagree(scores: Sequence[float], spread: float) -> bool:
    """Whether models disagree on a prompt, by their mean scores over its images: the scores differ
    by more than half of the spread of all scores, or only some models have none (NaN)."""
    valid = list(filter(math.isfinite, scores))
    if len(valid) < len(scores):
        return bool(valid)
    return max(scores) - min(scores) > spread / 2
