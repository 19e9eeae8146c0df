"""Rewards to be served (`flowalign serve-reward`) from environments of their own.

DeQA-Score is code on the Hub for transformers 4.36, and the package hpsv3 pins 4.45.2. Not run with
real weights by this project: docs/rewards/remote.md says what was checked and how to check the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from flowalign.rewards.base import RewardBase
from flowalign.rewards.options import Count, Device
from flowalign.system.devices import resolve
from flowalign.system.images import to_uint8
from flowalign.system.packages import require
from flowalign.types import Metadata, Scores

DEQA = "zhiyuanyou/DeQA-Score-Mix3"
POINTS = (5.0, 4.0, 3.0, 2.0, 1.0)  # excellent, good, fair, poor, bad
BEFORE = "USER: How would you rate the quality of this image?\n"
AFTER = "\nASSISTANT: The quality of the image is"
IMAGE_TOKEN = -200  # where the model puts the image's own tokens


def expected_level(logits: Tensor) -> Tensor:
    """Logits [B,5] of excellent to bad -> the expected level [B] in [1,5], float32.

    softmax(logits) . (5, 4, 3, 2, 1), as DeQA-Score's src/evaluate/scorer.py; that computes it in
    float16, which has steps of .004 at 4, and this in float32.
    """
    return torch.softmax(logits.float(), -1) @ torch.tensor(POINTS, device=logits.device)


def pad_to_square(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """An RGB image in the middle of a square of that colour; a square one as it is."""
    width, height = picture.size
    if width == height:
        return picture
    side = max(width, height)
    square = Image.new(picture.mode, (side, side), colour)
    square.paste(picture, ((side - width) // 2, (side - height) // 2))
    return square


def question(tokenizer: Any) -> list[int]:
    """Token ids of the question, the image's place held by IMAGE_TOKEN, one BOS at the front."""
    before, after = (list(tokenizer(text).input_ids) for text in (BEFORE, AFTER))
    repeated = after[:1] == [tokenizer.bos_token_id]  # a tokenizer puts one before each text
    return [*before, IMAGE_TOKEN, *after[repeated:]]


class DeQA(RewardBase):
    """DeQA-Score (2501.11561): the expected level in [1,5], raw; Stable Diffusion 3.5 has about
    4.07. Prompts do not count.

    model: a Hub id or folder; revision: of it. It is loaded with trust_remote_code, so this runs
        the repository's code: pin the revision that you have read. device: None = this
        thread's GPU if there is one. batch_size: images a forward pass.
    Flow-OPD's average takes a fifth of it: `normalizer: 5` of the reward `remote`.
    """

    name = "deqa"
    licence = "MIT"
    downloads = None  # not known

    def __init__(
        self,
        model: str = DEQA,
        *,
        revision: str | None = None,
        device: Device = None,
        batch_size: Count = 8,
    ) -> None:
        from transformers import AutoModelForCausalLM  # `check` does without

        self.device = resolve(device)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.float16
        self.batch_size = batch_size
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            revision=revision or "main",
            trust_remote_code=True,
            attn_implementation="eager",  # as on its model card
            torch_dtype=self.dtype,
        )
        self.model = loaded.requires_grad_(False).eval().to(self.device)
        self.processor = self.model.image_processor
        self.colour = tuple(int(255 * x) for x in self.processor.image_mean)
        self.question = torch.tensor([question(self.model.tokenizer)], device=self.device)
        self.levels = list(self.model.preferential_ids_)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = [torch.empty(0)]
        for chunk in images.split(self.batch_size):
            pictures = [pad_to_square(Image.fromarray(to_uint8(i)), self.colour) for i in chunk]
            pixels = self.processor.preprocess(pictures, return_tensors="pt")["pixel_values"]
            logits = self.model(
                input_ids=self.question.repeat(len(chunk), 1),
                images=pixels.to(self.device, self.dtype),
            )["logits"]
            scores.append(expected_level(logits[:, -1, self.levels]).cpu())
        return Scores.of(torch.cat(scores))


# Others are pickles, which can run anything.
Safetensors = Annotated[str, Field(pattern=r"\.safetensors$")]


class HPSv3(RewardBase):
    """HPSv3 (2508.03789): mu, raw and unbounded; about 5 to 10 for good models.

    checkpoint: a .safetensors file; None = MizzenAI/HPSv3 from the Hub. config: the package's.
    device: None = this thread's GPU if there is one.
    batch_size: images a forward pass. 1, because prompts of unequal length are padded in a batch,
        and in bfloat16 a score would then depend a little on its neighbours.
    Raises ImportError where the package hpsv3 is not installed.
    """

    name = "hpsv3"
    licence = "Apache-2.0"
    imports = ("hpsv3",)
    downloads = None  # not known

    def __init__(
        self, checkpoint: Safetensors | None = None, *, device: Device = None, batch_size: Count = 1
    ) -> None:
        why = "this reward, to be served from an environment of its own, needs the package"
        package = require("hpsv3", why)
        self.batch_size = batch_size
        name = str(resolve(device))  # the package wants text
        self.model = package.HPSv3RewardInferencer(checkpoint_path=checkpoint, device=name)
        if name == "cpu":  # there the package's head of float32 does not take its model's bfloat16
            self.model.model.float()

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = [torch.empty(0)]
        for start in range(0, len(images), self.batch_size):
            rows = slice(start, start + self.batch_size)
            # By keyword: the order of the two differs between hpsv3 1.0.0 and its repository.
            logits = self.model.reward(
                prompts=list(prompts[rows]),
                image_paths=[Image.fromarray(to_uint8(image)) for image in images[rows]],
            )
            # [B,2] = (mu, sigma); sigma, the model's doubt, is dropped
            scores.append(logits[:, 0].float().cpu())
        return Scores.of(torch.cat(scores))
