"""PickScore (2305.01569): how much people would prefer an image for its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowalign.rewards.base import VIT_H, Cost
from flowalign.rewards.clip import Clip, ClipModel
from flowalign.rewards.options import Count, Device, Divisor, TextCache, checked
from flowalign.rewards.preference import Preference
from flowalign.rewards.towers import TEXT_CACHE

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


@checked
class PickScore(Preference):
    """Reward: exp(logit_scale) * cos(text, image) / normalizer, unbounded, about 0 to 1.

    model: a Hub id or folder of a CLIPModel, or "tiny", the preference model of the tiny world.
    processor: where its image processor and tokenizer are; None = beside the model. For "tiny" the
        default is the model's own.
    normalizer: 26 as in Flow-GRPO (pickscore_scorer.py), about .83 there. Papers print raw.
    offload: the weights lie on the CPU between calls. text_cache: prompts whose vectors are kept.
    """

    name = "pickscore"
    cost, downloads = Cost(VIT_H), {MODEL: 3.9}

    def __init__(
        self,
        model: ClipModel = MODEL,
        processor: ClipModel | None = PROCESSOR,
        *,
        normalizer: Divisor = 26.0,
        revision: str | None = None,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
        text_cache: TextCache = TEXT_CACHE,
    ) -> None:
        if model == "tiny" and processor == PROCESSOR:
            processor = None
        computing = {"device": device, "batch_size": batch_size, "offload": offload}
        self.clip = Clip(model, processor, revision, **computing, text_cache=text_cache)
        super().__init__(normalizer, model=self.clip.name)

    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """exp(logit_scale) * cos(image, its prompt) [B]."""
        return self.clip.scale * self.clip.cosine(images, prompts)
