"""How much the images of a prompt differ from each other: a guard against collapse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flowalign.rewards.base import CLIP_L, RewardBase
from flowalign.rewards.clip import LARGE, Clip, ClipModel
from flowalign.rewards.options import Count, Device, checked
from flowalign.types import Metadata, Scores


@checked
class Diversity(RewardBase):
    """Groupwise reward in [0,2]: 1 - mean cosine of an image to the others of its prompt.

    The cosine is of CLIP image features. model: a Hub id or folder of a CLIPModel, or "tiny".
    An image that has no other of its prompt beside it is invalid. Meant as a small part of a
    `weighted` sum: alone it pays for noise.
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
