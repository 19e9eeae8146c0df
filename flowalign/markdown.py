"""Foreign texts in Markdown: shown, not obeyed. Names, tags and prompts come from files."""

from __future__ import annotations

import re

from flowalign.printable import shown

LENGTH = 500  # characters of a text that are shown
HTML = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
# What begins something inside a line or ends a cell. An underscore inside a word begins nothing,
# and most names have one.
_SIGNS = re.compile(r"[\\`*\[\]<>&|~$]|(?<![^\W_])_|_(?![^\W_])|^[-+=#]|(?<=^[0-9])[.)]")


def escaped(text: str, length: int = LENGTH) -> str:
    """A text on one line that Markdown (also GitHub's, with its tables and formulas) shows as it
    is. Control characters are escaped as in `shown`."""
    return _SIGNS.sub(lambda sign: HTML.get(sign[0], f"\\{sign[0]}"), shown(text, length))


def code(text: str, length: int = LENGTH) -> str:
    """A text on one line as inline code."""
    line = shown(text, length)
    ticks = "`" * _outer(line, 1)
    space = " " if "`" in (line[:1], line[-1:]) else ""  # it is dropped again
    return f"{ticks}{space}{line or ' '}{space}{ticks}"


def block(text: str, language: str = "") -> str:
    """A text of several lines as a block of code."""
    fence = "`" * _outer(text, 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _outer(text: str, least: int) -> int:
    """How many backticks the text cannot close."""
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])
