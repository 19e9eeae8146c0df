"""The value of each preference reward is its formula, whatever the batch, the order and the place
where its model waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_aesthetic
import test_hpsv2
import test_imagereward
import torch
from PIL import Image, ImageOps
from small_models import PROMPTS, SIDE, clip_folder, cropped, normalized, pictures
from torch import Tensor
from transformers import CLIPModel, PreTrainedTokenizerFast

from flowalign.rewards import build
from flowalign.rewards.preference import PickScore

Images = list[Image.Image]


@dataclass(frozen=True)
class Case:
    """raw: the score [B] of PIL images and prompts, by hand; the value is raw / scale. size: of the
    images."""

    options: dict[str, Any]
    scale: float
    raw: Callable[[Images, Sequence[str]], Tensor]
    size: tuple[int, int] = (40, 48)
    tolerance: float = 1e-3
    prompts: Sequence[str] = tuple(PROMPTS)


def clipscore(folder: Path, request: pytest.FixtureRequest) -> Case:
    model = CLIPModel.from_pretrained(clip_folder(folder))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def raw(images: Images, prompts: Sequence[str]) -> Tensor:
        found = []
        for image, prompt in zip(images, prompts, strict=True):  # without padding
            ids, pixels = torch.tensor([tokenizer.encode(prompt)]), cropped([image], SIDE)
            found.append(model(input_ids=ids, pixel_values=pixels).logits_per_image[0, 0])
        return torch.stack(found)

    return Case({"model": str(folder)}, 30, raw)


def aesthetic(folder: Path, request: pytest.FixtureRequest) -> Case:
    options, weights = test_aesthetic.saved(folder), test_aesthetic.head_weights()
    model = CLIPModel.from_pretrained(options["model"])

    def raw(images: Images, prompts: Sequence[str]) -> Tensor:
        seen = model.vision_model(pixel_values=cropped(images, SIDE)).pooler_output
        x = torch.nn.functional.normalize(model.visual_projection(seen).double())
        for layer in test_aesthetic.SIZES:  # linear all through
            weight, bias = (weights[f"layers.{layer}.{name}"] for name in ("weight", "bias"))
            x = x @ weight.double().T + bias
        return x[:, 0].float()

    return Case(options, 10, raw, tolerance=1e-4)


def hpsv2(folder: Path, request: pytest.FixtureRequest) -> Case:
    open_clip = request.getfixturevalue("open_clip")
    options = test_hpsv2.saved(open_clip, folder)
    model = open_clip.create_model("flowalign-small", pretrained=options["weights"]).eval()
    tokenizer = open_clip.get_tokenizer("flowalign-small")

    def raw(images: Images, prompts: Sequence[str]) -> Tensor:
        bicubic = Image.Resampling.BICUBIC
        squares = [ImageOps.pad(image, (32, 32), bicubic, color=(0, 0, 0)) for image in images]
        seen, read = model.encode_image(normalized(squares)), model.encode_text(tokenizer(prompts))
        return torch.cosine_similarity(seen, read)

    return Case(options, 1, raw, (24, 48), 1e-5)


def pickscore(folder: Path, request: pytest.FixtureRequest) -> Case:
    clip: Any = PickScore(model="tiny", device="cpu").clip

    def raw(images: Images, prompts: Sequence[str]) -> Tensor:
        ids = clip.tokenizer(prompts, padding=True, return_tensors="pt")["input_ids"]
        arrays = [torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8) for i in images]
        pixels = torch.stack(arrays).view(-1, 96, 96, 3).permute(0, 3, 1, 2) / 127.5 - 1
        return clip.model(input_ids=ids, pixel_values=pixels).logits_per_image.diagonal()

    return Case({"model": "tiny", "normalizer": 25.0}, 25, raw, (96, 96))


def imagereward(folder: Path, request: pytest.FixtureRequest) -> Case:
    reference = test_imagereward.Reference(test_imagereward.official())

    def raw(images: Images, prompts: Sequence[str]) -> Tensor:
        ids, pixels = map(test_imagereward.ids_of, prompts), cropped(images, SIDE)
        return torch.tensor([reference.score(*both) for both in zip(pixels, ids, strict=True)])

    prompts = test_imagereward.PROMPTS
    return Case(test_imagereward.saved(folder), 1, raw, tolerance=2e-4, prompts=prompts)


REWARDS = (clipscore, aesthetic, hpsv2, pickscore, imagereward)


@pytest.fixture(scope="module", params=REWARDS, ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    found = request.param(tmp_path_factory.mktemp("reward"), request)
    named = {"name": request.param.__name__, "device": "cpu"}
    return Case(**{**vars(found), "options": found.options | named})


@torch.no_grad()
def test_the_value_is_the_formula(case: Case) -> None:
    images, files = pictures(6, *case.size)
    expected, rows = case.raw(files, case.prompts), [{}] * 6
    scores = build(**case.options)(images, case.prompts, rows)
    assert torch.allclose(scores.parts["raw"], expected, atol=case.tolerance)
    assert torch.equal(scores.value, scores.parts["raw"] / case.scale)
    options: dict[str, Any] = {**case.options, "normalizer": 2.0 * case.scale}
    half = build(**options)(images, case.prompts, rows)
    assert torch.allclose(half.value, scores.value / 2) and bool(scores.valid.all())


@torch.no_grad()
def test_the_prompt_counts_unless_only_images_are_scored(case: Case) -> None:
    images, _ = pictures(1, *case.size)
    scores = build(**case.options)(images.expand(6, -1, -1, -1), case.prompts, [{}] * 6)
    assert (scores.value.std() > 1e-5) == (case.options["name"] != "aesthetic")


def test_batch_size_order_and_offloading_do_not_matter(case: Case) -> None:
    images, _ = pictures(6, *case.size)
    whole, back = build(**case.options), torch.arange(5, -1, -1)
    by_two = build(**case.options, batch_size=2, offload=True)
    expected = whole(images, case.prompts, [{}] * 6)
    turned = by_two(images[back], case.prompts[::-1], [{}] * 6)
    assert torch.allclose(turned.value[back], expected.value, atol=1e-5)
    alone = by_two(images[1:2], case.prompts[1:2], [{}])
    assert torch.allclose(alone.value, expected.value[1:2], atol=1e-5)
    assert expected.value.std() > 1e-4  # it does depend on the images
