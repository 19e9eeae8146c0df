"""An evaluation as tables: models down, benchmarks across, and the same for paired differences.

Every file of an evaluation (table.md, report.html, results.json) takes its numbers from `Results`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from flowalign.eval.stats import (
    AVERAGE,
    FIDELITY,
    Distance,
    average,
    difference,
    headline_row,
    rows_of,
)
from flowalign.eval.suite import Benchmark, Judged
from flowalign.types import EvalRow

LOWER_IS_BETTER = {FIDELITY}
CLEAR = 2.0  # standard errors from 0: a difference that is marked


@dataclass(frozen=True)
class Results:
    """What was measured: judged {model: {benchmark: its images}}, distances {model: its own}.

    The first model is the one that all are compared with; distances may be empty.
    """

    benchmarks: Sequence[Benchmark]
    judged: Mapping[str, Mapping[str, Judged]]
    distances: Mapping[str, Distance]

    @property
    def first(self) -> str:
        """The model that all others are compared with."""
        return next(iter(self.judged))

    def rows(self, model: str) -> list[EvalRow]:
        """Every metric of every benchmark."""
        return self._rows[model]

    @cached_property
    def _rows(self) -> dict[str, list[EvalRow]]:
        """Of every model: several files ask for them, and their intervals take a moment."""
        return {
            model: [row for mark in self.benchmarks for row in rows_of(mark, of[mark.name].rows)]
            for model, of in self.judged.items()
        }

    def scores(self, model: str) -> dict[str, EvalRow]:
        """{column: its number}: the benchmarks, fidelity if it was measured, their average."""
        rows = self.rows(model)
        numbers = [headline_row(mark, rows) for mark in self.benchmarks]
        return _columns(numbers, self.distances[model].row if self.distances else None)

    def difference(self, model: str, other: str) -> dict[str, EvalRow]:
        """The same columns of model minus other, on the same prompts and noise."""
        mine, theirs = self.judged[model], self.judged[other]
        numbers = [
            difference(mark, theirs[mark.name].rows, mine[mark.name].rows)
            for mark in self.benchmarks
        ]
        gap = self.distances[model].minus(self.distances[other]) if self.distances else None
        return _columns(numbers, gap)


def _columns(numbers: Sequence[EvalRow], fidelity: EvalRow | None) -> dict[str, EvalRow]:
    found = {row.benchmark: row for row in numbers}
    found |= {FIDELITY: fidelity} if fidelity else {}
    return found | ({AVERAGE: average(numbers)} if numbers else {})


@dataclass(frozen=True)
class Table:
    """rows {label: {column: number}}; places {column: decimals}; signed: these are differences."""

    caption: str
    rows: Mapping[str, Mapping[str, EvalRow]]
    places: Mapping[str, int]
    signed: bool = False

    @property
    def columns(self) -> list[str]:
        """Names, in order."""
        return list(self.places)

    @staticmethod
    def arrow(column: str) -> str:
        """Marks a column where lower is better."""
        return " ↓" if column in LOWER_IS_BETTER else ""

    def text(self, label: str, column: str) -> str:
        """Mean ± standard error; a dash where there is no number. Where images are missing, how
        many there are."""
        row = self.rows[label][column]
        some = row.total is not None and row.n < row.total
        number = shown(row, self.places[column], self.signed)
        return f"{number} (n {row.n} of {row.total})" if some else number

    def interval(self, label: str, column: str) -> str:
        """The ends of the 95 % interval, "" where there is none."""
        return between(self.rows[label][column], self.places[column])

    def n(self, column: str) -> str:
        """How many images (of differences: pairs) the numbers of a column come from."""
        return counts(row[column] for row in self.rows.values())

    def best(self, column: str) -> set[str]:
        """The rows that no other beats, as printed: equal digits share the place.

        Empty for differences, and where there is no second number to beat.
        """
        sign = -1 if column in LOWER_IS_BETTER else 1
        found = {
            label: sign * round(row[column].mean, self.places[column])
            for label, row in self.rows.items()
            if math.isfinite(row[column].mean)
        }
        if self.signed or len(found) < 2:
            return set()
        return {label for label, value in found.items() if value == max(found.values())}

    def trend(self, label: str, column: str) -> str:
        """Of a difference that is CLEAR: "better" or "worse"; else ""."""
        row = self.rows[label][column]
        if not self.signed or not abs(row.mean) > CLEAR * row.stderr:  # NaN is not clear
            return ""
        return "better" if (row.mean > 0) != (column in LOWER_IS_BETTER) else "worse"


def tables(results: Results, compare: Mapping[str, Sequence[str]]) -> list[Table]:
    """The main table, the differences to the first model, and those that `compare` asks for.

    compare {model: other models}: one table for each, model minus other.
    """
    models = list(results.judged)
    main = {model: results.scores(model) for model in models}
    places = {column: _places(main.values(), column) for column in main[results.first]}
    found = [Table("Mean ± standard error.", main, places)]
    pairs = {f"Difference to {results.first}": [(model, results.first) for model in models[1:]]}
    pairs |= {f"{model} minus others": [(model, o) for o in compare[model]] for model in compare}
    for caption, wanted in pairs.items():
        rows = {f"{model} − {other}": results.difference(model, other) for model, other in wanted}
        if rows:
            found.append(Table(f"{caption}, same prompts and noise:", rows, places, signed=True))
    return found


def _places(rows: Iterable[Mapping[str, EvalRow]], column: str) -> int:
    """Decimals of a column: three, fewer for large numbers (PickScore 22.34), more for small."""
    sizes = [abs(row[column].mean) for row in rows if math.isfinite(row[column].mean)]
    top = max(sizes, default=0.0)
    return 2 if top >= 10 else 3 if top >= 0.1 or top == 0 else 5


def markdown(table: Table) -> str:
    """One line a row, the best of a column in bold, and the counts below."""
    lines = [table.caption, ""]
    lines.append(line("", *(f"{column}{table.arrow(column)}" for column in table.columns)))
    lines.append("|" + "---|" * (1 + len(table.columns)))
    best = {column: table.best(column) for column in table.columns}
    for label in table.rows:
        cells = [(table.text(label, column), label in best[column]) for column in table.columns]
        lines.append(line(label, *(f"**{text}**" if bold else text for text, bold in cells)))
    lines.append(line("n", *(table.n(column) for column in table.columns)))
    return "\n".join(lines) + "\n"


def details(rows: Mapping[str, Sequence[EvalRow]]) -> str:
    """{model: its rows} as Markdown: one line per benchmark and metric, one column per model, with
    the 95 % interval."""
    keys = dict.fromkeys((row.benchmark, row.metric) for mine in rows.values() for row in mine)
    lines = [line("benchmark", "metric", "n", *rows), "|---|---|---|" + "---|" * len(rows)]
    for benchmark, metric in keys:
        found = [_find(mine, benchmark, metric) for mine in rows.values()]
        n = counts(row for row in found if row)
        cells = [" ".join([shown(row, 3), between(row, 3)]).strip() for row in found]
        lines.append(line(benchmark, metric, n, *cells))
    return "\n".join(lines) + "\n"


def _find(rows: Sequence[EvalRow], benchmark: str, metric: str) -> EvalRow | None:
    return next((r for r in rows if (r.benchmark, r.metric) == (benchmark, metric)), None)


def line(*cells: str) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def counts(rows: Iterable[EvalRow]) -> str:
    """ "512", or "510 to 512" where some have fewer."""
    found = sorted({row.n for row in rows})
    return " to ".join(map(str, dict.fromkeys([found[0], found[-1]])))


def between(row: EvalRow | None, places: int) -> str:
    """The interval of a number, "" where there is none."""
    if row is None or not math.isfinite(row.low + row.high):
        return ""
    return f"[{row.low:.{places}f}, {row.high:.{places}f}]"


def shown(row: EvalRow | None, places: int, signed: bool = False) -> str:
    """A number with its error; "–" = there is none, "?" = its error is unknown."""
    if row is None or math.isnan(row.mean):
        return "–"
    error = "?" if math.isnan(row.stderr) else f"{row.stderr:.{places}f}"
    return f"{row.mean:{'+' if signed else ''}.{places}f} ± {error}"
