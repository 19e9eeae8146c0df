"""Prompts of the tiny world: GenEval's six tags over shapes, signs with short words, and the mix of
both that the preference task asks for in words of its own.

`python scripts/tiny/prompts.py` writes the shipped files. The combinations and the words of
`*_val` and `*_test` are never drawn in pretraining nor trained on (single_object, with its four
prompts, cannot be held out). Entries repeat a prompt where a tag has few held-out combinations;
each entry has its own noise.
"""

from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

import numpy as np

from flowalign.backbone.tiny import PROMPTS
from flowalign.backbone.tiny.scenes import COLORS, PROMPT_COLORS, RELATIONS, SHAPES, SIGN_COLORS

Metadata = dict[str, Any]
TAGS = {  # entries of the official test set, which fix the proportions of ours
    "single_object": 80,
    "two_object": 99,
    "counting": 80,
    "colors": 94,
    "position": 100,
    "color_attr": 100,
}
NUMBERS = ("one", "two", "three", "four")
LETTERS = "ACDEILNOPRST"
TEST_WORDS = """
AT DO IN IS IT NO ON OR SO TO AN AS ACE ACT AID AIR ALL AND ANT ARE ART CAN CAP CAR CAT COD EAR
EAT END ICE LIP NET OIL OLD ONE PAN PEA PEN PIN POT RAT RED SAD SEA SIT SON TEA TEN TIN TOP CARD
COAL COAT COIN COLD CORN DEER DOOR IDEA IRON ISLE LAND LION NAIL NEST NOSE OPEN
""".split()
VALIDATION_WORDS = """
AD ED LA LO PA PI ADD COT DAD DEN DIP DOT EEL ILL LAD LID LIT LOT NAP NOD NOR ODD PAD PET PIE ROD
SIN SIP TAN TAP TIE TIP AREA CANE DATE DEAL DICE DIRT EAST LACE LINE NEAR NICE NOTE PALE PINE POOL
""".split()


def _plural(shape: str, count: int) -> str:
    return shape if count == 1 else f"{shape}s"


def geneval_prompts(tag: str) -> list[Metadata]:
    """Every prompt of one tag, as GenEval metadata with its prompt, in a fixed order."""
    rows: list[tuple[str, list[Metadata], list[Metadata]]] = []
    pairs = list(permutations(SHAPES, 2))
    if tag == "single_object":
        rows = [(f"a {s}", [{"class": s, "count": 1}], []) for s in SHAPES]
    elif tag == "two_object":
        for a, b in pairs:
            include = [{"class": a, "count": 1}, {"class": b, "count": 1}]
            rows.append((f"a {a} and a {b}", include, []))
    elif tag == "counting":
        for shape, n in product(SHAPES, range(1, 5)):
            include = [{"class": shape, "count": n}]
            exclude = [{"class": shape, "count": n + 1}]
            rows.append((f"{NUMBERS[n - 1]} {_plural(shape, n)}", include, exclude))
    elif tag == "colors":
        for color, shape in product(COLORS, SHAPES):
            rows.append((f"a {color} {shape}", [{"class": shape, "count": 1, "color": color}], []))
    elif tag == "position":
        for (a, b), relation in product(pairs, RELATIONS):
            include = [
                {"class": b, "count": 1},
                {"class": a, "count": 1, "position": [relation, 0]},
            ]
            rows.append((f"a {a} {relation} a {b}", include, []))
    elif tag == "color_attr":
        for (a, b), (c, d) in product(pairs, permutations(COLORS, 2)):
            include = [
                {"class": a, "count": 1, "color": c},
                {"class": b, "count": 1, "color": d},
            ]
            rows.append((f"a {c} {a} and a {d} {b}", include, []))
    else:
        raise ValueError(f"no tag {tag!r}; possible: {', '.join(TAGS)}")
    return [
        {"tag": tag, "include": include}
        | ({"exclude": exclude} if exclude else {})
        | {"prompt": f"a photo of {text}"}
        for text, include, exclude in rows
    ]


def geneval_splits(tag: str) -> dict[str, list[Metadata]]:
    """train, val and test prompts of one tag: disjoint, a sixth each held out for val and test.

    The split is made over all of COLORS, and restricted to PROMPT_COLORS afterwards: the first
    part of the pretraining drew all of them, and must not have seen what is held out now.
    """
    rows = geneval_prompts(tag)
    if tag == "single_object":
        return {"train": rows, "val": rows, "test": rows}
    order = np.random.default_rng(list(TAGS).index(tag)).permutation(len(rows))
    cut = max(2, len(rows) // 6)
    parts = {"test": order[:cut], "val": order[cut : 2 * cut], "train": order[2 * cut :]}
    return {
        split: [rows[i] for i in part if _colors_of(rows[i]) <= set(PROMPT_COLORS)]
        for split, part in parts.items()
    }


def _colors_of(row: Metadata) -> set[str]:
    return {clause["color"] for clause in row["include"] if "color" in clause}


def sign_prompt(word: str, color: str | None) -> Metadata:
    """The prompt of a sign, with the word as its OCR target."""
    board = f"{color} sign" if color else "sign"
    return {"target": word, "color": color, "prompt": f'a {board} that says "{word}"'}


def random_word(rng: np.random.Generator) -> str:
    """2-4 letters, never one of the held-out words."""
    while True:
        length = rng.choice([2, 3, 4], p=[0.25, 0.45, 0.3])
        word = "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=length))
        if word not in HELD_OUT:
            return word


HELD_OUT = frozenset(TEST_WORDS) | frozenset(VALIDATION_WORDS)


def _random_color(rng: np.random.Generator) -> str | None:
    names = [*SIGN_COLORS, None]
    return names[rng.integers(len(names))]


def geneval_file(split: str, entries: int, seed: int) -> list[Metadata]:
    """`entries` prompts of a split in the official proportions of the tags, shuffled."""
    rng = np.random.default_rng(seed)
    rows: list[Metadata] = []
    for tag, share in TAGS.items():
        pool = geneval_splits(tag)[split]
        wanted = round(entries * share / sum(TAGS.values()))
        order = np.concatenate([rng.permutation(len(pool)) for _ in range(wanted // len(pool) + 1)])
        rows += [pool[i] for i in order[:wanted]]
    return [rows[i] for i in rng.permutation(len(rows))]


def sign_file(split: str, entries: int, seed: int) -> list[Metadata]:
    """`entries` signs: random words for training, real ones for val and test.

    No prompt asks for a yellow board: its black letters are a second alphabet, which the shipped
    model can hardly write, so that its images would all have the same reward. A prompt
    that names no colour may still draw one.
    """
    rng = np.random.default_rng(seed)
    if split == "train":
        return [sign_prompt(random_word(rng), _random_color(rng)) for _ in range(entries)]
    words = {"val": VALIDATION_WORDS, "test": TEST_WORDS}[split]
    order = np.concatenate([rng.permutation(len(words)) for _ in range(entries // len(words) + 1)])
    return [sign_prompt(words[i], _random_color(rng)) for i in order[:entries]]


def preference_prompt(row: Metadata) -> Metadata:
    """The same scene as the preference task words it, so that a model can tell the tasks apart.

    Shapes without "a photo of", and "one sign" for "a sign". The base model, which knows neither
    wording, draws both nearly as well as its own; it fails at signs worded any freer.
    """
    text = row["prompt"]
    text = f"one {text[2:]}" if "target" in row else text.removeprefix("a photo of ")
    return row | {"prompt": text}


def preference_file(split: str, entries: int, seed: int) -> list[Metadata]:
    """`entries` prompts of a split: 70 % shapes in the proportions of the tags, 30 % signs."""
    signs = round(0.3 * entries)
    shapes = geneval_file(split, entries - signs + len(TAGS), seed)[: entries - signs]  # it rounds
    rows = shapes + sign_file(split, signs, seed)
    order = np.random.default_rng(seed).permutation(len(rows))
    return [preference_prompt(rows[i]) for i in order]


def main() -> None:
    """Write the nine shipped prompt files."""
    PROMPTS.mkdir(exist_ok=True)
    sizes = {"train": 2000, "val": 256, "test": 768}
    for seed, (split, entries) in enumerate(sizes.items()):
        files = {
            "geneval": geneval_file(split, entries, seed),
            "ocr": sign_file(split, entries, seed),
            "preference": preference_file(split, entries, seed + len(sizes)),
        }
        for name, rows in files.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (PROMPTS / f"{name}_{split}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
