"""A foreign text can neither steer a terminal nor fill a log."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowalign.system.escape import shown

HARMLESS = {"a cat", "naïve 猫", "👩\u200d🚀 in space", "می\u200cخواهم"}


@pytest.mark.parametrize("text", sorted(HARMLESS))
def test_an_ordinary_text_stays_as_it_is(text: str):
    assert shown(text) == text


def test_escapes_are_shown():
    assert shown("\x1b[2J\x1b]0;title\x07") == r"\x1b[2J\x1b]0;title\x07"
    assert shown("abc\u202edef\x9b31m\ud800") == r"abc\u202edef\x9b31m\ud800"
    assert shown("a\r\n\tb\u2028c  d") == "a b c d"


def test_a_long_text_is_cut():
    assert shown("x" * 10**7, 5) == "xxxxx..."
    assert shown(" " * 10**7 + "x", 5) == "..."
    assert shown("xxxxx", 5) == "xxxxx"


@given(st.text(max_size=40), st.integers(1, 20))
@settings(derandomize=True, database=None, max_examples=300)
def test_what_is_shown_is_one_line_of_utf_8_without_control_characters(text: str, length: int):
    line = shown(text, length)
    line.encode()
    assert len(line) <= length + 3 and len(line.splitlines()) <= 1
    assert not {unicodedata.category(c) for c in line} & {"Cc", "Cs"}
