"""The shipped PickScore prefers clean, coloured drawings of what the prompt says."""

from __future__ import annotations

import prompts
import pytest
import torch
from mistakes import BLURRED, FADED, SPOTTED
from torch import Tensor

from flowalign.backbone.tiny.scenes import rendered
from flowalign.rewards.clip import Clip
from flowalign.rewards.preference import PickScore
from flowalign.training.data import load_prompts

REWARD = PickScore(model="tiny", normalizer=28.0, device="cpu")
ROWS = [row for row in load_prompts("tiny/preference_test", "p").metadata if "include" in row][:24]
TEXTS = [prompts.prompt(row | {"text": row["wordings"]["ocr"]}, "preference") for row in ROWS]


def scored(images: Tensor) -> Tensor:
    return REWARD(images, TEXTS, [{}] * len(TEXTS)).parts["raw"]


def drawn(style: str) -> Tensor:
    return rendered([{**row, "style": style} for row in ROWS], 3)


def test_a_prompt_is_encoded_once_and_cut_where_the_model_ends(monkeypatch: pytest.MonkeyPatch):
    clip = Clip("tiny", None, "cpu")
    long = " ".join(["dog"] * 100)
    vectors = clip.text_features(["a dog", long, "a dog"])
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(3), atol=1e-6)
    assert torch.equal(vectors[0], vectors[2]) and clip._text_vector.cache_info().currsize == 2
    monkeypatch.setattr(clip, "model", None)  # nothing is encoded again
    assert torch.equal(clip.text_features([long]), vectors[1:2])


def test_a_text_has_the_same_vector_whatever_was_asked_with_it_or_before():
    clip, texts = Clip("tiny", None, "cpu"), TEXTS[:6]
    together = clip.text_features(texts)
    clip._text_vector.cache_clear()
    alone = [clip.text_features([text]) for text in texts[:3]]
    assert torch.equal(torch.cat(alone), together[:3])
    assert torch.equal(clip.text_features(texts[::-1]), together.flip(0))


def test_clean_coloured_drawings_beat_line_art_other_prompts_and_blank_images():
    right = scored(drawn("flat"))
    assert (right > scored(drawn("line"))).float().mean() >= 0.9
    assert (right > scored(drawn("flat").roll(1, 0))).float().mean() >= 0.9
    for color in ((0, 0, 0), (0.92, 0.92, 0.92), (1, 0, 0)):
        blank = torch.tensor(color).view(1, 3, 1, 1).expand(len(ROWS), 3, 96, 96)
        assert (right > scored(blank)).float().mean() >= 0.9


@pytest.mark.parametrize("effect", [FADED, BLURRED, SPOTTED])
def test_clean_drawings_beat_spoilt_ones(effect: int):
    import pretrain

    painter = pretrain.Painter(torch.device("cpu"))
    spoil = {FADED: painter.faded, BLURRED: painter.blurred, SPOTTED: painter.spots}[effect]
    clean = drawn("noto")
    assert (scored(clean) > scored(spoil(clean))).float().mean() >= 0.8
