"""HTML pages in one file, without a network: the templates and the style that all of them share.

A page is a template in `templates/` that extends `page.html.j2` (head, style, title). Drift is
shown by the macro of `drift.html.j2`: in the page of a run and in the report of an evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import jinja2

from flowalign.training.report.drift.compare import Check


class Panel(NamedTuple):
    """A check of the drift. title: whose images. warn: sigmas beyond which a statistic stands
    out. reference: what they are compared with."""

    title: str
    warn: float
    check: Check
    reference: str = "base"


def table(rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table whose first row and column are heads."""
    lines = []
    for number, row in enumerate(rows):
        kinds = ["td" if number and index else "th" for index in range(len(row))]
        cells = (f"<{kind}>{escape(text)}</{kind}>" for kind, text in zip(kinds, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table class='numbers'>{''.join(lines)}</table>"


def render(template: str, **content: object) -> str:
    """The page of `templates/<template>`. content: its variables, `title` among them.

    Texts are escaped, since prompts and reasons come from files and models. A variable that the
    template names and `content` lacks raises jinja2.UndefinedError.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flowalign.training.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)
