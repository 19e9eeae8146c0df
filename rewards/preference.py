"""Rewards with one CLIP: preference scores, CLIPScore, the aesthetic predictor, and diversity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.rewards.base import CLIP_L, VIT_H, VIT_L, Cost, RewardBase
from flowalign.rewards.clip import LARGE, TEXT_CACHE, Clip, ClipModel, TwoTowers
from flowalign.rewards.options import Count, Device, Divisor, TextCache
from flowalign.rewards.weights import WeightsFile, fit_weights, read_weights
from flowalign.types import Metadata, Scores

PICKSCORE = "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
AESTHETIC_HEAD = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"


class Preference(RewardBase):
    """Base of rewards with value = raw / normalizer.

    normalizer: sets the scale of the value only. parts: "raw", the score before division.
    source: what else the scores depend on, such as the model, for `describe`.
    """

    clip: TwoTowers

    def __init__(self, normalizer: float, **source: str) -> None:
        self.normalizer, self.source = normalizer, source

    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """The published score [B], on the CPU, of images [B,3,H,W] in [0,1] and their prompts."""
        return self.clip.scale * self.clip.cosine(images, prompts)

    def describe(self) -> dict[str, Any]:
        """What the scores depend on."""
        return {"name": self.name, **self.source, "normalizer": self.normalizer}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU.

        Raises ValueError for pixels that are NaN or infinite (`flowalign.rewards.score` masks).
        """
        raw = self.raw(images, prompts)
        return Scores.of(raw / self.normalizer, raw=raw)


class ClipScore(Preference):
    """CLIPScore (2104.08718): exp(logit_scale) * cos(text, image) / normalizer, about 0 to 1.

    The published model has exp(logit_scale) = 100, so raw is 100 * cos: transformers'
    `logits_per_image`, as in Flow-GRPO (flow_grpo/clip_scorer.py). The paper's CLIPScore is
    2.5 * max(cos, 0) of ViT-B/32, which is another number. Flow-GRPO resizes float pixels
    bilinearly; here they are resized bicubically at 8 bits, as CLIP was trained.
    model: a Hub id or folder of a CLIPModel, or "tiny", the preference model of the tiny world.
    normalizer: 30 as in Flow-GRPO; raw is about 15 to 40.
    offload: the weights lie on the CPU between calls. text_cache: prompts whose vectors are kept.
    """

    name = "clipscore"
    cost, downloads = Cost(VIT_L), CLIP_L

    def __init__(
        self,
        model: ClipModel = LARGE,
        *,
        normalizer: Divisor = 30.0,
        revision: str | None = None,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
        text_cache: TextCache = TEXT_CACHE,
    ) -> None:
        computing = {"device": device, "batch_size": batch_size, "offload": offload}
        self.clip = Clip(model, None, revision, **computing, text_cache=text_cache)
        super().__init__(normalizer, model=self.clip.name)


class PickScore(Preference):
    """PickScore (2305.01569): exp(logit_scale) * cos(text, image) / normalizer, about 0 to 1.

    model: a Hub id or folder of a CLIPModel, or "tiny", the preference model of the tiny world.
    processor: where its image processor and tokenizer are; None = beside the model. For "tiny" the
        default is the model's own.
    normalizer: 26 as in Flow-GRPO (pickscore_scorer.py), about .83 there. Papers print raw.
    offload, text_cache: as for `ClipScore`.
    """

    name = "pickscore"
    cost, downloads = Cost(VIT_H), {PICKSCORE: 3.9}

    def __init__(
        self,
        model: ClipModel = PICKSCORE,
        processor: ClipModel | None = PICKSCORE_PROCESSOR,
        *,
        normalizer: Divisor = 26.0,
        revision: str | None = None,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
        text_cache: TextCache = TEXT_CACHE,
    ) -> None:
        if model == "tiny" and processor == PICKSCORE_PROCESSOR:
            processor = None
        computing = {"device": device, "batch_size": batch_size, "offload": offload}
        self.clip = Clip(model, processor, revision, **computing, text_cache=text_cache)
        super().__init__(normalizer, model=self.clip.name)


class Aesthetic(Preference):
    """LAION's aesthetic predictor, v2: a linear head on CLIP's unit image vector, / normalizer.

    Source: christophschuhmann/improved-aesthetic-predictor, as Flow-GRPO uses it
    (flow_grpo/aesthetic_scorer.py), which leaves the value undivided. The prompt is not used.
    model: a Hub id or folder of a CLIPModel (CLIP ViT-L/14 by default).
    head: its file, .pth or .safetensors, or owner/repository/file on the Hub. The default is TRL's
        copy of sac+logos+ava1-l14-linearMSE.pth (its checksum: docs/rewards/preference.md).
    normalizer: 10, the end of the scale that people rated on; raw is about 1 to 10.
    Raises OSError where a file cannot be had, ValueError where it holds no head for this model.
    """

    name = "aesthetic"
    cost, downloads = Cost(VIT_L), CLIP_L

    def __init__(
        self,
        model: ClipModel = LARGE,
        head: WeightsFile = AESTHETIC_HEAD,
        *,
        normalizer: Divisor = 10.0,
        revision: str | None = None,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
    ) -> None:
        weights = read_weights(head)  # before the large model, as the likelier to be wrong
        computing = {"device": device, "batch_size": batch_size, "offload": offload}
        self.clip = Clip(model, None, revision, **computing, text_cache=0)
        self.head = Head(self.clip.width).requires_grad_(False).eval()
        fit_weights(self.head, weights, head)
        super().__init__(normalizer, model=self.clip.name, head=head)

    @torch.no_grad()
    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """The rating [B]; the head has a million weights and stays on the CPU."""
        return self.head(self.clip.image_features(images).cpu())


class Head(nn.Module):
    """width -> 1024 -> 128 -> 64 -> 16 -> 1, linear layers only: [B,width] -> [B].

    Source: christophschuhmann/improved-aesthetic-predictor (MLP). ImageReward's is the same.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # Dropout does nothing here, but it counts in the weights' names: layers.{0,2,4,6,7}.
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors [B,width] -> [B]."""
        return self.layers(vectors).squeeze(-1)


class Diversity(RewardBase):
    """Groupwise reward in [0,2]: 1 - mean cosine of an image to the others of its prompt.

    The cosine is of CLIP image features. model: a Hub id or folder of a CLIPModel, or "tiny".
    An image that has no other of its prompt is invalid. A guard against collapse, meant as a small
    part of a `weighted` sum: alone it pays for noise.
    """

    name = "diversity"
    downloads = CLIP_L
    groupwise = True

    def __init__(
        self,
        model: ClipModel = LARGE,
        *,
        revision: str | None = None,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
    ) -> None:
        computing = {"device": device, "batch_size": batch_size, "offload": offload}
        self.clip = Clip(model, None, revision, **computing, text_cache=0)

    def describe(self) -> dict[str, Any]:
        """What the scores depend on."""
        return {"name": self.name, "model": self.clip.name}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [K,3,H,W] in [0,1] of one prompt -> Scores of K, on the CPU."""
        if len(images) < 2:
            raise ValueError("one image alone has no diversity; sample more copies of a prompt.")
        vectors = self.clip.image_features(images).cpu()
        cosines = (vectors @ vectors.T).fill_diagonal_(0)
        return Scores.of(1 - cosines.sum(1) / (len(images) - 1))
