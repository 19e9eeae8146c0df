"""Prompts of the tiny world: GenEval's tags over drawings, signs with short words, and the mix of
both that the preference task asks for.

`python scripts/tiny/prompts.py` writes the shipped files. What the prompts of `*_val` and `*_test`
and GenEval's own prompts ask for (`facts`), in whatever words, no caption of pretraining and no
training prompt asks for; nor have they the words of their signs. A prompt has several wordings
(`WORDINGS`): each task has its own, and no teacher ever sees "here is".
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np

from flowalign.backbone.tiny import PROMPTS
from flowalign.backbone.tiny.drawings import CLASSES, COLORS
from flowalign.backbone.tiny.scenes import LETTERS, RELATIONS, SIGN_COLORS

Metadata = dict[str, Any]
OFFICIAL = PROMPTS / "geneval_official.jsonl"  # GenEval's own, of our classes and colours
WORDINGS = {
    "geneval": "a photo of {}",
    "ocr": "{}",
    "preference": "a picture of {}",
    "unseen": "here is {}",
}
STYLE_WORDING = "a {style} drawing of {text}"  # of objects; signs have one style
TAGS = {"two_object": 80, "counting": 80, "position": 120, "color_attr": 120}  # of 400 prompts
TRAINING = {  # of 40 prompts that train GenEval: more of what the base seldom draws
    "below": 6,
    "right of": 6,
    "above": 3,
    "left of": 3,
    "two": 2,
    "three": 7,
    "four": 3,
    "color_attr": 6,
    "two_object": 4,
}
SIMPLE = ("single_object", "colors")  # too few to hold any out: pretraining alone draws them
HELD_OUT_SHARE = {"two_object": 0.1, "counting": 0.12, "position": 0.1, "color_attr": 0.1}
SIZES = {"train": 2000, "val": 400, "test": 400}  # prompts of a split
NUMBERS = ("one", "two", "three", "four")
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


def _row(tag: str, text: str, include: list[Metadata]) -> Metadata:
    return {"tag": tag, "include": include, "text": text}


def _clause(name: str, color: str | None, count: int = 1, **more: Any) -> Metadata:
    return {"class": name, "count": count} | ({"color": color} if color else {}) | more


def words(name: str, color: str | None, count: int = 1) -> str:
    """As GenEval writes it: "an orange cat", "three buses", "two sheeps"."""
    if count > 1:
        plural = name + ("es" if name == "bus" else "s")
        return " ".join(w for w in (NUMBERS[count - 1], color, plural) if w)
    noun = f"{color} {name}" if color else name
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@cache
def every(tag: str) -> list[Metadata]:
    """Every scene of one tag, as GenEval metadata with its `text`, in a fixed order."""
    colors = tuple(COLORS)
    pairs = list(permutations(CLASSES, 2))
    if tag == "single_object":
        return [_row(tag, words(s, None), [_clause(s, None)]) for s in CLASSES]
    if tag == "colors":
        return [_row(tag, words(s, c), [_clause(s, c)]) for s, c in product(CLASSES, colors)]
    if tag == "counting":
        return [
            _row(tag, words(s, c, n), [_clause(s, c, n)])
            for s, c, n in product(CLASSES, (None, *colors), (2, 3, 4))
        ]
    if tag == "two_object":  # at most one of the two has a colour
        one = [(None, None), *((c, None) for c in colors), *((None, c) for c in colors)]
        return [
            _row(tag, f"{words(a, c)} and {words(b, d)}", [_clause(a, c), _clause(b, d)])
            for (a, b), (c, d) in product(pairs, one)
        ]
    if tag == "color_attr":
        return [
            _row(tag, f"{words(a, c)} and {words(b, d)}", [_clause(a, c), _clause(b, d)])
            for (a, b), (c, d) in product(pairs, permutations(colors, 2))
        ]
    if tag == "position":
        return [
            _row(
                tag,
                f"{words(a, c)} {relation} {words(b, d)}",
                [_clause(b, d), _clause(a, c, position=[relation, 0])],
            )
            for (a, b), relation in product(pairs, RELATIONS)
            for c, d in [(None, None), *permutations(colors, 2)]
        ]
    raise ValueError(f"no tag {tag!r}; possible: {', '.join((*TAGS, *SIMPLE))}")


def facts(row: Mapping[str, Any]) -> frozenset[tuple[Any, ...]]:
    """What a scene must show, so that two wordings of the same are equal."""
    found: set[tuple[Any, ...]] = set()
    for clause in row["include"]:
        found.add((clause["class"], clause["count"], clause.get("color")))
        if "position" in clause:
            a = clause["class"]
            b = row["include"][0]["class"]
            relation = clause["position"][0]
            flip = relation in OPPOSITE
            found.add((b, OPPOSITE[relation], a) if flip else (a, relation, b))
    return frozenset(found)


@cache
def official() -> frozenset[frozenset[tuple[Any, ...]]]:
    """The facts of those of GenEval's own prompts that can be drawn."""
    return frozenset(facts(json.loads(line)) for line in OFFICIAL.read_text().splitlines())


@cache
def splits(tag: str) -> dict[str, list[Metadata]]:
    """train, val, test and official scenes of one tag; what one split asks for no other does."""
    found: dict[str, list[Metadata]] = {"train": [], "val": [], "test": [], "official": []}
    for row in every(tag):
        found[_split(tag, row)].append(row)
    return found


def _split(tag: str, row: Metadata) -> str:
    if tag in SIMPLE:
        return "train"
    if facts(row) in official():
        return "official"
    share = zlib.crc32(repr(sorted(map(str, facts(row)))).encode()) / 2**32
    cut = HELD_OUT_SHARE[tag]
    if share < cut:
        return "test"
    return "val" if share < 2 * cut else "train"


def sign(word: str, color: str | None) -> Metadata:
    """The scene of a sign, with the word as its OCR target."""
    board = f"a {color} sign" if color else "a sign"
    return {"target": word, "color": color, "text": f'{board} that says "{word}"'}


def random_word(rng: np.random.Generator) -> str:
    """2-4 letters, never one of the held-out words."""
    while True:
        length = rng.choice([2, 3, 4], p=[0.25, 0.45, 0.3])
        word = "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=length))
        if word not in HELD_OUT:
            return word


def prompt(row: Metadata, wording: str) -> str:
    """The prompt of a scene in one of the WORDINGS."""
    return WORDINGS[wording].format(row["text"])


def entry(row: Metadata, wording: str, wordings: bool) -> Metadata:
    """A line of a prompt file: the scene's metadata, which forbids more of its objects than it asks
    for, its prompt, and if asked, the prompt in every wording."""
    found = {k: v for k, v in row.items() if k != "text"}
    if "include" in row:
        found["exclude"] = [{"class": c["class"], "count": c["count"] + 1} for c in row["include"]]
    found["prompt"] = prompt(row, wording)
    return found | ({"wordings": {n: prompt(row, n) for n in WORDINGS}} if wordings else {})


def scenes(kind: str, split: str) -> list[Metadata]:
    """The scenes of a split that have a tag, or one relation, or one of NUMBERS."""
    if kind in NUMBERS:
        count = NUMBERS.index(kind) + 1
        return [row for row in splits("counting")[split] if row["include"][0]["count"] == count]
    if kind in RELATIONS:
        rows = splits("position")[split]
        return [row for row in rows if row["include"][1]["position"][0] == kind]
    return splits(kind)[split]


def objects_file(split: str, entries: int, seed: int, shares: Mapping[str, int]) -> list[Metadata]:
    """`entries` scenes of a split, shuffled, none twice. shares: the proportions of `scenes`."""
    rng = np.random.default_rng(seed)
    rows = []
    left = dict(shares)
    for kind in sorted(
        shares, key=lambda kind: len(scenes(kind, split))
    ):  # others fill a small one up
        pool = scenes(kind, split)
        wanted = round((entries - len(rows)) * left[kind] / sum(left.values()))
        rows += [pool[i] for i in rng.permutation(len(pool))[:wanted]]
        del left[kind]
    return [rows[i] for i in rng.permutation(len(rows))]


def training_file(entries: int, seed: int) -> list[Metadata]:
    """`entries` scenes for GenEval's teacher, shuffled, in the proportions of TRAINING. None is
    twice in it before all of its kind are once: "three" has 179, the others enough."""
    rng = np.random.default_rng(seed)
    rows = []
    for kind, share in TRAINING.items():
        pool = scenes(kind, "train")
        wanted = round(entries * share / sum(TRAINING.values()))
        turns = math.ceil(wanted / len(pool))
        order = np.concatenate([rng.permutation(len(pool)) for _ in range(turns)])
        rows += [pool[i] for i in order[:wanted]]
    return [rows[i] for i in rng.permutation(len(rows))]


def by_turns(rows: list[Metadata]) -> list[Metadata]:
    """The scenes with their tags taking turns: GenEval's score is the mean over tags, so the first
    prompts (`limit`) hold as many of each tag as there are."""
    turns: dict[str, int] = {}
    keys = []
    for row in rows:
        turns[row["tag"]] = turns.get(row["tag"], 0) + 1
        keys.append(turns[row["tag"]])
    return [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)]


def signs_file(split: str, entries: int, seed: int) -> list[Metadata]:
    """`entries` signs: random words for training, real ones for val and test, in every colour."""
    rng = np.random.default_rng(seed)
    colors = (*SIGN_COLORS, None)
    if split == "train":
        return [sign(random_word(rng), colors[rng.integers(len(colors))]) for _ in range(entries)]
    every_sign = [
        sign(word, color)
        for word, color in product({"val": VALIDATION_WORDS, "test": TEST_WORDS}[split], colors)
    ]
    return [every_sign[i] for i in rng.permutation(len(every_sign))[:entries]]


def files(split: str) -> dict[str, list[Metadata]]:
    """The prompts of a split, by task."""
    entries = SIZES[split]
    seed = list(SIZES).index(split)
    if split == "train":
        objects = training_file(entries, seed)
        mixed = dict.fromkeys(TAGS, 1)
    else:
        objects = by_turns(objects_file(split, entries, seed, TAGS))
        mixed = TAGS
    signs = signs_file(split, entries, seed)
    share = round(0.3 * entries)  # of signs among the preference task's scenes
    others = objects_file(split, entries - share, seed + 10, mixed)
    others += signs_file(split, share, seed + 10)
    order = np.random.default_rng(seed).permutation(len(others))
    rows = {"geneval": objects, "ocr": signs, "preference": [others[i] for i in order]}
    return {
        task: [entry(row, task, split == "test") for row in found] for task, found in rows.items()
    }


def main() -> None:
    """Write the nine files of the tasks."""
    for split in SIZES:
        for task, rows in files(split).items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (PROMPTS / f"{task}_{split}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
