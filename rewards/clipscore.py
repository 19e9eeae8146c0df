"""CLIPScore (2104.08718): how well an image fits its prompt, to OpenAI's CLIP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowalign.rewards.base import CLIP_L, VIT_L, Cost
from flowalign.rewards.clip import LARGE, Clip, ClipModel
from flowalign.rewards.options import Count, Device, Divisor, TextCache, checked
from flowalign.rewards.preference import Preference
from flowalign.rewards.towers import TEXT_CACHE


@checked
class ClipScore(Preference):
    """Reward: exp(logit_scale) * cos(text, image) / normalizer, about 0 to 1.

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

    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """100 * cos(image, its prompt) [B], with the published model."""
        return self.clip.scale * self.clip.cosine(images, prompts)
