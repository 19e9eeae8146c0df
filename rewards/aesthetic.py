"""The LAION aesthetic predictor, v2: how much people like the look of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.rewards.clip import LARGE, Clip, check_model
from flowalign.rewards.head import Head
from flowalign.rewards.options import check_common
from flowalign.rewards.weights import check_file, fit, locate, read
from flowalign.types import Scores

HEAD = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"


class Aesthetic:
    """Reward: a linear head on CLIP's unit image vector, / normalizer, about .1 to 1.

    Source: christophschuhmann/improved-aesthetic-predictor, as Flow-GRPO uses it
    (flow_grpo/aesthetic_scorer.py), which leaves the value undivided. The prompt is not looked at.
    model: a Hub id or folder of a CLIPModel (CLIP ViT-L/14 by default).
    head: its file, .pth or .safetensors, or owner/repository/file on the Hub. The default is TRL's
        copy of sac+logos+ava1-l14-linearMSE.pth; docs/rewards/preference.md has the checksum of
        the original.
    normalizer: 10, the end of the scale that people rated on. It sets the scale of the value only.
    offload: the weights lie on the CPU between calls.
    parts: "raw", the score before division, about 1 to 10.
    Raises OSError where a file cannot be had, ValueError where it is not that of a head for this
    model. An image with pixels that are no numbers raises ValueError too.
    """

    name = "aesthetic"

    def __init__(
        self,
        model: str = LARGE,
        head: str = HEAD,
        *,
        normalizer: float = 10.0,
        revision: str | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 64,
        offload: bool = False,
    ) -> None:
        shared: dict[str, Any] = {"device": device, "batch_size": batch_size, "offload": offload}
        self.check_options(model, head, normalizer=normalizer, **shared)
        path = locate(head)
        found = read(path)  # before the large model, as the likelier to be wrong
        self.clip = Clip(model, None, revision, **shared, text_cache=0)
        self.head = Head(self.clip.width).requires_grad_(False).eval()
        fit(self.head, found, path)
        self.normalizer, self.source = normalizer, head

    @staticmethod
    def check_options(model: str = LARGE, head: str = HEAD, **options: Any) -> None:
        """Raise ValueError for options that cannot work; loads no model."""
        check_common("reward aesthetic", **options)
        check_model(model, "model")
        check_file(head, "head", HEAD)

    def describe(self) -> dict[str, Any]:
        """What the scores depend on."""
        return {
            "name": self.name,
            "model": self.clip.name,
            "head": self.source,
            "normalizer": self.normalizer,
        }

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] -> Scores of B, on the CPU."""
        seen = self.clip.image_features(images).cpu()
        raw = self.head(seen)  # a million weights: the CPU will do
        return Scores.of(raw / self.normalizer, raw=raw)
