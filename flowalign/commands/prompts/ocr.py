"""Training prompts that ask for a text, between straight double quotes, in a described scene.

They are composed from the grammar in ocr_grammar.yaml. None is taken from the public set (19,653
training prompts, written by a language model). They have its form, one pair of quotes, and targets
as long as its test set's (`LENGTHS`: 2 to 29 characters, mean 17).
"""

from __future__ import annotations

import random
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from pathlib import Path

import yaml

from flowalign.commands.prompts.held_out import OCR, digest

LENGTHS = {
    2: 1, 3: 4, 4: 5, 5: 5, 6: 6, 7: 16, 8: 18, 9: 29, 10: 21, 11: 41, 12: 57, 13: 62, 14: 69,
    15: 74, 16: 95, 17: 66, 18: 74, 19: 77, 20: 64, 21: 44, 22: 43, 23: 40, 24: 22, 25: 29, 26: 20,
    27: 13, 28: 13, 29: 10,
}  # fmt: skip
"""Characters of a target text -> how many of the 1,018 public test prompts have that length."""
CAPITALS = 0.02  # share of the public texts that are in capitals
VALIDATION = 256  # prompts of a validation set
WAITING = 100  # texts of one length that are kept for later, at most
FORMS = (
    '{style} {carrier} {where}, {how} "{text}" {lettering}, {light}.',
    '{carrier} {where}, {how} "{text}" {lettering}. The scene is {mood}, {light}.',
    '{style} {carrier}, {how} "{text}", {where}, {light}.',
    '{where}, {carrier} stands out, {how} "{text}" {lettering}, {light}.',
    'the text "{text}" {lettering} on {carrier} {where}, {mood}, {light}.',
    '{style} {carrier}, {how} "{text}" {lettering}, {light}. It is seen {where}.',
)


def _phrases(block: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in block.split(";")]


_grammar = yaml.safe_load(Path(__file__).with_name("ocr_grammar.yaml").read_text())
TEXTS: dict[str, list[str]] = {kind: _phrases(t) for kind, t in _grammar["texts"].items()}
"""Kind of target text -> its patterns, with the names of WORDS in braces."""
SCENES: dict[str, dict[str, list[str]]] = {
    theme: {"kinds": scene.pop("kinds").split()} | {k: _phrases(t) for k, t in scene.items()}
    for theme, scene in _grammar["scenes"].items()
}
"""Theme -> the kinds of text that it can show, carriers, how the text is on them, and where."""
STYLE, LETTERING, LIGHT, MOOD = (
    _phrases(_grammar[name]) for name in ("style", "lettering", "light", "mood")
)
WORDS: dict[str, list[str]] = {
    name: [word.replace("_", " ") for word in block.split()]
    for name, block in _grammar["words"].items()
}
WORDS["n"] = [str(n) for n in range(2, 100)]
WORDS["number"] = [str(n) for n in range(101, 1000)]
WORDS["day"] = [str(n) for n in range(1, 31)]
WORDS["year"] = [str(n) for n in range(1880, 2090)]


def generate(count: int, seed: int, held_out: Collection[str] = OCR) -> list[str]:
    """`count` different prompts, a function of the seed; a longer list begins with a shorter one.

    held_out: digests of target texts that must not appear.
    """
    # a text as seed gives the same numbers on every machine
    return _draw(count, random.Random(f"{seed}/ocr"), held_out)


def validation(seed: int) -> list[str]:
    """The prompts of a validation set, by the seed. Hold their target texts out of the training."""
    return _draw(VALIDATION, random.Random(f"{seed}/ocr/validation"), OCR)


def _draw(count: int, rng: random.Random, held_out: Collection[str]) -> list[str]:
    prompts: dict[str, None] = {}  # a set in the order of insertion
    texts = _texts(rng, held_out)
    while len(prompts) < count:
        prompts[_prompt(rng, *next(texts))] = None
    return list(prompts)


def _texts(rng: random.Random, held_out: Collection[str]) -> Iterator[tuple[str, str]]:
    """(kind, text) in the public lengths. A text that is not needed yet waits for its turn."""
    waiting: dict[int, deque[tuple[str, str]]] = defaultdict(deque)
    kinds = list(TEXTS)
    while True:
        (length,) = rng.choices(list(LENGTHS), weights=list(LENGTHS.values()))
        while not waiting[length]:
            kind = rng.choice(kinds)
            pattern = rng.choice(TEXTS[kind])
            text = re.sub(r"\{(\w+)\}", lambda name: rng.choice(WORDS[name[1]]), pattern)
            if rng.random() < CAPITALS:
                text = text.upper()
            words = text.lower().split()
            usable = len(text) in LENGTHS and len(set(words)) == len(words)  # no word twice
            if usable and len(waiting[len(text)]) < WAITING and digest(text) not in held_out:
                waiting[len(text)].append((kind, text))
        yield waiting[length].popleft()


def _prompt(rng: random.Random, kind: str, text: str) -> str:
    """A prompt whose scene can show a text of this kind."""
    scene = SCENES[rng.choice([t for t, scene in SCENES.items() if kind in scene["kinds"]])]
    prompt = rng.choice(FORMS).format(
        text=text,
        carrier=rng.choice(scene["carriers"]),
        how=rng.choice(scene["how"]),
        where=rng.choice(scene["where"]),
        style=rng.choice(STYLE),
        lettering=rng.choice(LETTERING),
        light=rng.choice(LIGHT),
        mood=rng.choice(MOOD),
    )
    return prompt[0].upper() + prompt[1:]
