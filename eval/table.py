"""An evaluation as tables: one row per model, one column per benchmark; also paired differences.

Every file of one evaluation (table.md, report.html, results.json) takes its numbers from `Results`.
Tables of several evaluations (`seeds`, `compare`) read results.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flowalign.eval.fidelity import Distance
from flowalign.eval.stats import (
    AVERAGE,
    FIDELITY,
    average,
    between,
    difference,
    headline_row,
    notes,
    number_text,
    part_of,
    rows_of,
    student_t,
)
from flowalign.eval.suite import Benchmark, JudgedImages
from flowalign.report.page import Panel
from flowalign.rewards import describe
from flowalign.system.escape import escaped
from flowalign.system.table import Mark, Table
from flowalign.types import EvalRow

LOWER_IS_BETTER = {FIDELITY}
JUDGE = ("name", "engine", "model", "weights", "head", "revision", "version", "rule", "served")


@dataclass(frozen=True)
class Results:
    """What was measured. All models are compared with the first."""

    benchmarks: Sequence[Benchmark]
    judged: Mapping[str, Mapping[str, JudgedImages]]  # {model: {benchmark: its images}}
    distances: Mapping[str, Distance]  # by model; empty if fidelity was not measured
    drifts: Sequence[Panel] = ()  # of the other models from the base
    shared: str = "same prompts and noise"  # shared by all models
    # the benchmarks that are columns, None = all; the others are in `matrix`
    column_names: Collection[str] | None = None

    @cached_property
    def rows(self) -> dict[str, list[EvalRow]]:
        """{model: every metric of every benchmark}; kept, because bootstrap intervals take time."""
        rows: dict[str, list[EvalRow]] = {model: [] for model in self.judged}
        for model, judged in self.judged.items():
            for benchmark in self.benchmarks:
                rows[model] += rows_of(benchmark, judged[benchmark.name].scores)
        return rows

    @property
    def columns(self) -> list[Benchmark]:
        return [
            b for b in self.benchmarks if self.column_names is None or b.name in self.column_names
        ]

    def counts_in(self, benchmark: Benchmark) -> str | None:
        """The average that a benchmark counts in: "average", or with a `matrix` "own" or "others";
        None for a judge that counts in none."""
        if not benchmark.reward.averaged:
            return None
        mean = "own" if self.matrix else "average"
        return mean if benchmark in self.columns else "others"

    @cached_property
    def matrix(self) -> Numbers | None:
        """Numbers of every judge on the prompts of every task, by model; None if no judge has
        prompts of other tasks. own, others: means over the judges on their own prompts, and on
        those of other tasks. worst: the cell with the largest loss to the first model. Cached,
        because the tables and results.json both read it."""
        cells = [b for b in self.benchmarks if b.reward.averaged]
        diagonal = [b for b in cells if b in self.columns]
        if len(diagonal) == len(cells):
            return None
        rows = {}
        first = next(iter(self.judged.values()))
        for model, judged in self.judged.items():
            row = {b.name: headline_row(b, self.rows[model]) for b in cells}
            others = [row[b.name] for b in cells if b not in diagonal]
            gaps = [difference(b, first[b.name].scores, judged[b.name].scores) for b in cells]
            means = {"own": average([row[b.name] for b in diagonal]), "others": average(others)}
            worst = min(gaps, key=lambda gap: (math.isnan(gap.mean), gap.mean))
            rows[model] = row | means | {"worst": worst}
        base, columns = next(iter(rows.items()))
        decimals = {column: _decimals(rows.values(), column) for column in columns}
        text = "TASK_JUDGE: another task's judge. own, others: means of the judges on their own "
        text += f"prompts, and on those of others. worst: the largest loss to {base}, paired."
        below = [text, *notes(rows.values())]
        return Numbers("Every judge on every task's prompts", rows, decimals, notes=below)

    def pictured(self, benchmark: Benchmark) -> list[int]:
        """The indices of the prompts that the report shows; equal for all models."""
        return next(iter(self.judged.values()))[benchmark.name].pictured(benchmark.copies)

    def picture(self, model: str, benchmark: Benchmark, index: int, copy: int) -> bytes:
        """A PNG file of a model's image of one of these prompts."""
        place = self.pictured(benchmark).index(index) * benchmark.copies + copy
        return self.judged[model][benchmark.name].pictures[place]

    def means(self, benchmark: Benchmark, model: str) -> list[float]:
        """The mean score of each prompt's images; NaN if none of them has a score."""
        copies = benchmark.copies
        scores = self.judged[model][benchmark.name].scores
        means = []
        for start in range(0, len(scores), copies):
            group = scores[start : start + copies]
            numbers = [score.number(part_of(benchmark)) for score in group]
            valid = [number for number in numbers if math.isfinite(number)]
            means.append(sum(valid) / len(valid) if valid else math.nan)
        return means

    def scores(self, model: str) -> dict[str, EvalRow]:
        """{column: number}: the benchmarks, the further parts that their judges show, fidelity if
        it was measured, and the average."""
        return self._columns(
            lambda b, part: headline_row(b, self.rows[model], part), self.distances.get(model)
        )

    def difference(self, model: str, other: str) -> dict[str, EvalRow]:
        """{column: number} of model minus other, paired on the same prompts and noise."""
        first, second = self.judged[other], self.judged[model]  # gains are second - first
        gap = self.distances[model].minus(self.distances[other]) if self.distances else None
        return self._columns(
            lambda b, part: difference(b, first[b.name].scores, second[b.name].scores, part), gap
        )

    def _columns(
        self, number: Callable[[Benchmark, str | None], EvalRow], distance: Distance | None
    ) -> dict[str, EvalRow]:
        columns = {}
        averaged = []
        for benchmark in self.columns:
            name = benchmark.name
            reward = benchmark.reward
            columns[name] = number(benchmark, None)
            if reward.averaged:
                averaged.append(columns[name])
            columns |= {f"{name}_{part}": number(benchmark, part) for part in reward.columns}
        if distance:
            columns[FIDELITY] = distance.row
        if averaged:
            columns[AVERAGE] = average(averaged)
        return columns


@dataclass(frozen=True)
class Numbers:
    """Numbers by row and column, and the decimals that are printed."""

    caption: str
    rows: Mapping[str, Mapping[str, EvalRow]]  # {label: {column: number}}
    decimals: Mapping[str, int]  # {column: decimals}
    signed: bool = False  # differences
    notes: Sequence[str] = ()  # below it

    @property
    def table(self) -> Table:
        """The numbers as texts. The foot says how many images (for differences: pairs) are in a
        column."""
        heads = [""]
        foot = ["n"]
        lines = [[label] for label in self.rows]
        marks = {}
        for place, (column, decimals) in enumerate(self.decimals.items(), start=1):
            heads.append(f"{column} ↓" if column in LOWER_IS_BETTER else column)
            foot.append(counts(row[column] for row in self.rows.values()))
            best = self.best(column)
            for number, (label, row) in enumerate(self.rows.items()):
                lines[number].append(self.text(label, column))
                interval = between(row[column], decimals)
                kind = "best" if label == best else self.trend(label, column)
                hint = f"95 % {interval}" if interval else ""
                marks[number, place] = Mark(kind, hint)
        return Table(heads, lines, marks=marks, foot=foot)

    def markdown(self) -> str:
        """The caption, the table and the notes."""
        notes = [escaped(note, length=5000) for note in self.notes]
        return "\n\n".join([escaped(self.caption), self.table.markdown(), *notes]) + "\n"

    def text(self, label: str, column: str) -> str:
        """Mean ± standard error, and the count where images have no score; a dash = no number."""
        row = self.rows[label][column]
        number = number_text(row, self.decimals[column], self.signed)
        incomplete = row.total is not None and row.n < row.total
        return f"{number} (n {row.n} of {row.total})" if incomplete else number

    def plain(self) -> dict[str, Any]:
        """The table for results.json: caption, rows of texts with the heads first, and notes."""
        return {"caption": self.caption, "rows": self.table.texts, "notes": list(self.notes)}

    def best(self, column: str) -> str | None:
        """The row that is ahead of every other one: the 95 % interval of each paired difference is
        above 0. None if there is none, and for differences."""
        sign = -1 if column in LOWER_IS_BETTER else 1
        known = {n: row[column] for n, row in self.rows.items() if math.isfinite(row[column].mean)}
        if self.signed or len(known) < 2:  # one number alone is not the best
            return None
        first, *others = sorted(known, key=lambda label: -sign * known[label].mean)
        for other in others:
            gap = abs(known[first].mean - known[other].mean)
            moved = known[first].moved_from(known[other])
            count = len(moved) if known[first].influence else known[first].n
            if not gap > student_t(count - 1) * math.hypot(*moved.values()):
                return None
        return first

    def trend(self, label: str, column: str) -> str:
        """ "better" or "worse" for a difference whose interval excludes 0, else ""."""
        row = self.rows[label][column]
        if not self.signed or not (row.low > 0 or row.high < 0):  # NaN is neither
            return ""
        return "better" if (row.mean > 0) != (column in LOWER_IS_BETTER) else "worse"


def tables(results: Results, compare: Mapping[str, Sequence[str]]) -> list[Numbers]:
    """The main table, the differences to the first model, and one table per entry of `compare`.

    compare {model: other models}: model minus each of the others.
    """
    first, *others = results.judged
    main = {model: results.scores(model) for model in results.judged}
    single = {AVERAGE} if len(results.benchmarks) == 1 else set()  # it would repeat the number
    decimals = {c: _decimals(main.values(), c) for c in main[first] if c not in single}
    captions = {f"Difference to {first}": [(model, first) for model in others]}
    for model, references in compare.items():
        captions[f"{model} minus others"] = [(model, other) for other in references]

    def without_error(rows: Mapping[str, Mapping[str, EvalRow]]) -> list[str]:
        return notes({column: row[column] for column in decimals} for row in rows.values())

    # differences get the decimals of the scores, so that both tables can be read together
    about = [(benchmark.name, describe(benchmark.reward)) for benchmark in results.columns]
    who = [f"{name}: {_judge(described)}" for name, described in about]
    who = [f"Judges. {'; '.join(who)}.", *without_error(main)]
    result = [Numbers("Mean ± standard error.", main, decimals, notes=who)]
    result += filter(None, [results.matrix])
    for caption, pairs in captions.items():
        rows = {f"{model} − {other}": results.difference(model, other) for model, other in pairs}
        if rows:
            title = f"{caption}, {results.shared}:"
            result.append(Numbers(title, rows, decimals, True, without_error(rows)))
    return result


def _judge(described: Mapping[str, Any]) -> str:
    """A judge in words, followed by the judges that it is made of."""
    text = ", ".join(str(described[key]) for key in JUDGE if described.get(key))
    made_of = described.get("rewards", described).values()
    parts = [_judge(part) for part in made_of if isinstance(part, Mapping) and "name" in part]
    return f"{text} of {' and '.join(parts)}" if parts else text


def _decimals(rows: Iterable[Mapping[str, EvalRow]], column: str) -> int:
    """Decimals of a column: three, fewer for large numbers (PickScore 22.34), more for small."""
    sizes = [abs(row[column].mean) for row in rows if math.isfinite(row[column].mean)]
    largest = max(sizes, default=0.0)
    if largest >= 10:
        return 2
    return 3 if largest >= 0.1 or largest == 0 else 5


def metric_table(rows: Mapping[str, Sequence[EvalRow]]) -> Table:
    """A table of {model: rows}: one line per benchmark and metric, one column per model."""
    by_metric: dict[tuple[str, str], dict[str, EvalRow]] = {}
    for model, numbers in rows.items():
        for row in numbers:
            by_metric.setdefault((row.benchmark, row.metric), {})[model] = row
    lines = []
    for names, numbers in by_metric.items():
        cells = [
            f"{number_text(row, 3)} {between(row, 3)}".strip() for row in map(numbers.get, rows)
        ]
        lines.append([*names, counts(numbers.values()), *cells])
    return Table(["benchmark", "metric", "n", *rows], lines, names=2)


def counts(rows: Iterable[EvalRow]) -> str:
    """ "512", or "510 to 512" if they differ."""
    sizes = [row.n for row in rows]
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low} to {high}"
