"""Scenes in numbers: an endless, seeded stream of captions and of what is drawn for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import prompts
import torch
from mistakes import CLEAN, Rates, mistaken
from torch import Tensor

from flowalign.backbone.tiny.drawings import STYLES
from flowalign.backbone.tiny.scenes import LAYERS, SIGN_COLORS, compose, ground

# Shares of the pretraining mix; relations and numbers need more looks than colours.
TAG_SHARES = {
    "single_object": 0.08,
    "colors": 0.12,
    "two_object": 0.15,
    "counting": 0.15,
    "position": 0.25,
    "color_attr": 0.25,
}
SIGN_SHARE = 0.25
STYLED = 0.25  # share of the objects' prompts that name a style
EMPTY = 0.1  # prompts dropped for CFG


@dataclass(frozen=True)
class Scenes:
    """Captions and what is drawn for them: layers int16 [N,L,3], grounds uint8 [N,3], effects
    uint8 [N] (what spoils each, `mistakes`), ids uint8 [N,T]."""

    layers: Tensor
    grounds: Tensor
    effects: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> Scenes:
        """The same on a device."""
        return Scenes(*(part.to(device, non_blocking=True) for part in vars(self).values()))

    def pin_memory(self) -> Scenes:
        """The same in page-locked memory; DataLoader calls it."""
        return Scenes(*(part.pin_memory() for part in vars(self).values()))


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
    tag = list(pools)[int(np.searchsorted(_CUMULATIVE, rng.random()))]
    row = pools[tag][rng.integers(len(pools[tag]))]
    drawn = mistaken(row, rates, rng)
    if rng.random() < STYLED:
        style = STYLES[rng.integers(len(STYLES))]
        text = prompts.STYLE_WORDING.format(style=style, text=row["text"])
        return text, drawn | {"style": style}, effect
    line = rates.line if wording == "preference" else 1 / 3
    style = "line" if rng.random() < line else STYLES[rng.integers(2)]
    return prompts.prompt(row, wording), drawn | {"style": style}, effect


_CUMULATIVE = np.cumsum(list(TAG_SHARES.values()))


def draws(
    seed: int, size: int, rates: Rates, spell: Callable[[str], list[int]], signs: float = SIGN_SHARE
) -> Iterator[Scenes]:
    """Batches of `size` scenes, without end; `seed` fixes the whole stream."""
    rng = np.random.default_rng(seed)
    pools = {tag: prompts.splits(tag)["train"] for tag in TAG_SHARES}
    empty = spell("")
    while True:
        layers = np.empty((size, LAYERS, 3), np.int16)
        grounds, effects = np.empty((size, 3), np.uint8), np.empty(size, np.uint8)
        ids = np.empty((size, len(empty)), np.uint8)
        for i in range(size):
            text, scene, effects[i] = captioned(rates, rng, pools, signs)
            layers[i], grounds[i] = compose(scene, rng), ground(rng)
            ids[i] = empty if rng.random() < EMPTY else spell(text)
        yield Scenes(*map(torch.from_numpy, (layers, grounds, effects, ids)))
