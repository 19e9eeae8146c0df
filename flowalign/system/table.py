"""A table of texts, written as Markdown, HTML or LaTeX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from flowalign.system.escape import escaped


class Mark(NamedTuple):
    """A highlight of a cell.

    kind: "best" of its column, "better" or "worse" than what it is compared with. hint: what a page
    shows where one points at it.
    """

    kind: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of texts below their heads; the first text of a row is its label.

    names: how many texts at the start of a row are names. Markdown escapes these and the heads; the
    others are Markdown already. marks {(row, column): mark}. foot: a last row.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    marks: Mapping[tuple[int, int], Mark] = field(default_factory=dict)
    foot: Sequence[str] = ()

    @property
    def texts(self) -> list[Sequence[str]]:
        """The heads, rows and foot."""
        return [*filter(None, [self.heads, *self.rows, self.foot])]

    def bold(self, form: str) -> list[list[str]]:
        """The rows, with the best cells in the format `form`."""
        rows = [list(row) for row in self.rows]
        for (row, column), mark in self.marks.items():
            if mark.kind == "best":
                rows[row][column] = form.format(rows[row][column])
        return rows

    def markdown(self) -> str:
        """Write Markdown, with the best in bold and no line break at the end."""
        lines = []
        for row in [*self.bold("**{}**"), *filter(None, [self.foot])]:
            names = [escaped(name) for name in row[: self.names]]
            lines.append(f"| {' | '.join([*names, *row[self.names :]])} |")
        heads = f"| {' | '.join(map(escaped, self.heads))} |"
        return "\n".join([heads, "|" + "---|" * len(self.heads), *lines])

    def html(self) -> str:
        """Write an HTML table of the class `numbers`, for the style of our pages."""
        lines = ["<thead>", _html_row("th", self.heads, {}), "</thead>", "<tbody>"]
        for number, row in enumerate(self.rows):
            marks = {column: mark for (line, column), mark in self.marks.items() if line == number}
            lines.append(_html_row("td", row, marks))
        lines.append("</tbody>")
        if self.foot:
            lines += ["<tfoot>", _html_row("td", self.foot, {}), "</tfoot>"]
        return "\n".join(['<table class="numbers">', *lines, "</table>"])


def latex(tables: Sequence[Table]) -> str:
    """Write tables of equal columns as one tabular for the package booktabs, with rules between
    them and the best in bold. The heads are those of the first table, without the head of the
    labels."""
    heads = [_latex(head) for head in tables[0].heads[1:]]
    lines = [rf"\begin{{tabular}}{{l{'r' * len(heads)}}}", r"\toprule"]
    lines.append(rf"{' & '.join(['', *heads])} \\")
    for table in tables:
        lines.append(r"\midrule")
        for label, *cells in table.bold(r"\textbf{{{}}}"):
            lines.append(rf"{' & '.join([_latex(label), *cells])} \\")
    text = "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
    text = text.replace("±", r"$\pm$")
    return re.sub(r"−|(?<=[ {])-(?=\d)", "$-$", text)


def _latex(name: str) -> str:
    return re.sub(r"[&%$#_{}]", r"\\\g<0>", re.sub(r"[\\~^]", " ", name))


def _html_row(tag: str, texts: Sequence[str], marks: Mapping[int, Mark]) -> str:
    """A row, whose first cell is a head. Errors are small, and names may break before "_"."""
    cells = []
    for column, text in enumerate(texts):
        kind = tag if column else "th"
        attributes = _attributes(marks.get(column, Mark()))
        mean, sign, error = escape(text).replace("_", "<wbr>_").partition(" ± ")
        small = f" <small>± {error}</small>" if sign else ""
        cells.append(f"<{kind}{attributes}>{mean}{small}</{kind}>")
    return f"<tr>{''.join(cells)}</tr>"


def _attributes(mark: Mark) -> str:
    attributes = {"class": mark.kind, "title": mark.hint}
    return "".join(f' {name}="{escape(text)}"' for name, text in attributes.items() if text)
