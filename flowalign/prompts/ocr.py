"""Training prompts that ask for a text, between straight double quotes, in a described scene.

Composed from the grammar of `ocr_words`: none is taken from the public set (19,653 training prompts
that a language model wrote), whose form and lengths they have: one pair of quotes, and targets as
long as those of its test set (`LENGTHS`; 2 to 29 characters, mean 17).
"""

from __future__ import annotations

import random
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from functools import cache

from flowalign.prompts import ocr_words
from flowalign.prompts.held_out import OCR, digest

LENGTHS = {
    2: 1, 3: 4, 4: 5, 5: 5, 6: 6, 7: 16, 8: 18, 9: 29, 10: 21, 11: 41, 12: 57, 13: 62, 14: 69,
    15: 74, 16: 95, 17: 66, 18: 74, 19: 77, 20: 64, 21: 44, 22: 43, 23: 40, 24: 22, 25: 29, 26: 20,
    27: 13, 28: 13, 29: 10,
}  # fmt: skip
"""Characters of a target text -> how many of the 1,018 public test prompts have one so long."""
CAPITALS = 0.02  # share of texts in capitals there
VALIDATION = 256  # prompts of a validation set
PATIENCE = 200_000  # texts drawn in search of one length
WAITING = 100  # texts of one length kept for later, at most
FORMS = (
    '{style} {carrier} {where}, {how} "{text}" {lettering}, {light}.',
    '{carrier} {where}, {how} "{text}" {lettering}. The scene is {mood}, {light}.',
    '{style} {carrier}, {how} "{text}", {where}, {light}.',
    '{where}, {carrier} stands out, {how} "{text}" {lettering}, {light}.',
    'the text "{text}" {lettering} on {carrier} {where}, {mood}, {light}.',
    '{style} {carrier}, {how} "{text}" {lettering}, {light}. It is seen {where}.',
)


def generate(count: int, seed: int, held_out: Collection[str] = OCR) -> list[str]:
    """`count` different prompts, a function of the seed; a longer list begins with a shorter one.

    held_out: digests of target texts and of prompts that must not appear.
    Raises ValueError where so much is held out that some length of text cannot be had.
    """
    if count < 1:
        raise ValueError(f"{count} prompts were asked for; give a count of 1 or more.")
    return _drawn(count, random.Random(f"{seed}/ocr"), held_out)  # the same numbers everywhere


def validation(seed: int, held_out: Collection[str] = OCR) -> list[str]:
    """The prompts of a validation set, a function of the seed; a training set must hold their
    target texts out."""
    return _drawn(VALIDATION, random.Random(f"{seed}/ocr/validation"), held_out)


def _drawn(count: int, rng: random.Random, held_out: Collection[str]) -> list[str]:
    prompts: dict[str, None] = {}
    texts = _texts(rng, held_out)
    while len(prompts) < count:
        prompt = _scene(rng, *next(texts))
        if digest(prompt) not in held_out:
            prompts[prompt] = None
    return list(prompts)


def _texts(rng: random.Random, held_out: Collection[str]) -> Iterator[tuple[str, str]]:
    """(kind, text) of the public lengths: a text that is too many for now waits for its turn."""
    waiting: dict[int, deque[tuple[str, str]]] = defaultdict(deque)
    kinds = list(ocr_words.TEXTS)
    while True:
        (length,) = rng.choices(list(LENGTHS), weights=list(LENGTHS.values()))
        for _ in range(PATIENCE):
            if waiting[length]:
                break
            kind = rng.choice(kinds)
            text = _expand(rng, kind)
            if rng.random() < CAPITALS:
                text = text.upper()
            if not _sound(text) or len(waiting[len(text)]) == WAITING or digest(text) in held_out:
                continue
            waiting[len(text)].append((kind, text))
        else:
            raise ValueError(f"no text of {length} characters is left. Hold out fewer.")
        yield waiting[length].popleft()


def _sound(text: str) -> bool:
    """No word twice, and a length that the public set has."""
    words = text.lower().split()
    return len(text) in LENGTHS and len(set(words)) == len(words)


def _scene(rng: random.Random, kind: str, text: str) -> str:
    """A prompt whose scene can show a text of this kind."""
    theme = rng.choice(
        [name for name, scene in ocr_words.SCENES.items() if kind in scene[0].split()]
    )
    _, carriers, how, where = ocr_words.SCENES[theme]
    prompt = rng.choice(FORMS).format(
        text=text,
        carrier=rng.choice(_choices(carriers)),
        how=rng.choice(_choices(how)),
        where=rng.choice(_choices(where)),
        style=rng.choice(_choices(ocr_words.STYLE)),
        lettering=rng.choice(_choices(ocr_words.LETTERING)),
        light=rng.choice(_choices(ocr_words.LIGHT)),
        mood=rng.choice(_choices(ocr_words.MOOD)),
    )
    return prompt[0].upper() + prompt[1:]


def _expand(rng: random.Random, kind: str) -> str:
    """A text of a kind: one of its lines, with a word for each symbol."""
    line = rng.choice(_choices(ocr_words.TEXTS[kind]))
    return re.sub(r"\{(\w+)\}", lambda symbol: rng.choice(_words(symbol[1])), line)


@cache
def _choices(block: str) -> tuple[str, ...]:
    """The phrases of a block."""
    return tuple(" ".join(phrase.split()) for phrase in block.split(";"))


@cache
def _words(symbol: str) -> tuple[str, ...]:
    return tuple(word.replace("_", " ") for word in ocr_words.WORDS[symbol].split())


@cache
def _themes(kind: str) -> tuple[str, ...]:
    """The themes whose scenes can show a text of this kind."""
    return tuple(name for name, scene in ocr_words.SCENES.items() if kind in scene[0].split())
