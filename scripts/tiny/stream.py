"""Scenes in numbers: an endless, seeded stream for training."""

from __future__ import annotations

from collections.abc import Iterator

import mistakes
import numpy as np
import prompts
import torch
from torch import Tensor

from flowalign.backbone.tiny import scenes

# Shares of the pretraining mix; relations and numbers need more looks than colours.
TAG_SHARES = {
    "single_object": 0.03,
    "colors": 0.07,
    "two_object": 0.15,
    "counting": 0.15,
    "position": 0.32,
    "color_attr": 0.28,
}
SIGN_SHARE = 0.25
PREFERENCE_SHARE = 0.3  # prompts in the words of the preference task


def draws(
    seed: int, sign_share: float = SIGN_SHARE, wrong: bool = False
) -> Iterator[tuple[np.ndarray, str]]:
    """Scenes of the training combinations and words only, with their prompts; `seed` fixes the
    whole stream. wrong: drawn with the mistakes of `mistakes`."""
    rng = np.random.default_rng(seed)
    pools = {tag: prompts.geneval_splits(tag)["train"] for tag in TAG_SHARES}
    tags, shares = list(TAG_SHARES), list(TAG_SHARES.values())
    colors = [*scenes.SIGN_COLORS, None]
    while True:
        if rng.random() < sign_share:
            row = prompts.sign_prompt(prompts.random_word(rng), colors[rng.integers(len(colors))])
        else:
            pool = pools[tags[rng.choice(len(tags), p=shares)]]
            row = pool[rng.integers(len(pool))]
        preference = rng.random() < PREFERENCE_SHARE
        image = mistakes.picture(row, preference, rng) if wrong else scenes.render(row, rng)
        yield image, (prompts.preference_prompt(row) if preference else row)["prompt"]


def batch(stream: Iterator[tuple[np.ndarray, str]], size: int) -> tuple[Tensor, list[str]]:
    """The next `size` scenes: images [size,3,64,64] in [-1,1], and their prompts."""
    rows = [next(stream) for _ in range(size)]
    images = torch.from_numpy(np.stack([image for image, _ in rows]))
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1, [text for _, text in rows]
