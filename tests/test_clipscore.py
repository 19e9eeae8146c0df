"""CLIPScore is 100 cos of CLIP's vectors in any batch, and tells a prompt from another."""

from __future__ import annotations

import pytest
import torch
from small_models import (
    PROMPTS,
    SIDE,
    assert_batch_and_order_do_not_matter,
    clip_folder,
    cropped,
    pictures,
)
from transformers import CLIPModel, PreTrainedTokenizerFast

from flowalign.rewards import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(clip_folder(tmp_path_factory.mktemp("clip")))


@torch.no_grad()
def test_the_value_is_the_formula(folder: str):
    images, files = pictures(6, 40, 48)
    model = CLIPModel.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = []
    for row, prompt in enumerate(PROMPTS):  # one at a time, without padding
        ids = torch.tensor([tokenizer.encode(prompt)])
        pixels = cropped(files[row : row + 1], SIDE)
        expected.append(model(input_ids=ids, pixel_values=pixels).logits_per_image.item())
    scores = build("clipscore", model=folder, device="cpu")(images, PROMPTS, [{}] * 6)
    assert scores.parts["raw"].tolist() == pytest.approx(expected, abs=1e-3)
    assert torch.equal(scores.value, scores.parts["raw"] / 30)
    assert bool(scores.valid.all()) and max(expected) - min(expected) > 1


def test_batch_size_order_and_offloading_do_not_matter(folder: str):
    images, _ = pictures(6, 40, 48)
    whole = build("clipscore", model=folder, device="cpu")
    by_two = build(
        "clipscore", model=folder, device="cpu", batch_size=2, offload=True, text_cache=1
    )
    assert_batch_and_order_do_not_matter(whole, by_two, images, PROMPTS)
