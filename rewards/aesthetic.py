"""The LAION aesthetic predictor, v2: how much people like the look of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from flowalign.rewards.base import CLIP_L, VIT_L, Cost
from flowalign.rewards.clip import LARGE, Clip, ClipModel
from flowalign.rewards.options import Count, Device, Divisor, checked
from flowalign.rewards.preference import Head, Preference
from flowalign.rewards.weights import fit_weights, locate_weights, read_weights, weights_file

HEAD = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"


@checked
class Aesthetic(Preference):
    """Reward: a linear head on CLIP's unit image vector, / normalizer, about .1 to 1.

    Source: christophschuhmann/improved-aesthetic-predictor, as Flow-GRPO uses it
    (flow_grpo/aesthetic_scorer.py), which leaves the value undivided. The prompt is not used.
    model: a Hub id or folder of a CLIPModel (CLIP ViT-L/14 by default).
    head: its file, .pth or .safetensors, or owner/repository/file on the Hub. The default is TRL's
        copy of sac+logos+ava1-l14-linearMSE.pth (its checksum: docs/rewards/preference.md).
    normalizer: 10, the end of the scale that people rated on; raw is about 1 to 10.
    offload: the weights lie on the CPU between calls.
    Raises OSError where a file cannot be had, ValueError where it holds no head for this model.
    """

    name = "aesthetic"
    cost, downloads = Cost(VIT_L), CLIP_L

    def __init__(
        self,
        model: ClipModel = LARGE,
        head: Annotated[str, weights_file(HEAD)] = HEAD,
        *,
        normalizer: Divisor = 10.0,
        revision: str | None = None,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
    ) -> None:
        path = locate_weights(head)
        weights = read_weights(path)  # before the large model, as the likelier to be wrong
        computing = {"device": device, "batch_size": batch_size, "offload": offload}
        self.clip = Clip(model, None, revision, **computing, text_cache=0)
        self.head = Head(self.clip.width).requires_grad_(False).eval()
        fit_weights(self.head, weights, path)
        super().__init__(normalizer, model=self.clip.name, head=head)

    @torch.no_grad()
    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """The rating [B]; the head has a million weights and stays on the CPU."""
        return self.head(self.clip.image_features(images).cpu())
