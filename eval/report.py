"""The files of an evaluation: results.json, table.md, report.html, grid.png, manifest.json.

Where nothing was judged, only results.json. The page is the template `templates/report.html.j2`,
without other files and without a network; this module computes what it shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from flowalign.config import EvalStage, to_yaml
from flowalign.eval.compare import VERSION
from flowalign.eval.fidelity import GROUPS
from flowalign.eval.stats import AVERAGE, FIDELITY, FIELDS, part_of, shown
from flowalign.eval.suite import Benchmark, environment
from flowalign.eval.table import (
    Results,
    Table,
    breakdowns,
    compared,
    details,
    markdown,
    tables,
    tally,
)
from flowalign.rewards import describe
from flowalign.system import manifest
from flowalign.system.escape import escaped
from flowalign.system.files import replacing, to_json
from flowalign.system.images import pixels_of
from flowalign.training.data import spread, spread_text
from flowalign.training.report import page
from flowalign.training.report.pictures import (
    COLUMNS,
    LONGEST,
    Block,
    Row,
    comparison,
    score_text,
    webp,
)
from flowalign.training.report.results import unlearnt
from flowalign.types import EvalRow


def write_files(config: EvalStage, results: Results) -> str:
    """Write all files into config.output; returns the tables as Markdown, without the details."""
    folder, versions = Path(config.output), environment()
    content, texts = document(config, results, versions), {}
    short, drawn = "No benchmark has a reward: images only.\n", []
    if results.benchmarks:
        title = config.report.title
        on = f"{(n := len(results.judged))} model{'s' * (n > 1)} on {config.model.id}"
        title = title or f"flowalign eval: {on if config.adapters else ', '.join(config.given)}"
        scores, sentences = tables(results, config.compare), conditions(config, results, versions)
        equal = {name: text for name, a in config.adapters.items() if (text := unlearnt(a))}
        said = [f"{name}: {text}." for name, text in equal.items()]
        sentences = [*said, *sentences]
        content |= {"remarks": said, "tables": [table.plain() for table in scores]}
        heads = [f"{escaped(text, length=1000)}\n" for text in said]
        short, long = "\n".join([*heads, *map(markdown, scores)]), details(results.rows)
        measured = escaped(" ".join(sentences), length=10_000)
        tallies = [f"- {escaped(tally(*change))}\n" for change in compared(results, config.compare)]
        long = f"{long}\nWhat changed:\n\n{''.join(tallies)}" if tallies else long
        texts["table.md"] = f"{short}\nEvery metric:\n\n{long}\n{measured}\n"
        texts["report.html"] = render(
            results,
            scores,
            config.compare,
            title=title,
            conditions=sentences,
            config=to_yaml(config),
        )
        for b in results.benchmarks:
            if b.headline == "correct" and all("tag" in row for row in b.prompts.metadata):
                for model, judged in results.judged.items():
                    texts[f"geneval/{model}/{b.name}.jsonl"] = geneval_lines(judged[b.name].rows)
        if config.report.images:
            drawn.append("grid.png")
            legend = f"{results.shared.capitalize()} in every row; below each image its score."
            marks = dict.fromkeys(equal, "kept: update 0")
            comparison(folder / "grid.png", blocks(results, marks), title=f"{title}. {legend}")
    # JSON has no NaN
    texts["results.json"] = json.dumps(to_json(content), allow_nan=False, indent=1)
    for name, text in texts.items():
        with replacing(folder / name) as part:
            part.write_text(text, encoding="utf-8")
    manifest.write_manifest(folder, {}, [*texts, *drawn])
    return short


def document(config: EvalStage, results: Results, versions: Mapping[str, str]) -> dict[str, Any]:
    """results.json: every number, every image's scores, and who scored them."""

    def plain(row: EvalRow) -> dict[str, Any]:
        return {key: value for key, value in vars(row).items() if key != "influence"}

    def listed(rows: Mapping[str, EvalRow]) -> list[dict[str, Any]]:
        return [plain(row) for row in rows.values()]

    models = {}
    for model, judged in results.judged.items():
        scores, first = results.scores(model), next(iter(results.judged))
        models[model] = {
            "adapter": config.adapters.get(model),
            "rows": [plain(row) for row in results.rows[model]],
            "settings": config.settings_of(model),
            "environment": versions,
            "fidelity": plain(scores[FIDELITY]) if FIDELITY in scores else None,
            "average": plain(scores[AVERAGE]) if AVERAGE in scores else None,
            "difference": listed(results.difference(model, first)) if model != first else [],
            "images": {name: images.rows for name, images in judged.items()},
        }
    return {
        "version": VERSION,
        "config": config.model_dump(mode="json"),
        "benchmarks": {benchmark.name: _about(benchmark) for benchmark in results.benchmarks},
        "models": models,
        "compare": {
            model: {other: listed(results.difference(model, other)) for other in others}
            for model, others in config.compare.items()
        },
    }


def _about(benchmark: Benchmark) -> dict[str, Any]:
    """What its numbers depend on."""
    about = describe(benchmark.reward)
    return {"reward": about.pop("name"), "headline": benchmark.headline} | about


def geneval_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """What GenEval's evaluate_images.py would write of them; its summary_scores.py reads it."""
    lines = [
        {
            "filename": f"{row['index']:05}/samples/{row['copy']:05}.png",
            "tag": row["metadata"]["tag"],
            "prompt": row["prompt"],
            "correct": bool(row["correct"]),
            "reason": row["reason"] or "",
            "metadata": json.dumps({**row["metadata"], "prompt": row["prompt"]}),
        }
        for row in rows
        if math.isfinite(row.get("correct", math.nan))
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def conditions(config: EvalStage, results: Results, versions: Mapping[str, str]) -> list[str]:
    """How the numbers were measured, one sentence each."""
    s, m, f = config.sampling, config.model, config.fidelity
    own = [f", {scale:g} for {name}" for name, scale in config.guidance.items()]
    # benchmarks that share images also share prompts, which are counted once
    sets = {benchmark.source or benchmark.name: benchmark for benchmark in results.benchmarks}
    counts = []
    for name, benchmark in sets.items():
        prompts, copies = benchmark.prompts.prompts, benchmark.copies
        distinct = len(set(prompts))  # errors are over distinct prompts
        text = f"{len(prompts)} prompts of {name}"
        text += f" ({distinct} distinct)" if distinct < len(prompts) else ""
        counts.append(text + (f" with {copies} images each" if copies > 1 else ""))
    sentences = [
        f"Images of {m.id} ({m.dtype}, {m.listed_sizes}) for {', '.join(counts)}: {s.steps} Euler "
        f"steps, guidance {s.guidance:g}{''.join(own)}, seed {s.seed}; scored at 8 bits a channel."
    ]
    for name, given in config.given.items():
        said = ", ".join(f"{k} {v}" for k, v in config.settings_of(name).items() if v is not None)
        sentences.append(f"Another program made the images of {name} ({given.images}): {said}.")
    if not config.adapters:
        sentences[0] = f"{', '.join(counts)}; scored at 8 bits a channel."
    if len(results.benchmarks) > 1:
        sentences.append(
            "average: the unweighted mean of the benchmarks; its error is over prompts, also where "
            "benchmarks share images or prompts."
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
    if d := config.diversity:
        sentences.append(
            f"diversity: the mean of 1 - cosine of the {d.features!r} features of the images of a "
            "prompt, and their Vendi score, which is 1 to the number of images; not averaged."
        )
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [*sentences, f"Measured with {listed}."]


# grid.png -----------------------------------------------------------------------------------------


def blocks(results: Results, marks: Mapping[str, str]) -> list[Block]:
    """grid.png: a block per image set, with the first image of some of the report's prompts.
    marks: what else is said of a model."""
    sets: dict[str, list[Benchmark]] = {}
    for benchmark in results.benchmarks:
        sets.setdefault(benchmark.source or benchmark.name, []).append(benchmark)
    return [_block(name, judges, results, marks) for name, judges in sets.items()]


def _block(
    name: str, judges: Sequence[Benchmark], results: Results, marks: Mapping[str, str]
) -> Block:
    first, copies = judges[0], judges[0].copies
    pictured = next(iter(results.judged.values()))[first.name].pictured(copies)
    chosen = spread(len(pictured), COLUMNS)
    indices = [pictured[i] for i in chosen]
    title = f"{name}: {spread_text(indices, len(first.prompts))}"
    if copies > 1:
        title += f"; the first of {copies} images each"
    rows = []
    for model, judged in results.judged.items():
        pictures, numbers = judged[first.name].pictures, results.scores(model)
        captions = [
            "\n".join(
                score_text(judged[judge.name].rows[index * copies].get(part_of(judge), math.nan))
                for judge in judges
            )
            for index in indices
        ]
        notes = [f"{judge.name} {score_text(numbers[judge.name].mean)}" for judge in judges]
        note = "\n".join([*notes, *filter(None, [marks.get(model)])])
        images = [pixels_of(pictures[i * copies]) for i in chosen]
        rows.append(Row(images, captions, model, note))
    return Block(title, [first.prompts.prompts[index] for index in indices], rows)


# report.html --------------------------------------------------------------------------------------


EXTREMES = 6  # prompts that a model won, and that it lost, with their images


@dataclass(frozen=True)
class Bar:
    """A number as a bar: its end and the ends of its error, in percent of the axis."""

    model: str
    text: str
    n: int
    end: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """An image with its score."""

    source: str  # a data URI; "" = not kept, or an earlier benchmark shows the image called `name`
    name: str
    score: str
    level: float | None  # 0 = the benchmark's lowest score, 100 = its highest, None = no score
    hint: str  # every part of the score
    reason: str  # what the score rests on
    failed: bool  # judged wrong; without a verdict: in the lower half of the scores, or no score


@dataclass(frozen=True)
class Line:
    """One prompt."""

    index: int
    prompt: str
    tag: str
    disagree: bool  # what the function `disagree` says
    pictured: bool  # whether its images were kept
    cells: list[list[Cell]]  # for each model one per image


def render(
    results: Results,
    tables: Sequence[Table],
    compare: Mapping[str, Sequence[str]],
    *,
    title: str,
    conditions: Sequence[str],
    config: str,
) -> str:
    """The page. conditions: how the numbers were measured, one sentence each; config: YAML."""
    grids = {benchmark.name: lines(results, benchmark) for benchmark in results.benchmarks}
    pictured = {
        name: [line.index for line in grid if line.pictured] for name, grid in grids.items()
    }
    return page.render(
        "report.html.j2",
        title=title,
        conditions=conditions,
        config=config,
        shared=results.shared,
        tables=tables,
        models=list(results.judged),
        charts={
            f"{benchmark.name}, {title}": chart
            for benchmark in results.benchmarks
            for title, chart in bars(results, benchmark).items()
        },
        changes=changes(results, compare, grids) if any(pictured.values()) else [],
        grids=grids if any(pictured.values()) else {},
        rules={name: spread_text(rows, len(grids[name])) for name, rows in pictured.items()},
        copies={benchmark.name: benchmark.copies for benchmark in results.benchmarks},
        longest=LONGEST,
        drifts=results.drifts,
    )


def bars(results: Results, benchmark: Benchmark) -> dict[str, dict[str, list[Bar]]]:
    """{by what: {metric: one bar per model}}: the benchmark's `breakdowns`."""
    charts: dict[str, dict[str, dict[str, EvalRow]]] = {}
    for model, numbers in results.rows.items():
        for title, rows in breakdowns(benchmark, numbers).items():
            for row in rows:
                charts.setdefault(title, {}).setdefault(row.metric, {})[model] = row
    drawn = [row for chart in charts.values() for rows in chart.values() for row in rows.values()]
    axis = max([1.0, *(row.mean for row in drawn if row.n)])  # shares end at 1

    def bar(model: str, row: EvalRow) -> Bar:
        mean, error = (0.0 if math.isnan(x) else x / axis * 100 for x in (row.mean, row.stderr))
        low, high = max(0.0, mean - error), min(100.0, mean + error)
        return Bar(model, shown(row, 3), row.n, max(0.0, mean), low, max(low, high))

    return {
        title: {metric: [bar(*item) for item in rows.items()] for metric, rows in chart.items()}
        for title, chart in charts.items()
    }


@dataclass(frozen=True)
class Change:
    """What changed on a benchmark from one model to another."""

    title: str  # how many prompts were won and lost
    models: tuple[str, str]
    sides: list[list[tuple[str, Line]]]  # (difference, prompt), the largest first: gains, losses


def changes(
    results: Results, compare: Mapping[str, Sequence[str]], grids: Mapping[str, Sequence[Line]]
) -> list[Change]:
    """The prompts that changed most of those whose images were kept. grids: `lines` by
    benchmark."""
    listed, embedded = [], set[str]()
    places = {model: place for place, model in enumerate(results.judged)}

    def between(benchmark: Benchmark, index: int, models: tuple[str, str]) -> Line | None:
        """A prompt with the images of two models; None if one was not kept."""
        line, images, source = grids[benchmark.name][index], {}, benchmark.source or benchmark.name
        cells = [line.cells[places[model]] for model in models]
        for model, row in zip(models, cells, strict=True):
            store = results.stores.get((model, source))
            for copy, cell in enumerate(row):
                if not line.pictured and cell.name not in embedded:
                    if store is None or (image := store.load((index, copy))) is None:
                        return None
                    images[cell.name] = _data_uri(image)
        embedded.update(images)
        cells = [[replace(c, source=images.get(c.name, "")) for c in row] for row in cells]
        return replace(line, cells=cells, pictured=True)

    for model, other, benchmark, gaps in compared(results, compare):
        pair, sides = (other, model), []
        for sign in (1, -1):
            order = [i for i, gap in enumerate(gaps) if gap * sign > 0]
            order.sort(key=lambda i: -abs(gaps[i]))
            found = ((f"{gaps[i]:+.3g}", between(benchmark, i, pair)) for i in order)
            sides.append([*islice(((gap, line) for gap, line in found if line), EXTREMES)])
        listed.append(Change(tally(model, other, benchmark, gaps), pair, sides))
    return listed


def lines(results: Results, benchmark: Benchmark) -> list[Line]:
    """Every prompt, with its scores, and with its images by every model where they were kept.

    An image that an earlier benchmark also judged is only named, so that the page holds it once.
    """
    judged = {model: of[benchmark.name] for model, of in results.judged.items()}
    copies, part, source = benchmark.copies, part_of(benchmark), benchmark.source or benchmark.name
    sharing = [b.name for b in results.benchmarks if (b.source or b.name) == source]
    first = next(iter(judged.values()))
    # the same for all models
    pictures = {index: i for i, index in enumerate(first.pictured(copies))}
    scores = {model: [row.get(part, math.nan) for row in j.rows] for model, j in judged.items()}
    all_scores = [score for values in scores.values() for score in values if math.isfinite(score)]
    low, high = min(all_scores, default=0.0), max(all_scores, default=0.0)
    by_model = [results.means(benchmark, model) for model in judged]
    result = []
    for index in range(len(first.rows) // copies):
        cells = []
        for model, images in judged.items():
            row_cells, images_of_prompt = [], range(index * copies, (index + 1) * copies)
            for copy, i in enumerate(images_of_prompt):
                # the first of the benchmarks that share images shows them
                holds = index in pictures and benchmark.name == sharing[0]
                picture = images.pictures[pictures[index] * copies + copy] if holds else None
                name, score = f"{source}/{model}/{i}", scores[model][i]
                row_cells.append(_cell(images.rows[i], picture, name, score, low, high))
            cells.append(row_cells)
        row = first.rows[index * copies]
        tag = str(row["metadata"].get("tag", ""))
        differ = disagree([means[index] for means in by_model], high - low)
        result.append(Line(index, row["prompt"], tag, differ, index in pictures, cells))
    return result


def disagree(scores: Sequence[float], spread: float) -> bool:
    """Whether models disagree on a prompt, by their mean scores over its images.

    They do if the scores differ by more than half of the spread of all scores (any right and
    wrong do, where there is one image), or if some models have none (NaN).
    """
    valid = [score for score in scores if math.isfinite(score)]
    if len(valid) < len(scores):
        return bool(valid)
    return max(scores) - min(scores) > spread / 2


def _data_uri(image: Tensor) -> str:
    return f"data:image/webp;base64,{webp(image)}"


def _cell(
    row: Mapping[str, Any], picture: bytes | None, name: str, score: float, low: float, high: float
) -> Cell:
    verdict = row.get("correct", math.nan)
    if math.isnan(score):
        level = None
    elif high > low:
        level = 100 * (score - low) / (high - low)
    else:  # all scores are equal: only a verdict can tell whether they are bad
        level = 0.0 if verdict == 0 else 100.0
    failed = level is None or (verdict == 0 if math.isfinite(verdict) else level < 50)
    source = _data_uri(pixels_of(picture)) if picture is not None else ""
    text = "failed" if math.isnan(score) else f"{score:.2f}"
    hint = ", ".join(f"{key} {value:.3g}" for key, value in row.items() if key not in FIELDS)
    return Cell(source, name, text, level, hint, str(row.get("reason") or ""), failed)
