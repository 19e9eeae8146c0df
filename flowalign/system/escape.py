"""Foreign texts for terminals, logs, messages and Markdown: shown, not obeyed."""

from __future__ import annotations

import re
import unicodedata

# Escape sequences begin with a control character. Format characters can turn the order of a line
# round. Surrogates cannot be written as UTF-8.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # Persian and Indic scripts and many emoji need them


def shown(text: str, length: int = 300) -> str:
    """The first `length` characters of a text on one line, with "..." if more follow.

    Runs of white space become one space. Control, format and surrogate characters are escaped as
    in Python, so the line is safe to print and can be written as UTF-8.
    """
    line = " ".join(text[: 10 * length].split())
    escaped = "".join(map(_escaped, line))
    cut = len(escaped) > length or len(text) > 10 * length
    return f"{escaped[:length]}..." if cut else escaped


def harmless(text: str) -> str:
    """A text of several lines, such as an error's, for a terminal or a log: escaped like a line,
    but its line breaks stay."""
    return "\n".join("".join(map(_escaped, line)) for line in text.split("\n"))


def _escaped(character: str) -> str:
    if unicodedata.category(character) in _ESCAPED and character not in _JOINERS:
        return character.encode("unicode_escape").decode("ascii")
    return character


# Markdown ----------------------------------------------------------------------------------------

SHOWN_CHARACTERS = 500  # characters of a text that are shown
HTML = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
# What begins something inside a line or ends a cell. An underscore inside a word begins nothing,
# and most names have one. A number with a sign or a point is no list.
_SIGNS = re.compile(
    r"[\\`*\[\]<>&|~$]|(?<![^\W_])_|_(?![^\W_])|^[-+](?![0-9])|^[=#]|(?<=^[0-9])[.)](?![0-9])"
)


def escaped(text: str, length: int = SHOWN_CHARACTERS) -> str:
    """A text on one line that Markdown (also GitHub's, with its tables and formulas) shows as it
    is. Control characters are escaped as in `shown`."""
    return _SIGNS.sub(lambda sign: HTML.get(sign[0], f"\\{sign[0]}"), shown(text, length))


def code(text: str, length: int = SHOWN_CHARACTERS) -> str:
    line = shown(text, length)
    ticks = "`" * _outer(line, 1)
    space = " " if "`" in (line[:1], line[-1:]) else ""  # it is dropped again
    return f"{ticks}{space}{line or ' '}{space}{ticks}"


def block(text: str, language: str = "") -> str:
    fence = "`" * _outer(text, 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _outer(text: str, least: int) -> int:
    """The number of backticks that the text cannot close."""
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])
