"""One table of evaluations of the same models, trained with several seeds, for a paper.

    flowalign eval table outputs/tiny/seed_{1,2}/table --pairs flow_opd-merge --format latex

Every result is of one seed. A model's number is the mean over seeds and prompts; its standard error
has both: how the numbers of the seeds differ, and how prompts differ that all seeds share.
Differences of two models are of equal seeds, prompts and noise. An average is taken in each seed
first, because its tasks share the seed, and may share prompts.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from flowalign.eval import stats
from flowalign.eval.compare import Column, Incomparable, differences, load_results, scores_of
from flowalign.system.exit import refusing
from flowalign.system.table import Mark, Table, latex
from flowalign.types import EvalRow, ImageScore

Document = Mapping[str, Any]  # a results.json


class SeedMean(NamedTuple):
    """A mean over seeds and prompts; error and margin may be NaN."""

    mean: float
    error: float  # standard error
    margin: float  # half of the width of its 95 % interval


@dataclass(frozen=True)
class SeedTable:
    """Numbers over seeds.

    rows {model: {column: number}}: benchmarks, then averages. gaps: a model minus another, by "A −
    B"; bold where it is beyond its margin. bold {column: model}: the model that is `ahead` of every
    other one.
    """

    seeds: int
    rows: Mapping[str, Mapping[str, SeedMean]]
    gaps: Mapping[str, Mapping[str, SeedMean]]
    bold: Mapping[str, str]

    @property
    def tables(self) -> list[Table]:
        """The table of the numbers, then the table of the gaps if there are any."""
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        tables = [_table(seeds, self.rows, self.bold, ".3f")]
        if self.gaps:
            tables.append(_table("difference", self.gaps, None, "+.3f"))
        return tables


def _table(
    head: str,
    rows: Mapping[str, Mapping[str, SeedMean]],
    leaders: Mapping[str, str] | None,
    form: str,
) -> Table:
    """leaders {column: the row in bold}; None = bold is what lies beyond its margin."""
    lines = []
    marks = {}
    columns = next(iter(rows.values()))
    for label, cells in rows.items():
        line = [label]
        for column, cell in cells.items():
            bold = abs(cell.mean) > cell.margin
            if leaders is not None:
                bold = leaders.get(column) == label
            if bold:
                marks[len(lines), len(line)] = Mark("best")
            error = "" if math.isnan(cell.error) else f" ± {cell.error:.3f}"
            line.append(f"{cell.mean:{form}}{error}")
        lines.append(line)
    return Table([head, *columns], lines, marks=marks)


def seed_table(
    documents: Sequence[Document],
    models: Sequence[str] | None = None,
    pairs: Sequence[tuple[str, str]] = (),
) -> SeedTable:
    """The table of the results of several seeds (`load_results`), or of one.

    models: the rows; None = all that every result has. pairs: models (a, b) of which it has the
    difference a − b. Raises Incomparable for results that do not measure the same, and ValueError
    for a model that one of them lacks, or an image without a score.
    """
    common = [m for m in documents[0]["models"] if all(m in d["models"] for d in documents)]
    models = models or common
    named = [*models, *itertools.chain(*pairs)]
    if unknown := [name for name in named if name not in common]:
        raise ValueError(f"no model {unknown[0]!r} in all results; they share {', '.join(common)}.")
    for document in documents[1:]:
        problems = []
        for model in models:
            problems += differences(documents[0], document, (model, model))
        if document["benchmarks"].keys() != documents[0]["benchmarks"].keys():
            problems.append("they have other benchmarks")
        if problems:
            raise Incomparable("\n  - ".join(["these seeds do not compare:", *problems]))
    rows = {model: cells(documents, model) for model in models}
    gaps = {f"{a} − {b}": cells(documents, a, b) for a, b in pairs}
    return SeedTable(len(documents), rows, gaps, ahead(documents, rows))


def ahead(
    documents: Sequence[Document], rows: Mapping[str, Mapping[str, SeedMean]]
) -> dict[str, str]:
    """{column: the model in bold}: the one whose paired difference to every other model is above 0
    by more than its margin. A column without such a model has no bold number."""
    leaders = {}
    if len(rows) < 2:
        return leaders
    gap = cache(lambda first, second: cells(documents, first, second))
    for column in next(iter(rows.values())):
        first, *others = sorted(rows, key=lambda model: -rows[model][column].mean)
        differences = (gap(first, other)[column] for other in others)
        if all(difference.mean > difference.margin for difference in differences):
            leaders[column] = first
    return leaders


def over_seeds(rows: Sequence[EvalRow]) -> SeedMean:
    """Mean, standard error and margin of a number that was measured once a seed, on the same
    prompts.

    Seeds and prompts are crossed random effects. A seed's number is m_s = mean + seed + sum over
    prompts of (prompt + rest_s), where a prompt stands for all its images and tasks. The variance
    of m_s over seeds has the seed and the rest. What all seeds share of the prompts is added: the
    sum of squares of a prompt's mean influence, less the rest that is left in that mean, which is
    the influence's variance over seeds / seeds (0 where it would be negative). One seed has the
    prompts' error alone.

    The margin adds the squares of the margins of both parts, each by Student's t with its own
    degrees of freedom, seeds - 1 and prompts - 1. Its interval covers at least 95 % (Banerjee,
    1961). Welch and Satterthwaite's degrees of freedom are too many for two or three seeds: where
    the seeds' part is small by chance, they are the prompts'.
    """
    means = np.array([row.mean for row in rows])
    influence = np.array([[row.influence[prompt] for prompt in rows[0].influence] for row in rows])
    seeds, prompts = influence.shape
    of_prompts = (influence.mean(0) ** 2).sum()
    of_seeds = reach = 0.0
    if seeds > 1:
        rest = influence.var(0, ddof=1).sum() / seeds
        of_prompts = np.maximum(0.0, of_prompts - rest)  # NaN for one prompt stays
        of_seeds = means.var(ddof=1) / seeds
        reach = stats.student_t(seeds - 1)
    margin = stats.student_t(prompts - 1) ** 2 * of_prompts + reach**2 * of_seeds
    return SeedMean(float(means.mean()), math.sqrt(of_prompts + of_seeds), math.sqrt(margin))


def images(documents: Sequence[Document], model: str, name: str) -> list[list[ImageScore]]:
    """A model's scores of a benchmark, one list per seed. Raises ValueError if an image has no
    score or the seeds have different prompts."""
    part = stats.part_of(Column(name, documents[0]["benchmarks"][name].get("headline")))
    seeds = [scores_of(document["models"][model], name) for document in documents]
    first = [score.image for score in seeds[0]]
    lost = 0
    for scores in seeds:
        if [score.image for score in scores] != first:
            raise ValueError(f"{model}, {name}: the seeds have other prompts")
        lost += sum(not math.isfinite(score.number(part)) for score in scores)
    if lost:
        raise ValueError(f"{model}, {name}: {lost} images have no score")
    return seeds


def averages(document: Document) -> dict[str, list[str]]:
    """{average: the benchmarks that count in it}, by their mark `average`."""
    marks = {name: judge["average"] for name, judge in document["benchmarks"].items()}
    heads = [head for head in ("average", "own", "others") if head in marks.values()]
    return {head: [name for name in marks if marks[name] == head] for head in heads}


def cells(documents: Sequence[Document], first: str, second: str = "") -> dict[str, SeedMean]:
    """A model's number for every benchmark and average; with `second`, first minus second."""
    rows = {}  # {column: a row per seed}
    for name, judge in documents[0]["benchmarks"].items():
        column = Column(name, judge.get("headline"))
        scores = images(documents, first, name)
        if second:
            pairs = zip(images(documents, second, name), scores, strict=True)
            rows[name] = [stats.difference(column, *pair) for pair in pairs]
        else:
            rows[name] = [stats.headline_rows(column, seed)[0] for seed in scores]
    for head, names in averages(documents[0]).items():
        by_seed = zip(*(rows[name] for name in names), strict=True)
        rows[head] = [stats.average(seed) for seed in by_seed]
    return {name: over_seeds(numbers) for name, numbers in rows.items()}


# As text -----------------------------------------------------------------------------------------


def markdown(numbers: SeedTable) -> str:
    """Numbers, then gaps, as tables."""
    return "\n\n".join(table.markdown() for table in numbers.tables) + "\n"


TABLE_FORMATS = {
    "markdown": markdown,
    "latex": lambda numbers: latex(numbers.tables),
}


@refusing("eval table")
def main(argv: Sequence[str]) -> int:
    """The command line; exit status 0 = printed, 2 = these results make no table."""
    parser = argparse.ArgumentParser(
        "flowalign eval table",
        description="One table of the results of several seeds: mean over seeds and prompts, with "
        "the standard error over both. Bold: the 95 % interval of the paired difference to every "
        "other model is above 0, by Student's t with the degrees of freedom of seeds and prompts; "
        "a difference, where its own interval excludes 0.",
    )
    add = parser.add_argument
    add("results", nargs="+", help="folders of evaluations (or results.json), one a seed")
    add("--format", choices=TABLE_FORMATS, default="markdown")
    add("--models", nargs="+", metavar="MODEL", help="rows; default: all that every result has")
    add("--pairs", nargs="+", metavar="A-B", default=[], help="differences, as student-base")
    args = parser.parse_args(argv)
    documents = list(map(load_results, args.results))
    pairs = [_pair(text, documents[0]["models"]) for text in args.pairs]
    print(TABLE_FORMATS[args.format](seed_table(documents, args.models, pairs)), end="")
    return 0


def _pair(text: str, models: Mapping[str, Any]) -> tuple[str, str]:
    """The two models of A-B, whose names may have hyphens."""
    splits = [(text[:i], text[i + 1 :]) for i, sign in enumerate(text) if sign == "-"]
    matches = [pair for pair in splits if pair[0] in models and pair[1] in models]
    if len(matches) != 1:
        raise ValueError(f"--pairs: {text!r} is no A-B of two models; have {', '.join(models)}.")
    return matches[0]
