"""PickScore (2305.01569): how much people would prefer an image for its prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.rewards.clip import Clip, check_model
from flowalign.types import Scores

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class PickScore:
    """Reward: exp(logit_scale) * cos(text, image) / normalizer, unbounded, about 0 to 1.

    model: a Hub id or folder of a CLIPModel, or "tiny", the preference model of the tiny world,
        with which the default processor is the model's own.
    normalizer: 26 as in Flow-GRPO (flow_grpo/pickscore_scorer.py); SD3.5 images then have about
        .83. It sets the scale of the value only.
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
    ) -> None:
        self.check_options(model, processor, normalizer=normalizer, batch_size=batch_size)
        own = model == "tiny" and processor == PROCESSOR
        self.clip = Clip(model, None if own else processor, revision, device, batch_size)
        self.normalizer = normalizer

    @staticmethod
    def check_options(
        model: str = MODEL,
        processor: str | None = PROCESSOR,
        *,
        normalizer: float = 26.0,
        batch_size: int = 64,
        **others: Any,
    ) -> None:
        """Raise ValueError for options that cannot work; loads no model."""
        number = isinstance(normalizer, (int, float)) and not isinstance(normalizer, bool)
        if not number or not math.isfinite(normalizer) or normalizer <= 0:
            raise ValueError(
                f"`normalizer` of reward pickscore is {normalizer!r}; it divides the score, so "
                "give a number above 0 (26 for PickScore_v1)."
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(
                f"`batch_size` of reward pickscore is {batch_size!r}; use 1 or more images."
            )
        check_model(model, "model")
        if processor is not None:
            check_model(processor, "processor")

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU."""
        seen, read = self.clip.image_features(images), self.clip.text_features(prompts)
        raw = (self.clip.scale * (seen * read).sum(-1)).cpu()
        return Scores.of(raw / self.normalizer, raw=raw)
