"""Prompts of the tiny world: GenEval's tags over shapes, signs with short words, and the mix of
both that the preference task asks for in words of its own.

`python scripts/tiny/prompts.py` writes the shipped files. What the prompts of `*_val` and `*_test`
ask for (`facts`), in whatever words, is never drawn in pretraining nor trained on; nor are their
words. Every GenEval prompt forbids each surplus shape by its own metadata (`exclude`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np

from flowalign.backbone.tiny import PROMPTS
from flowalign.backbone.tiny.scenes import PROMPT_COLORS, RELATIONS, SHAPES, SIGN_COLORS

Metadata = dict[str, Any]
TAGS = {"two_object": 48, "counting": 24, "position": 208, "color_attr": 120}  # of 400 prompts
SIMPLE = ("single_object", "colors")  # too few to hold any out: pretraining alone draws them
HELD_OUT_SHARE = {"two_object": 0.31, "counting": 0.29, "position": 0.16, "color_attr": 0.34}
SIZES = {"train": 2000, "val": 400, "test": 400}  # prompts of a split
NUMBERS = ("one", "two", "three", "four")
LETTERS = "ACDEILNOPRST"
OPPOSITE = {"left of": "right of", "above": "below"}
TEST_WORDS = """
AT DO IN IS IT NO ON OR SO TO AN AS ACE ACT AID AIR ALL AND ANT ARE ART CAN CAP CAR CAT COD EAR
EAT END ICE LIP NET OIL OLD ONE PAN PEA PEN PIN POT RAT RED SAD SEA SIT SON TEA TEN TIN TOP CARD
COAL COAT COIN COLD CORN DEER DOOR IDEA IRON ISLE LAND LION NAIL NEST NOSE RAIN ROAD ROPE SALT
SAND SEED SOAP TREE TRAP PLAN CLAN DISC LOAN ROSE
""".split()
VALIDATION_WORDS = """
AD ED LA LO PA PI ADD COT DAD DEN DIP DOT EEL ILL LAD LID LIT LOT NAP NOD NOR ODD PAD PET PIE ROD
SIN SIP TAN TAP TIE TIP ROT RIP SET SPA TOE AREA CANE DATE DEAL DICE DIRT EAST LACE LINE NEAR NICE
NOTE PALE PINE POOL POLE POND PORT RACE RENT RICE RIDE ROLE SAIL SALE SEAL SEAT SIDE SLOT SOIL SPOT
STAR STEP TAIL TALL TIDE TILE TIRE TONE TOOL TRIP SLIP CROP
""".split()
HELD_OUT = frozenset(TEST_WORDS) | frozenset(VALIDATION_WORDS)


def _shapes(text: str, include: list[Metadata]) -> Metadata:
    wanted = {clause["class"]: clause["count"] for clause in include}
    exclude = [{"class": shape, "count": wanted.get(shape, 0) + 1} for shape in SHAPES]
    return {"include": include, "exclude": exclude, "prompt": f"a photo of {text}"}


def _clause(shape: str, color: str | None, count: int = 1, **more: Any) -> Metadata:
    return {"class": shape, "count": count} | ({"color": color} if color else {}) | more


def _words(shape: str, color: str | None, count: int = 1) -> str:
    number = "a" if count == 1 else NUMBERS[count - 1]
    return " ".join(w for w in (number, color, shape if count == 1 else f"{shape}s") if w)


@cache
def geneval_prompts(tag: str) -> list[Metadata]:
    """Every prompt of one tag, as GenEval metadata with its prompt, in a fixed order."""
    colors = PROMPT_COLORS
    pairs = list(permutations(SHAPES, 2))
    rows: list[Metadata] = []
    if tag == "single_object":
        rows = [_shapes(_words(s, None), [_clause(s, None)]) for s in SHAPES]
    elif tag == "colors":
        rows = [_shapes(_words(s, c), [_clause(s, c)]) for s, c in product(SHAPES, colors)]
    elif tag == "counting":
        for shape, color, n in product(SHAPES, (None, *colors), (2, 3, 4)):
            rows.append(_shapes(_words(shape, color, n), [_clause(shape, color, n)]))
    elif tag == "two_object":  # at most one of the two has a colour
        one = [(None, None), *((c, None) for c in colors), *((None, c) for c in colors)]
        for (a, b), (c, d) in product(pairs, one):
            text = f"{_words(a, c)} and {_words(b, d)}"
            rows.append(_shapes(text, [_clause(a, c), _clause(b, d)]))
    elif tag == "color_attr":
        for (a, b), (c, d) in product(pairs, permutations(colors, 2)):
            text = f"{_words(a, c)} and {_words(b, d)}"
            rows.append(_shapes(text, [_clause(a, c), _clause(b, d)]))
    elif tag == "position":
        for (a, b), relation, (c, d) in product(
            pairs, RELATIONS, [(None, None), *permutations(colors, 2)]
        ):
            include = [_clause(b, d), _clause(a, c, position=[relation, 0])]
            rows.append(_shapes(f"{_words(a, c)} {relation} {_words(b, d)}", include))
    else:
        raise ValueError(f"no tag {tag!r}; possible: {', '.join((*TAGS, *SIMPLE))}")
    return [{"tag": tag} | row for row in rows]


def facts(row: Mapping[str, Any]) -> frozenset[tuple[Any, ...]]:
    """What a scene of shapes must show, so that two wordings of the same are equal."""
    found: set[tuple[Any, ...]] = set()
    for clause in row["include"]:
        found.add((clause["class"], clause["count"], clause.get("color")))
        if "position" in clause:
            a, b, relation = clause["class"], row["include"][0]["class"], clause["position"][0]
            flip = relation in OPPOSITE
            found.add((b, OPPOSITE[relation], a) if flip else (a, relation, b))
    return frozenset(found)


@cache
def geneval_splits(tag: str) -> dict[str, list[Metadata]]:
    """train, val and test prompts of one tag; what one split asks for no other does."""
    rows = geneval_prompts(tag)
    if tag in SIMPLE:
        return {"train": rows, "val": [], "test": []}
    scenes = sorted({facts(row) for row in rows}, key=lambda f: sorted(map(str, f)))
    order = np.random.default_rng(list(TAGS).index(tag)).permutation(len(scenes))
    cut = round(HELD_OUT_SHARE[tag] * len(scenes))
    split_of = {scenes[i]: "train" for i in order}
    split_of |= {scenes[i]: "test" for i in order[:cut]}
    split_of |= {scenes[i]: "val" for i in order[cut : 2 * cut]}
    splits: dict[str, list[Metadata]] = {"train": [], "val": [], "test": []}
    for row in rows:
        splits[split_of[facts(row)]].append(row)
    return splits


def by_turns(rows: list[Metadata], seed: int) -> list[Metadata]:
    """The prompts with their tags taking turns, in a random order each time: GenEval's score is the
    mean over tags, so the first prompts (`limit`) hold as many of each tag as there are."""
    rng = np.random.default_rng(seed)
    turns: dict[str, int] = {}
    keys = []
    for row in rows:
        turns[row["tag"]] = turns.get(row["tag"], 0) + 1
        keys.append((turns[row["tag"]], rng.random()))
    return [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)]


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


def geneval_file(split: str, entries: int, seed: int) -> list[Metadata]:
    """`entries` prompts of a split, shuffled; none twice where the split has that many. Tags have
    the proportions of TAGS, and equal ones for training: GenEval's score is the mean over tags."""
    rng = np.random.default_rng(seed)
    rows: list[Metadata] = []
    shares = dict.fromkeys(TAGS, 1) if split == "train" else TAGS
    for tag, share in shares.items():
        pool = geneval_splits(tag)[split]
        wanted = round(entries * share / sum(shares.values()))
        order = np.concatenate([rng.permutation(len(pool)) for _ in range(wanted // len(pool) + 1)])
        rows += [pool[i] for i in order[:wanted]]
    return [rows[i] for i in rng.permutation(len(rows))]


def sign_file(split: str, entries: int, seed: int) -> list[Metadata]:
    """`entries` signs: random words for training, real ones for val and test, in every colour."""
    rng = np.random.default_rng(seed)
    names = [*SIGN_COLORS, None]
    if split == "train":
        return [
            sign_prompt(random_word(rng), names[rng.integers(len(names))]) for _ in range(entries)
        ]
    words = {"val": VALIDATION_WORDS, "test": TEST_WORDS}[split]
    every = [sign_prompt(word, color) for word, color in product(words, names)]
    return [every[i] for i in rng.permutation(len(every))[:entries]]


def preference_prompt(row: Metadata) -> Metadata:
    """The same scene as the preference task words it, so that a model can tell the tasks apart:
    shapes without "a photo of", and "one sign" for "a sign"."""
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


def files(split: str) -> dict[str, list[Metadata]]:
    """The shipped prompts of a split, by task."""
    entries, seed = SIZES[split], list(SIZES).index(split)
    shapes = geneval_file(split, entries, seed)
    return {
        "geneval": shapes if split == "train" else by_turns(shapes, seed),
        "ocr": sign_file(split, entries, seed),
        "preference": preference_file(split, entries, seed + len(SIZES)),
    }


def main() -> None:
    """Write the nine shipped prompt files."""
    PROMPTS.mkdir(exist_ok=True)
    for split in SIZES:
        for name, rows in files(split).items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (PROMPTS / f"{name}_{split}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
