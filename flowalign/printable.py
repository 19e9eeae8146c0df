"""Foreign texts for terminals, logs and messages: shown, not obeyed."""

from __future__ import annotations

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
    beginning = text[: 10 * length]  # of a text of any size
    line = " ".join(beginning.split())
    escaped = "".join(map(_escaped, line[: length + 1]))
    cut = len(escaped) > length or len(beginning) < len(text)
    return f"{escaped[:length]}..." if cut else escaped


def harmless(text: str) -> str:
    """A text of several lines, such as an error's, for a terminal or a log: the same characters are
    escaped, and its line breaks stay."""
    return "\n".join("".join(map(_escaped, line)) for line in text.split("\n"))


def _escaped(character: str) -> str:
    if unicodedata.category(character) in _ESCAPED and character not in _JOINERS:
        return character.encode("unicode_escape").decode("ascii")
    return character
