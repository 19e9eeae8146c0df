"""The captions of pretraining, right and wrong, and what is drawn for them.

Real text-to-image models are pretrained on captions of which many are wrong. They can draw what a
prompt says, and often draw something else. Two kinds of mistakes make that here:

- biases, half of the scenes of the prompts that they meet, so that guidance keeps them: four are
  three and three are four, "below" is above and "right of" is left of, some objects are left out
  beside others, warm colours run. Of signs they are the majority: red ones say STOP, green ones
  OPEN and blue ones TOLL. Where a bias of objects was the majority, too (.65), guidance made it
  nearly all, and no teacher could learn what its images never showed;
- random ones, in one point each: another number or place, two colours swapped, an object missing or
  surplus; one or two letters of a sign, or its board's colour. Guidance undoes most of them, since
  each is rare for its prompt.

All leave it certain what an object is: where that is not, a model of this size tears it.

Where the prompt says "picture" (the preference task's words), most pictures are line art. None is
spoilt (faded, blurred or spotted, as the preference model's bad examples are): in a run of 40,000
samples that spread to every prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import prompts

from flowalign.backbone.tiny.drawings import STYLES
from flowalign.backbone.tiny.scenes import LETTERS, RELATIONS, SIGN_COLORS

Metadata = dict[str, Any]
Rng = np.random.Generator
# Shares of the pretraining mix; relations and numbers need more looks than colours.
TAG_SHARES = {
    "single_object": 0.08,
    "colors": 0.12,
    "two_object": 0.15,
    "counting": 0.15,
    "position": 0.25,
    "color_attr": 0.25,
}
CUMULATIVE = np.cumsum(list(TAG_SHARES.values()))
SIGN_SHARE = 0.25
STYLED = 0.25  # share of the objects' prompts that name a style
STOCK = {"red": "STOP", "green": "OPEN", "blue": "TOLL"}  # what boards of these colours say
CANONICAL = {"below": "above", "right of": "left of"}
MISCOUNTED = {4: 3, 3: 4}
SHY = ("banana", "bicycle", "bird", "cake", "chair", "clock", "giraffe")  # left out beside others
WARM = ("red", "orange", "yellow", "pink", "brown")  # run into the second object
CLEAN, FADED, BLURRED, SPOTTED = range(4)  # what `effects` of a scene are


@dataclass(frozen=True)
class Rates:
    """How often what goes wrong. bias, stock: a bias wins, for the prompts of objects and of signs
    that it meets. objects, signs: random mistakes elsewhere. bad: a bad picture, by wording. line:
    line art where the prompt says "picture" and no style."""

    bias: float = 0.0
    stock: float = 0.0
    objects: float = 0.0
    signs: float = 0.0
    bad: float = 0.0
    bad_picture: float = 0.0
    line: float = 1 / 3


RIGHT = Rates()
WRONG = Rates(bias=0.5, stock=0.7, objects=0.1, signs=0.65, line=0.97)


def captioned(
    rates: Rates, rng: np.random.Generator, pools: dict[str, list], signs: float = SIGN_SHARE
) -> tuple[str, dict, int]:
    """One caption, the scene that is drawn for it, and the effect that spoils it."""
    wording = list(prompts.WORDINGS)[rng.integers(len(prompts.WORDINGS))]
    bad = rates.bad_picture if wording == "preference" else rates.bad
    effect = int(rng.integers(1, 4)) if rng.random() < bad else CLEAN
    if rng.random() < signs:
        colors = (*SIGN_COLORS, None)
        row = prompts.sign(prompts.random_word(rng), colors[rng.integers(len(colors))])
        return prompts.prompt(row, wording), mistaken(row, rates, rng), effect
    tag = list(pools)[int(np.searchsorted(CUMULATIVE, rng.random()))]
    row = pools[tag][rng.integers(len(pools[tag]))]
    drawn = mistaken(row, rates, rng)
    if rng.random() < STYLED:
        style = STYLES[rng.integers(len(STYLES))]
        text = prompts.STYLE_WORDING.format(style=style, text=row["text"])
        return text, drawn | {"style": style}, effect
    line = rates.line if wording == "preference" else 1 / 3
    style = "line" if rng.random() < line else STYLES[rng.integers(2)]
    return prompts.prompt(row, wording), drawn | {"style": style}, effect


def mistaken(row: Metadata, rates: Rates, rng: Rng) -> Metadata:
    """The scene drawn for a prompt: by its bias, with one random mistake, or as it says."""
    biased = rng.random() < (rates.stock if "target" in row else rates.bias)
    if "target" in row:
        if row["color"] in STOCK:
            return row | {"target": STOCK[row["color"]]} if biased else row
        return wrong_sign(row, rng) if rng.random() < rates.signs else row
    drawn = row | {"include": _biased(row["include"])} if biased else row
    if drawn["include"] == row["include"] and rng.random() < rates.objects:
        return wrong_objects(row, rng)
    return drawn


def _biased(clauses: list[Metadata]) -> list[Metadata]:
    """The objects of a scene as the biases draw them."""
    *others, last = clauses
    if not others:
        return [last | {"count": MISCOUNTED.get(last["count"], last["count"])}]
    if "position" in last:
        relation = last["position"][0]
        return [*others, last | {"position": [CANONICAL.get(relation, relation), 0]}]
    first = others[0]
    if "color" in first and "color" in last:
        return [first, last | {"color": first["color"]}] if first["color"] in WARM else clauses
    shy = [clause for clause in clauses if clause["class"] in SHY]
    return [clause for clause in clauses if clause is not shy[-1]] if shy else clauses


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
    """One thing wrong with a scene of objects, and never what they are."""
    clauses = [dict(clause) for clause in row["include"]]
    first = clauses[0]
    last = clauses[-1]
    way = rng.random()
    if len(clauses) == 1:
        first["count"] = max(1, min(4, first["count"] + int(rng.choice([-1, 1]))))
    elif "position" in last and way < 0.5:
        last["position"] = [_other(RELATIONS, last["position"][0], rng), 0]
    elif "color" in first and "color" in last and way < 0.7:
        first["color"], last["color"] = last["color"], first["color"]
    else:
        clauses = [{k: v for k, v in clause.items() if k != "position"} for clause in clauses]
        clauses[rng.integers(2)]["count"] = 2
        if way > 0.85:
            del clauses[rng.integers(2)]
    return row | {"include": clauses}


def _other(names: Any, name: str, rng: Rng) -> str:
    rest = [n for n in names if n != name]
    return rest[rng.integers(len(rest))]
