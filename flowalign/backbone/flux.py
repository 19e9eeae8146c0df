"""FLUX.1: dev, which takes its guidance as an input, and schnell, which has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flowalign.backbone.family import (
    BFL_ATTENTION,
    FINAL_LAYER,
    JOINT_ATTENTION,
    PackedFamily,
    Text,
    by_prompt,
    in_blocks,
)

# Layers of BFL's own code in ours
QKV, TEXT_QKV = BFL_ATTENTION["img_attn.qkv"], BFL_ATTENTION["txt_attn.qkv"]
DOUBLE = BFL_ATTENTION | {
    "img_mod.lin": ["norm1.linear"], "txt_mod.lin": ["norm1_context.linear"],
    "img_mlp.0": ["ff.net.0.proj"], "img_mlp.2": ["ff.net.2"],
    "txt_mlp.0": ["ff_context.net.0.proj"], "txt_mlp.2": ["ff_context.net.2"],
    # XLabs'
    "processor.qkv_lora1": QKV, "processor.proj_lora1": ["attn.to_out.0"],
    "processor.qkv_lora2": TEXT_QKV, "processor.proj_lora2": ["attn.to_add_out"],
}  # fmt: skip
SINGLE = {
    "linear1": [*QKV, "proj_mlp"], "linear2": ["proj_out"], "modulation.lin": ["norm.linear"],
    "processor.qkv_lora": QKV, "processor.proj_lora": ["proj_out"],
}  # fmt: skip
EMBEDDERS = {"time": "timestep", "guidance": "guidance", "vector": "text"}


def bfl_names(
    double: Mapping[str, Sequence[str]],
    single: Mapping[str, Sequence[str]],
    embedders: Mapping[str, str],
    place: str,
) -> dict[str, list[str]]:
    """`Family.foreign` of a model by Black Forest Labs. double, single: of its two kinds of blocks.
    embedders {theirs: ours}: of the conditioning, which lie at `place`."""
    inputs = {"img_in": ["x_embedder"], "txt_in": ["context_embedder"]} | {
        f"{theirs}_in.{end}_layer": [f"{place}.{ours}_embedder.linear_{number}"]
        for theirs, ours in embedders.items()
        for number, end in ((1, "in"), (2, "out"))
    }
    return (
        FINAL_LAYER
        | inputs
        | in_blocks("double_blocks", "transformer_blocks", double)
        | in_blocks("single_blocks", "single_transformer_blocks", single)
    )


class Flux(PackedFamily):
    """CLIP for one vector, T5 for the tokens, without a mask: the padding of T5 is seen, as in
    diffusers. Classifier-free guidance beside the model's own (`true_cfg_scale`) is left out."""

    name = "flux"
    # on an H100 torch 2.11 takes cuDNN's, whose backward pass made an illegal memory access here
    gpu_attention = "_native_flash"
    pipeline = "FluxPipeline"
    targets = JOINT_ATTENTION
    foreign = bfl_names(DOUBLE, SINGLE, EMBEDDERS, "time_text_embed")
    tokenizer = "tokenizer_2"

    @property
    def guidance(self) -> Literal["embedded", "none"]:
        return "embedded" if self.core.config.guidance_embeds else "none"

    @property
    def length(self) -> int:
        """256 for schnell, on its card; else 512."""
        return super().length if self.core.config.guidance_embeds else 256

    def encoder_tokens(self, length: int) -> list[int]:
        return [self.pipe.text_encoder.config.max_position_embeddings, length]

    def text_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """embeds of T5, pooled of CLIP."""
        config = self.core.config
        return {
            "embeds": (length, config.joint_attention_dim),
            "pooled": (config.pooled_projection_dim,),
        }

    def encode(self, prompts: list[str], length: int, device: Any) -> list[Text]:
        """embeds [L,D] and pooled [E] of each prompt."""
        embeds, pooled, _ = self.pipe.encode_prompt(
            prompts, device=device, max_sequence_length=length
        )
        return by_prompt(embeds=embeds, pooled=pooled)

    def inputs(self, x: Tensor, sigma: Tensor, text: Text, guidance: float) -> dict[str, Any]:
        rows, columns = (torch.arange(side // 2, device=x.device) for side in x.shape[2:])
        places = torch.cartesian_prod(rows, columns)
        return {
            "hidden_states": self.packed(x),
            "encoder_hidden_states": text["embeds"].to(x.dtype),
            "pooled_projections": text["pooled"].to(x.dtype),
            "timestep": sigma,
            "guidance": self.embedded(sigma, guidance),
            "img_ids": torch.cat([places.new_zeros(len(places), 1), places], 1).to(x.dtype),
            "txt_ids": x.new_zeros(text["embeds"].shape[1], 3),
        }
