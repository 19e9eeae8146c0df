"""A bounded memory answers as if nothing had been forgotten, and holds no more than its size."""

from __future__ import annotations

import pytest

from flowalign.rewards.towers import Recent


def test_what_was_not_used_for_longest_is_forgotten():
    made: list[str] = []

    def shout(keys: list[str]) -> list[str]:
        made.extend(keys)
        return [key.upper() for key in keys]

    memory: Recent[str] = Recent(2)
    assert memory.get(["a", "b", "a"], shout) == ["A", "B", "A"] and made == ["a", "b"]
    assert memory.get(["c"], shout) == ["C"] and set(memory) == {"a", "c"}  # a came last
    assert memory.get(["a", "b"], shout) == ["A", "B"] and made == ["a", "b", "c", "b"]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_more_keys_than_it_holds_are_answered(size: int):
    memory: Recent[str] = Recent(size)
    keys = list("abcbad")
    assert memory.get(keys, lambda new: [key * 2 for key in new]) == [key * 2 for key in keys]
    assert len(set(memory)) == size


def test_a_failure_leaves_what_was_known():
    memory: Recent[str] = Recent(4)
    memory.get(["a"], lambda new: ["A"])

    def fail(keys: list[str]) -> list[str]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        memory.get(["a", "b"], fail)
    assert memory.get(["a"], fail) == ["A"]
    assert memory.get([], fail) == []
