"""A griffe extension: docstrings as Markdown, for mkdocstrings.

Ours describe a parameter as `name: text` and indent formulas. Without blank lines, Markdown would
join all of that into one paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Makes parameters list items, and other indented lines blocks of code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a function or class."""
        if obj.docstring and isinstance(obj, griffe.Function | griffe.Class):
            names = {parameter.name for parameter in obj.parameters}
            obj.docstring.value = markdown(obj.docstring.value, names)


def markdown(text: str, names: Collection[str]) -> str:
    """The text with lists and code blocks as Markdown wants them. names: the parameters."""
    return "\n\n".join(_paragraph(part, names) for part in text.split("\n\n"))


def _paragraph(text: str, names: Collection[str]) -> str:
    """A list if its first line describes a parameter and lines hang; else text and formulas."""
    lines: list[str] = []
    listed = _parameters(text, names) and "\n    " in text
    for line in text.splitlines():
        last = lines[-1] if lines else ""
        if listed and (described := _parameters(line, names)):
            line = f"- `{described}`{line[len(described) :]}"
        elif line.startswith("    "):
            lines += [""] * (not listed and not last.startswith("    "))
        elif last.startswith(("- ", "    ")):
            lines += [""]
        lines.append(line)
    return "\n".join(lines)


def _parameters(line: str, names: Collection[str]) -> str:
    """`a, b` of a line `a, b: text`, if these are parameters; else ""."""
    described = re.match(r"([\w, ]+): ", line)
    return described[1] if described and set(described[1].split(", ")) <= set(names) else ""
