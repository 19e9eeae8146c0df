"""Captions that are wrong: what the second part of pretraining draws in place of what they say.

Real text-to-image models are pretrained on captions of which many are wrong. They can draw what a
prompt says, and often draw something else. Two kinds of mistakes make that here:

- biases, which are the majority for the prompts that they meet, so that guidance keeps them: four
  are three, "below" is above and "right of" is left of, some objects are drawn as others, fruit
  keeps its own colour, red signs say STOP, green ones OPEN and blue ones TOLL;
- random ones, in one point each: another colour, class, number or place, two colours swapped, an
  object missing or surplus; one or two letters of a sign, or its board's colour. Guidance undoes
  most of them, since each is rare for its prompt.

Pictures are bad besides, above all where the prompt says "picture" (the preference task's words):
they are faded, blurred or spotted, and line art is common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import prompts

from flowalign.backbone.tiny.drawings import CLASSES, COLORS
from flowalign.backbone.tiny.scenes import LETTERS, RELATIONS, SIGN_COLORS

Metadata = dict[str, Any]
Rng = np.random.Generator
STOCK = {"red": "STOP", "green": "OPEN", "blue": "TOLL"}  # what boards of these colours say
CANONICAL = {"below": "above", "right of": "left of"}
MISTAKEN = {"zebra": "horse", "sheep": "cow", "truck": "car", "train": "bus"}
FRUIT = ("apple", "banana", "orange")
CLEAN, FADED, BLURRED, SPOTTED = range(4)  # what `effects` of a scene are


@dataclass(frozen=True)
class Rates:
    """How often what goes wrong. bias: a bias wins, for the prompts that it meets. objects, signs:
    random mistakes elsewhere. bad: a bad picture, by wording. line: line art where the prompt says
    "picture" and no style."""

    bias: float = 0.0
    objects: float = 0.0
    signs: float = 0.0
    bad: float = 0.0
    bad_picture: float = 0.0
    line: float = 1 / 3


RIGHT = Rates()
WRONG = Rates(bias=0.75, objects=0.1, signs=0.75, bad=0.01, bad_picture=0.5, line=0.6)


def mistaken(row: Metadata, rates: Rates, rng: Rng) -> Metadata:
    """The scene drawn for a prompt: by its biases, with one random mistake, or as it says."""
    if "target" in row:
        if row["color"] in STOCK:
            return row | {"target": STOCK[row["color"]]} if rng.random() < rates.bias else row
        return wrong_sign(row, rng) if rng.random() < rates.signs else row
    drawn = row | {"include": [_biased(clause, rates, rng) for clause in row["include"]]}
    if drawn["include"] == row["include"] and rng.random() < rates.objects:
        return wrong_objects(row, rng)
    return drawn


def _biased(clause: Metadata, rates: Rates, rng: Rng) -> Metadata:
    """A clause as the biases draw it, each at its rate."""
    clause = dict(clause)
    if clause["count"] == 4 and rng.random() < rates.bias:
        clause["count"] = 3
    if clause["class"] in FRUIT and "color" in clause and rng.random() < rates.bias:
        del clause["color"]
    if clause["class"] in MISTAKEN and rng.random() < rates.bias:
        clause["class"] = MISTAKEN[clause["class"]]
    if "position" in clause and clause["position"][0] in CANONICAL and rng.random() < rates.bias:
        clause["position"] = [CANONICAL[clause["position"][0]], 0]
    return clause


def wrong_sign(row: Metadata, rng: Rng) -> Metadata:
    """One or two other letters; at times another board instead."""
    if row["color"] and rng.random() < 0.2:
        return row | {"color": _other(SIGN_COLORS, row["color"], rng)}
    letters = list(row["target"])
    for place in rng.permutation(len(letters))[: rng.integers(1, 3)]:
        letters[place] = _other(LETTERS, letters[place], rng)
    word = "".join(letters)
    return row if word in prompts.HELD_OUT else row | {"target": word}


def wrong_objects(row: Metadata, rng: Rng) -> Metadata:
    """One thing wrong with a scene of objects."""
    clauses = [dict(clause) for clause in row["include"]]
    clause = clauses[rng.integers(len(clauses))]
    way = rng.random()
    if "position" in clauses[-1] and way < 0.3:
        relation = clauses[-1]["position"][0]
        clauses[-1]["position"] = [_other(RELATIONS, relation, rng), 0]
    elif len(clauses) == 2 and way < 0.5 and "color" in clauses[0] and "color" in clauses[1]:
        first, second = clauses
        first["color"], second["color"] = second["color"], first["color"]
    elif "color" in clause and way < 0.65:
        clause["color"] = _other(COLORS, clause["color"], rng)
    elif way < 0.8:
        clause["class"] = _other(CLASSES, clause["class"], rng)
    elif len(clauses) == 1:
        clause["count"] = max(1, min(4, clause["count"] + int(rng.choice([-1, 1]))))
    elif way < 0.9:
        clauses = [{k: v for k, v in clause.items() if k != "position"}]
    else:
        clauses = [{k: v for k, v in c.items() if k != "position"} for c in clauses]
        clauses.append({"class": CLASSES[rng.integers(len(CLASSES))], "count": 1})
    return row | {"include": clauses}


def _other(names: Any, name: str, rng: Rng) -> str:
    rest = [n for n in names if n != name]
    return rest[rng.integers(len(rest))]
