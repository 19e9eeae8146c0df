"""Z-Image: base (CFG) and Turbo (few steps, guidance 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.backbone.family import Family, Text, in_blocks, without_padding

# Layers of the model's own code in ours
ATTENTION = {
    "attention.qkv": ["attention.to_q", "attention.to_k", "attention.to_v"],
    "attention.out": ["attention.to_out.0"],
}


class ZImage(Family):
    """The transformer takes lists: images, and prompts of the length that they need. It predicts
    the other sign, at a time that runs from noise (0) to image (1).

    A guidance scale s here is diffusers' scale s - 1: the pipeline adds scale * (positive -
    negative) to the positive velocity, where others add it to the negative one. 1 is no guidance.
    """

    name = "z_image"
    pipeline = "ZImagePipeline"
    targets = ["attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"]
    foreign = {
        name: layers
        for part in ("layers", "context_refiner", "noise_refiner")
        for name, layers in in_blocks(part, part, ATTENTION).items()
    }

    @classmethod
    def defaults(cls) -> tuple[int, float]:
        steps, scale = super().defaults()
        return steps, 1 + scale

    def text_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        return {"embeds": (length, self.core.config.cap_feat_dim), "mask": (length,)}

    def encode(self, prompts: list[str], length: int, device: Any) -> list[Text]:
        """embeds [L,D] and mask [L] of each prompt, L its own number of tokens."""
        embeds, _ = self.pipe.encode_prompt(
            list(prompts),  # the pipeline writes into it
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return without_padding(embeds)

    def inputs(self, x: Tensor, sigma: Tensor, text: Text, guidance: float) -> dict[str, Any]:
        embeds = text["embeds"].to(x.dtype)
        lengths = [text["embeds"].shape[1]] * len(x)
        if not x.is_meta:  # shapes without data are those of the longest prompt
            lengths = text["mask"].sum(1).tolist()
        return {
            "x": list(x[:, :, None].unbind()),  # [C,1,h,w] each: one frame
            "t": 1 - sigma,
            "cap_feats": [row[:length] for row, length in zip(embeds, lengths, strict=True)],
        }

    def velocity(self, output: Sequence[Tensor], x: Tensor) -> Tensor:
        """A list of [C,1,h,w] -> v [B,C,h,w]."""
        return -torch.stack(list(output)).squeeze(2).float()
