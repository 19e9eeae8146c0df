"""DeQA and HPSv3: their formulas by hand, and the calls that their packages see.

The models themselves are code and weights on the Hub: what stands in for them here has the
attributes that their published sources use, and answers with known logits.
"""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest
import torch
from served_rewards import AFTER, BEFORE, IMAGE_TOKEN, expected_level

from flowalign.rewards import RewardSpec, build
from flowalign.rewards.clip import ImageProcessor

MEAN = [0.48, 0.46, 0.41]
PIXELS = np.random.default_rng(1).integers(0, 256, (5, 3, 20, 12), np.uint8)
IMAGES = torch.from_numpy(PIXELS).float() / 255


class Tokenizer:
    """Letters by their code, after a BOS."""

    bos_token_id = 1

    def __call__(self, text: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(input_ids=[1, *map(ord, text)])


class MPlugOwl(torch.nn.Module):
    """Logits whose five levels are known functions of the mean pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.image_processor = ImageProcessor(
            size={"shortest_edge": 20}, crop_size=20, image_mean=MEAN, image_std=[1.0, 1.0, 1.0]
        )
        self.tokenizer, self.preferential_ids_ = Tokenizer(), [7, 3, 5, 2, 9]
        self.asked: list[torch.Tensor] = []

    def forward(self, input_ids, images):
        self.asked.append(input_ids)
        logits = torch.full((len(images), 4, 11), 100.0)  # at other places and tokens: ignored
        for place, level in enumerate(self.preferential_ids_):
            logits[:, -1, level] = images.mean((1, 2, 3)) * (place + 1)
        return {"logits": logits}


def test_the_expected_level_is_softmax_times_points():
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, 0.5], [50.0, 0, 0, 0, 0], [0.0] * 5])
    for row, level in zip(logits.tolist(), expected_level(logits.half()).tolist(), strict=True):
        weights = [math.exp(x) for x in row]
        by_hand = sum(p * w for p, w in zip([5, 4, 3, 2, 1], weights, strict=True)) / sum(weights)
        assert level == pytest.approx(by_hand, abs=1e-3)
    near = torch.tensor([[2.0, 1.0, 0, 0, 0], [2.001953125, 1.0, 0, 0, 0]]).half()
    assert expected_level(near)[0] != expected_level(near)[1]  # float16 would not tell


def test_deqa_asks_the_published_question_about_padded_images(monkeypatch):
    given, model = {}, MPlugOwl()

    def from_pretrained(name, **options):
        given.update(name=name, **options)
        return model

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", from_pretrained)
    reward = build("served_rewards:DeQA", revision="abc", device="cpu", batch_size=2)
    assert given["name"] == "zhiyuanyou/DeQA-Score-Mix3" and given["revision"] == "abc"
    assert given["trust_remote_code"] is True and given["attn_implementation"] == "eager"
    scores = reward(IMAGES, [""] * 5, [{}] * 5)
    ids = [1, *map(ord, BEFORE), IMAGE_TOKEN, *map(ord, AFTER)]
    assert BEFORE + "<|image|>" + AFTER == (
        "USER: How would you rate the quality of this image?\n<|image|>\n"
        "ASSISTANT: The quality of the image is"
    )
    assert [len(asked) for asked in model.asked] == [2, 2, 1]
    assert all(row == ids for asked in model.asked for row in asked.tolist())
    colour = np.array([int(255 * x) for x in MEAN]).reshape(3, 1, 1)
    for row in range(5):
        square = np.broadcast_to(colour, (3, 20, 20)).copy()
        square[:, :, 4:16] = PIXELS[row]
        mean = (square / 255 - np.array(MEAN).reshape(3, 1, 1)).mean()
        weights = np.exp(mean * np.arange(1, 6))
        by_hand = (weights * [5, 4, 3, 2, 1]).sum() / weights.sum()
        assert scores.value[row].item() == pytest.approx(by_hand, abs=1e-4)
    assert torch.equal(reward(IMAGES.flip(0), [""] * 5, [{}] * 5).value, scores.value.flip(0))


def test_hpsv3_takes_mu_and_passes_images_and_prompts_by_name(monkeypatch):
    seen = []

    class HPSv3RewardInferencer:
        def __init__(self, config_path=None, checkpoint_path=None, device="cuda"):
            seen.append((checkpoint_path, device))
            self.model = torch.nn.Linear(2, 2).bfloat16()

        def reward(self, image_paths, prompts):
            values = [np.asarray(picture).mean() + len(p) for picture, p in
                      zip(image_paths, prompts, strict=True)]  # fmt: skip
            return torch.tensor([[v, 0.5] for v in values], dtype=torch.float64)

    package = types.ModuleType("hpsv3")
    package.__dict__["HPSv3RewardInferencer"] = HPSv3RewardInferencer
    monkeypatch.setitem(sys.modules, "hpsv3", package)
    prompts = ["a" * n for n in range(5)]
    for batch_size in (1, 3):
        reward = build("served_rewards:HPSv3", device="cpu", batch_size=batch_size)
        assert reward.model.model.weight.dtype == torch.float32  # type: ignore[attr-defined]
        scores = reward(IMAGES, prompts, [{}] * 5)
        expected = [PIXELS[row].mean() + row for row in range(5)]
        assert scores.value.tolist() == pytest.approx(expected, rel=1e-6)
        assert scores.value.dtype == torch.float32
    assert seen[0] == (None, "cpu")
    with pytest.raises(ValueError, match="checkpoint"):  # a pickle
        RewardSpec("served_rewards:HPSv3", {"checkpoint": "HPSv3_7B.pth"}).check()
