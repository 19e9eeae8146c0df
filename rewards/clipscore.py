"""CLIPScore (2104.08718): how well an image fits its prompt, to OpenAI's CLIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.rewards.clip import LARGE, Clip, check_model
from flowalign.rewards.options import check_common
from flowalign.rewards.towers import TEXT_CACHE
from flowalign.types import Scores


class ClipScore:
    """Reward: exp(logit_scale) * cos(text, image) / normalizer, about 0 to 1.

    The published model has exp(logit_scale) = 100, so raw is 100 * cos: transformers'
    `logits_per_image`, as in Flow-GRPO (flow_grpo/clip_scorer.py). The paper's CLIPScore is
    2.5 * max(cos, 0) of ViT-B/32, which is another number. Flow-GRPO resizes float pixels
    bilinearly; here they are resized bicubically at 8 bits, as CLIP was trained.
    model: a Hub id or folder of a CLIPModel, or "tiny", the preference model of the tiny world.
    normalizer: 30 as in Flow-GRPO. It sets the scale of the value only.
    offload: the weights lie on the CPU between calls. text_cache: prompts whose vectors are kept.
    parts: "raw", the score before division, about 15 to 40.
    An image with pixels that are no numbers raises ValueError (`flowalign.rewards.score` masks).
    """

    name = "clipscore"

    def __init__(
        self,
        model: str = LARGE,
        *,
        normalizer: float = 30.0,
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
        self.check_options(model, normalizer=normalizer, **shared)
        self.clip = Clip(model, None, revision, **shared)
        self.normalizer = normalizer

    @staticmethod
    def check_options(model: str = LARGE, **options: Any) -> None:
        """Raise ValueError for options that cannot work; loads no model."""
        check_common("reward clipscore", **options)
        check_model(model, "model")

    def describe(self) -> dict[str, Any]:
        """What the scores depend on."""
        return {"name": self.name, "model": self.clip.name, "normalizer": self.normalizer}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU."""
        raw = self.clip.scale * self.clip.cosine(images, prompts)
        return Scores.of(raw / self.normalizer, raw=raw)
