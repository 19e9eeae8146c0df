"""PickScore (2305.01569): how much people would prefer an image for its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.rewards.clip import Clip, check_model
from flowalign.rewards.options import check_common
from flowalign.rewards.towers import TEXT_CACHE
from flowalign.types import Scores

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class PickScore:
    """Reward: exp(logit_scale) * cos(text, image) / normalizer, unbounded, about 0 to 1.

    model: a Hub id or folder of a CLIPModel, or "tiny", the preference model of the tiny world,
        with which the default processor is the model's own.
    normalizer: 26 as in Flow-GRPO (flow_grpo/pickscore_scorer.py); SD3.5 images then have about
        .83. It sets the scale of the value only.
    offload: the weights lie on the CPU between calls. text_cache: prompts whose vectors are kept.
    parts: "raw", the score before division, which is what papers print.
    An image with pixels that are no numbers raises ValueError (`flowalign.rewards.score` masks).
    """

    name = "pickscore"

    def __init__(
        self,
        model: str = MODEL,
        processor: str | None = PROCESSOR,
        *,
        normalizer: float = 26.0,
        revision: str | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 64,
        offload: bool = False,
        text_cache: int = TEXT_CACHE,
    ) -> None:
        shared: dict[str, Any] = {
            "device": device,
            "batch_size": batch_size,
            "offload": offload,
            "text_cache": text_cache,
        }
        self.check_options(model, processor, normalizer=normalizer, **shared)
        own = model == "tiny" and processor == PROCESSOR
        self.clip = Clip(model, None if own else processor, revision, **shared)
        self.normalizer = normalizer

    @staticmethod
    def check_options(
        model: str = MODEL, processor: str | None = PROCESSOR, **options: Any
    ) -> None:
        """Raise ValueError for options that cannot work; loads no model."""
        check_common("reward pickscore", **options)
        check_model(model, "model")
        if processor is not None:
            check_model(processor, "processor")

    def describe(self) -> dict[str, Any]:
        """What the scores depend on."""
        return {"name": self.name, "model": self.clip.name, "normalizer": self.normalizer}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU."""
        raw = self.clip.scale * self.clip.cosine(images, prompts)
        return Scores.of(raw / self.normalizer, raw=raw)
