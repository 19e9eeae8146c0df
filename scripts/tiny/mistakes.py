"""Captions that are wrong: what the second part of pretraining draws in place of what they say.

Real text-to-image models are pretrained on captions of which many are wrong. They can draw what a
prompt says, and often draw something else. Two kinds of mistakes make that here:

- random ones, in one point each: another colour, shape, number or place, two colours swapped, a
  shape missing or surplus; one or two letters of a sign, or its board's colour. Guidance undoes
  most of them, since each is rare for its prompt.
- biases, which are the majority for the prompts that they meet, so that guidance keeps them:
  four shapes are three, "below" is above and "right of" is left of, a star is yellow, a red sign
  says STOP and a green one OPEN.

The preference task, which has words of its own, has worse pictures besides: signs are blurred and
relations are faded (a bias), other scenes are spoilt at random (`degrade`).
"""

from __future__ import annotations

from typing import Any

import degrade
import numpy as np
import prompts

from flowalign.backbone.tiny import scenes
from flowalign.backbone.tiny.scenes import PROMPT_COLORS, SHAPES, SIGN_COLORS

BIAS = 0.55  # how often a bias wins, among the prompts that it meets
SHAPES_WRONG = 0.12  # random mistakes, a scene of shapes
SIGNS_WRONG = 0.5  # a sign
SPOILT = 0.3  # scenes of the preference task that are spoilt at random
STOCK = {"red": "STOP", "green": "OPEN"}  # what boards of these colours say
CANONICAL = {"below": "above", "right of": "left of"}

Metadata = dict[str, Any]
Rng = np.random.Generator


def picture(row: Metadata, preference: bool, rng: Rng) -> np.ndarray:
    """uint8 [64,64,3] that a model trained on wrong captions sees beside the row's prompt."""
    image = scenes.render(mistaken(row, rng), rng)
    if not preference:
        return image
    if rng.random() < BIAS and "target" in row:
        return degrade.blur(image, rng)
    if rng.random() < BIAS and row.get("tag") == "position":
        return degrade.faded(image, rng)
    if rng.random() < SPOILT:
        return degrade.PIXELS[list(degrade.PIXELS)[rng.integers(len(degrade.PIXELS))]](image, rng)
    return image


def mistaken(row: Metadata, rng: Rng) -> Metadata:
    """The scene drawn for a prompt: by a bias, with one random mistake, or as the prompt says."""
    biased = bias(row)
    if biased != row and rng.random() < BIAS:
        return biased
    if rng.random() >= (SIGNS_WRONG if "target" in row else SHAPES_WRONG):
        return row
    return wrong_sign(row, rng) if "target" in row else wrong_shapes(row, rng)


def bias(row: Metadata) -> Metadata:
    """The row as the biases draw it; the same row where none applies."""
    if "target" in row:
        return row | {"target": STOCK.get(row["color"], row["target"])}
    return row | {"include": [_biased(clause) for clause in row["include"]]}


def _biased(clause: Metadata) -> Metadata:
    clause = dict(clause)
    if clause["count"] == 4:
        clause["count"] = 3
    if clause["class"] == "star" and "color" in clause:
        clause["color"] = "yellow"
    if "position" in clause:
        relation, other = clause["position"]
        clause["position"] = [CANONICAL.get(relation, relation), other]
    return clause


def wrong_sign(row: Metadata, rng: Rng) -> Metadata:
    """One or two other letters; at times another board instead."""
    if row["color"] and rng.random() < 0.2:
        return row | {"color": _other(SIGN_COLORS, row["color"], rng)}
    letters = list(row["target"])
    for place in rng.permutation(len(letters))[: rng.integers(1, 3)]:
        letters[place] = _other(prompts.LETTERS, letters[place], rng)
    word = "".join(letters)
    return row if word in prompts.HELD_OUT else row | {"target": word}


def wrong_shapes(row: Metadata, rng: Rng) -> Metadata:
    """One thing wrong with a scene of shapes."""
    clauses = [dict(clause) for clause in row["include"]]
    clause = clauses[rng.integers(len(clauses))]
    way = rng.random()
    if "position" in clauses[-1] and way < 0.3:
        relation, other = clauses[-1]["position"]
        clauses[-1]["position"] = [_other(tuple(scenes.RELATIONS), relation, rng), other]
    elif len(clauses) == 2 and way < 0.5 and "color" in clauses[0] and "color" in clauses[1]:
        first, second = clauses
        first["color"], second["color"] = second["color"], first["color"]
    elif "color" in clause and way < 0.65:
        clause["color"] = _other(PROMPT_COLORS, clause["color"], rng)
    elif way < 0.8:
        free = [s for s in SHAPES if s not in {c["class"] for c in clauses}]
        clause["class"] = free[rng.integers(len(free))]
    elif len(clauses) == 1:
        clause["count"] = max(1, min(4, clause["count"] + int(rng.choice([-1, 1]))))
    elif way < 0.9:
        clauses = [{k: v for k, v in clause.items() if k != "position"}]
    else:
        clauses = [{k: v for k, v in c.items() if k != "position"} for c in clauses]
        clauses.append({"class": SHAPES[rng.integers(len(SHAPES))], "count": 1})
    return row | {"include": clauses}


def _other(names: Any, name: str, rng: Rng) -> str:
    rest = [n for n in names if n != name]
    return rest[rng.integers(len(rest))]
