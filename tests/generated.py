"""How properties are tested: on so many generated inputs, the same in each run, each in time.

`-m long` runs the same properties on ten times as many inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = 5  # for one input
NASTY_TEXTS = [
    "", " ", "~", "~nouser/x", "..", "../x", "../../etc/passwd", "/", "/etc/passwd", "/dev/zero",
    "a\0b", "\ud800", "\u2028", "\x1b[2J", "x" * 300, "x" * 5000, "a/" * 3000, "con", "é", "ﬁ",
    "<script>", "{{x}}", "%s%n", "$(touch x)", "`touch x`", "stage:x", "tiny/../x", "tiny/ocr_test",
    "os:system", "builtins:exec", "a:b:c", ":", "1e999", "nan", "-", "- -", "&a", "*a", "!!int x",
]  # fmt: skip
NASTY_NUMBERS = [
    0, -1, 1, 2**31, 2**32, 2**63, -(2**63), 10**9, 10**40, 1e308, -1e308, 1e-320, float("nan"),
    float("inf"), -0.0, 0.5,
]  # fmt: skip


def examples(count: int) -> pytest.MarkDecorator:
    """The number of inputs of a property: a tenth of these, or ten times as many with `-m long`."""
    many = pytest.param(10 * count, marks=pytest.mark.long)
    return pytest.mark.parametrize("count", [max(20, count // 10), many])


def holds(property: Callable[..., object], count: int, **inputs: st.SearchStrategy[Any]) -> None:
    """Call the property with so many generated inputs. Each may take SECONDS of this process: what
    other processes do to the clock does not count."""

    def in_time(**values: Any) -> None:
        began = time.process_time()
        property(**values)
        assert time.process_time() - began < SECONDS

    checks: list[Any] = [*HealthCheck]
    settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=60_000,  # of the clock: for what waits
        suppress_health_check=checks,
    )(given(**inputs)(in_time))()


@contextmanager
def nothing_else(folder: Path) -> Iterator[None]:
    """Inside, no file comes, goes or changes in a folder."""

    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    before = stamps()
    yield
    assert stamps() == before


texts = st.one_of(st.sampled_from(NASTY_TEXTS), st.text(max_size=20))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from(NASTY_NUMBERS), st.floats(), texts
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(texts, scalars), inner, max_size=4)
    ),
    max_leaves=8,
)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


def mutated(
    document: Any,
    draw: Callable[[st.SearchStrategy[Any]], Any],
    others: st.SearchStrategy[Any],
    keys: st.SearchStrategy[Any] = texts,
) -> Any:
    """A copy of a document of mappings and lists with one thing changed somewhere: a value is
    replaced by one of `others`, left out, wrapped, doubled, or its key becomes one of `keys`."""
    place = draw(st.sampled_from(sorted(places(document), key=repr)))
    change = draw(st.sampled_from(["replace", "replace", "drop", "wrap", "rename", "double"]))
    if not place:
        return draw(others)
    return _changed(document, place, change, draw, others, keys)


def places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value."""
    yield above
    if isinstance(document, dict | list):
        keys = document if isinstance(document, dict) else range(len(document))
        for key in keys:
            yield from places(document[key], (*above, key))


def _changed(
    document: Any, place: tuple[Any, ...], change: str, draw: Any, others: Any, keys: Any
) -> Any:
    head, *rest = place
    copy = document.copy()
    if rest:
        copy[head] = _changed(document[head], tuple(rest), change, draw, others, keys)
    elif change == "replace":
        copy[head] = draw(others)
    elif change == "drop":
        del copy[head]
    elif change == "wrap":
        copy[head] = draw(st.sampled_from([[copy[head]], {"x": copy[head]}, [[copy[head]] * 3]]))
    elif isinstance(copy, list):
        copy.append(copy[head])
    else:
        key = draw(keys)
        copy[key] = copy[head] if change == "double" else copy.pop(head)
    return copy
