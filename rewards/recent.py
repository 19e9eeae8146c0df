"""A bounded memory of answers that cost something, such as the vector of a prompt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Recent(Generic[Answer]):
    """The answers to the `size` keys that were asked for last; iterates over those keys."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def get(
        self, keys: Sequence[str], make: Callable[[list[str]], Sequence[Answer]]
    ) -> list[Answer]:
        """The answer to each key; `make` is given the new keys, each once, if there are any."""
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in self._kept]
            made = dict(zip(new, make(new), strict=True)) if new else {}
            answers = [made[key] if key in made else self._kept[key] for key in keys]
            for key, answer in zip(keys, answers, strict=True):
                self._kept[key] = answer
                self._kept.move_to_end(key)
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)
        return answers
