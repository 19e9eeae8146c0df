"""The shipped PickScore prefers clean scenes to spoilt ones."""

from __future__ import annotations

from collections.abc import Sequence

import degrade
import numpy as np
import preference
import pytest
import torch
from torch import Tensor

from flowalign.rewards.clip import Clip
from flowalign.rewards.preference import PickScore

OPTIONS = {"model": "tiny", "normalizer": 25.0, "device": "cpu"}
REWARD = PickScore(**OPTIONS)


def held_out(count: int, seed: int = 0) -> list[tuple[dict, list]]:
    """Rows of the test prompts, each with the prompts that a mismatch is taken from."""
    source = preference.rows("test", np.random.default_rng(seed))
    return [next(source) for _ in range(count)]


def scored(images: np.ndarray, rows: list[tuple[dict, list]]) -> Tensor:
    """Raw scores [N] of uint8 images [N,64,64,3]."""
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    return REWARD(tensor, [row["prompt"] for row, _ in rows], [{}] * len(rows)).parts["raw"]


def test_a_prompt_is_encoded_once_and_cut_where_the_model_ends(monkeypatch: pytest.MonkeyPatch):
    clip = Clip("tiny", None, "cpu")
    long = " ".join(["star"] * 100)
    vectors = clip.text_features(["a star", long, "a star"])
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(3), atol=1e-6)
    assert torch.equal(vectors[0], vectors[2]) and clip._text_vector.cache_info().currsize == 2
    monkeypatch.setattr(clip, "model", None)  # nothing is encoded again
    assert torch.equal(clip.text_features([long]), vectors[1:2])


def test_a_text_has_the_same_vector_whatever_was_asked_with_it_or_before():
    clip, texts = Clip("tiny", None, "cpu"), [row["prompt"] for row, _ in held_out(6)]
    together = clip.text_features(texts)
    clip._text_vector.cache_clear()
    alone = [clip.text_features([text]) for text in texts[:3]]
    assert torch.equal(torch.cat(alone), together[:3])
    assert torch.equal(clip.text_features(texts[::-1]), together.flip(0))


SPOILT = "blur bleed malformed clutter faded oversaturated missing mismatch".split()


def pairs(kinds: Sequence[str], count: int, seed: int) -> tuple[np.ndarray, np.ndarray, list]:
    """Clean scenes of held-out prompts, the spoilt ones, and their rows; the kinds take turns."""
    rng, rows = np.random.default_rng(seed), held_out(count, seed=seed)
    both = [
        degrade.pair(row, kinds[i % len(kinds)], pool, i, rng) for i, (row, pool) in enumerate(rows)
    ]
    clean, spoilt = (np.stack(images) for images in zip(*both, strict=True))
    return clean, spoilt, rows


def test_clean_scenes_beat_spoilt_and_blank_ones():
    clean, spoilt, rows = pairs(SPOILT, 16, seed=5)
    right = scored(clean, rows)
    assert (right > scored(spoilt, rows)).float().mean() >= 0.8
    for color in ((0, 0, 0), (235, 235, 235), (255, 0, 0)):
        blank = np.broadcast_to(np.array(color, np.uint8), clean.shape).copy()
        assert (right > scored(blank, rows)).float().mean() >= 0.9
