"""HPSv3 (2508.03789): how much people would prefer an image for its prompt.

To be served (`flowalign serve-reward hpsv3`) from an environment of its own: the package hpsv3
pins transformers 4.45.2. Not run with real weights by this project: docs/rewards/remote.md says
what was checked and how to check the rest.
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

# Others are pickles, which can run anything.
Safetensors = Annotated[str, Field(pattern=r"\.safetensors$")]


class HPSv3(RewardBase):
    """Reward: mu, raw and unbounded; about 5 to 10 for good models.

    checkpoint: a .safetensors file; None = MizzenAI/HPSv3 from the Hub. config: the package's.
    device: None = this thread's GPU if there is one.
    batch_size: images a forward pass. 1, because prompts of unequal length are padded in a batch,
        and in bfloat16 a score would then depend a little on its neighbours.
    Raises ImportError where the package hpsv3 is not installed.
    """

    name = "hpsv3"
    licence = "Apache-2.0"
    downloads = None  # not known

    def __init__(
        self, checkpoint: Safetensors | None = None, *, device: Device = None, batch_size: Count = 1
    ) -> None:
        why = "this reward, to be served from an environment of its own, needs the package"
        package = require("hpsv3", why)
        self.batch_size = batch_size
        name = str(resolve(device))  # the package wants text
        self.model = package.HPSv3RewardInferencer(checkpoint_path=checkpoint, device=name)

    @classmethod
    def packages(cls, **options: Any) -> tuple[str, ...]:
        """What it imports."""
        return ("hpsv3",)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU."""
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
