"""Training prompts as GenEval words them, without those that it tests.

Wording, classes and rules come from djghosh13/geneval (MIT), `prompts/create_prompts.py`: "a
photo of", a or an by the first letter, plurals by -s, or -es after an s (so "two sheeps", "four
knifes": a model is tested on these words), counts 2 to 4, two different classes, two different
colours, and no coloured persons. The mix of tags is Flow-GRPO's (arXiv 2505.05470, appendix).

A tag with fewer different prompts than the mix asks for repeats its prompts evenly (in 50,000 rows:
counting has 160 prompts for 14,706 rows, colors 696 for 2,941). As in Flow-GRPO, a prompt that only
swaps the objects of a test prompt is no training prompt. Here that holds for positions too ("a dog
left of a cat" is "a cat right of a dog").
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

from flowalign.commands.prompts.held_out import GENEVAL, digest
from flowalign.rewards.geneval_judge import COLORS, NAMES

Row = dict[str, Any]
VALIDATION = 30  # rows of each tag; of counting, which has 160 prompts, 130 are left to train on
MIX = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
COUNTS = {2: "two", 3: "three", 4: "four"}
MIRRORED = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
COLORED = tuple(name for name in NAMES if name != "person")


@dataclass(frozen=True)
class Tag:
    """How the prompts of a tag are numbered and built."""

    sizes: tuple[int, ...]  # how many values each choice has
    build: Callable[..., Row]  # a choice of each -> the row

    def row(self, number: int) -> Row:
        """The row behind a number below the product of the sizes."""
        choices = []
        for size in self.sizes:
            number, choice = divmod(number, size)
            choices.append(choice)
        return self.build(*choices)


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def same_picture(prompt: str) -> list[str]:
    """A prompt, and if it has two objects also the prompt that names them in the other order."""
    match = re.fullmatch(f"a photo of (.+) (and|{'|'.join(MIRRORED)}) (.+)", prompt)
    if match is None:
        return [prompt]
    first, relation, second = match.groups()
    return [prompt, f"a photo of {second} {MIRRORED.get(relation, relation)} {first}"]


def generate(count: int, seed: int, held_out: Collection[str] = GENEVAL) -> list[Row]:
    """`count` rows {tag, include, exclude (counting only), prompt}, a function of the seed.

    A longer set begins with a shorter one, and every 17 of them hold the mix.
    held_out: digests of prompts that must not appear, whichever object comes first in them.
    """
    streams = {tag: _stream(tag, seed, held_out) for tag in MIX}
    return [next(streams[tag]) for tag in islice(_slots(seed), count)]


def validation(seed: int) -> list[Row]:
    """The rows of a validation set, as many of each tag, none twice: a function of the seed. A
    training set must hold them out."""
    streams = [_stream(tag, f"{seed}/validation", GENEVAL) for tag in MIX]
    return [next(stream) for _ in range(VALIDATION) for stream in streams]


def _slots(seed: int) -> Iterator[str]:  # the tags of the rows: the mix once every 17 rows
    rng = random.Random(f"{seed}/geneval/slots")  # a text seed: the same numbers everywhere
    while True:
        slots = [tag for tag, weight in MIX.items() for _ in range(weight)]
        rng.shuffle(slots)
        yield from slots


def _stream(tag: str, seed: int | str, held_out: Collection[str]) -> Iterator[Row]:
    """A row for every prompt that is not held out, each once before one comes again. Endless."""
    rule, usable = TAGS[tag], []
    rng = random.Random(f"{seed}/geneval/{tag}")
    for number in _shuffled(prod(rule.sizes), rng):
        row = rule.row(number)
        if not any(digest(prompt) in held_out for prompt in same_picture(row["prompt"])):
            usable.append(number)
            yield row
    while True:
        rng.shuffle(usable)
        yield from map(rule.row, usable)


def _shuffled(size: int, rng: random.Random) -> Iterator[int]:
    """0 ... size-1 in a random order, as far as it is read: color_attr has 554,580 prompts."""
    moved: dict[int, int] = {}  # a Fisher-Yates shuffle of a list that is never built
    for index in range(size):
        drawn = rng.randrange(index, size)
        yield moved.pop(drawn, drawn)
        if drawn != index:
            moved[drawn] = moved.pop(index, index)


def _other(first: int, second: int) -> int:
    return second + (second >= first)  # second: its number among those that are left


def _thing(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def _objects(tag: str, *things: tuple[str, str]) -> Row:
    """One of each of these things. things: (name, colour or "")."""
    texts = [article(f"{color} {name}".strip()) for name, color in things]
    include = [_thing(name) | ({"color": color} if color else {}) for name, color in things]
    return {"tag": tag, "include": include, "prompt": f"a photo of {' and '.join(texts)}"}


def _two_object(a: int, b: int) -> Row:
    return _objects("two_object", (NAMES[a], ""), (NAMES[_other(a, b)], ""))


def _counting(number: int, a: int) -> Row:
    count, word = list(COUNTS.items())[number]
    plural = f"{NAMES[a]}es" if NAMES[a].endswith("s") else f"{NAMES[a]}s"
    return {
        "tag": "counting",
        "include": [_thing(NAMES[a], count)],
        "exclude": [_thing(NAMES[a], count + 1)],
        "prompt": f"a photo of {word} {plural}",
    }


def _colors(color: int, a: int) -> Row:
    return _objects("colors", (COLORED[a], COLORS[color]))


def _position(relation: int, a: int, b: int) -> Row:
    wanted, name, reference = list(MIRRORED)[relation], NAMES[a], NAMES[_other(a, b)]
    return {
        "tag": "position",
        "include": [_thing(reference), _thing(name, position=[wanted, 0])],
        "prompt": f"a photo of {article(name)} {wanted} {article(reference)}",
    }


def _color_attr(a: int, b: int, c: int, d: int) -> Row:
    second = COLORED[_other(a, b)], COLORS[_other(c, d)]
    return _objects("color_attr", (COLORED[a], COLORS[c]), second)


_things, _hues = len(COLORED), len(COLORS)
TAGS: dict[str, Tag] = {
    "two_object": Tag((_things + 1, _things), _two_object),
    "counting": Tag((len(COUNTS), _things + 1), _counting),
    "colors": Tag((_hues, _things), _colors),
    "position": Tag((len(MIRRORED), _things + 1, _things), _position),
    "color_attr": Tag((_things, _things - 1, _hues, _hues - 1), _color_attr),
}
