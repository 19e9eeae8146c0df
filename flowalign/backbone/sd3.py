"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.backbone.family import JOINT_ATTENTION, Family, Text, by_prompt

# A layer of Stability's own code, as sd-scripts (kohya) writes it, and what it is in diffusers
KOHYA = re.compile(r"lora_unet_joint_blocks_(?P<block>\d{1,3})_(?P<layer>\w+)", re.ASCII)
LAYERS = {
    "x_block_attn_qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "x_block_attn_proj": ["attn.to_out.0"],
    "x_block_attn2_qkv": ["attn2.to_q", "attn2.to_k", "attn2.to_v"],
    "x_block_attn2_proj": ["attn2.to_out.0"],
    "x_block_mlp_fc1": ["ff.net.0.proj"],
    "x_block_mlp_fc2": ["ff.net.2"],
    "x_block_adaLN_modulation_1": ["norm1.linear"],
    "context_block_attn_qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "context_block_attn_proj": ["attn.to_add_out"],
    "context_block_mlp_fc1": ["ff_context.net.0.proj"],
    "context_block_mlp_fc2": ["ff_context.net.2"],
    "context_block_adaLN_modulation_1": ["norm1_context.linear"],
}


class SD3(Family):
    """Two CLIP encoders and T5 (which may be left out); positions up to a largest size."""

    name = "sd3"
    pipeline = "StableDiffusion3Pipeline"
    targets = JOINT_ATTENTION
    cards = {
        "stable-diffusion-3.5-medium": (40, 4.5),
        "stable-diffusion-3.5-large": (28, 3.5),
        "stable-diffusion-3.5-large-turbo": (4, 1.0),  # the card's 0 means none, as 1 does
        "stable-diffusion-3-medium-diffusers": (28, 7.0),
    }
    tokenizer = "tokenizer_3"
    max_shift = 1.16

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.patch = self.core.config.patch_size

    @property
    def length(self) -> int:
        """128, as in Flow-GRPO and Flow-OPD; the pipeline has 256."""
        return 128

    @property
    def largest(self) -> int:
        return self.factor * self.patch * self.core.config.pos_embed_max_size

    def encoder_tokens(self, length: int) -> list[int]:
        clip = self.pipe.text_encoder.config.max_position_embeddings
        return [clip, clip, length][: len(self.encoders)]

    @property
    def even_grid(self) -> bool:
        return False

    @classmethod
    def renamed(cls, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """kohya's names as diffusers', which does not read them. Of a fused layer all parts have
        its A, times alpha / rank. The rest keeps its names."""
        found = {}
        for name, value in stored.items():
            path, _, end = name.partition(".")
            known = KOHYA.fullmatch(path)
            layers = LAYERS.get(known["layer"], []) if known else []
            if not known or not layers:
                found[name] = value
                continue
            if end == "alpha":
                continue
            if end == "lora_down.weight":
                half, scale = "A", float(stored.get(f"{path}.alpha", len(value))) / len(value)
                parts = [value * scale] * len(layers)
            else:
                half, parts = "B", list(value.chunk(len(layers)))
                width = stored[f"{path}.lora_down.weight"].shape[1]
                if layers == ["norm1_context.linear"] and len(value) == 2 * width:
                    # of the last block, where diffusers has the scale before the shift
                    parts = [torch.cat(value.chunk(2)[::-1])]
            for layer, part in zip(layers, parts, strict=True):
                block = f"transformer.transformer_blocks.{known['block']}"
                found[f"{block}.{layer}.lora_{half}.weight"] = part
        return found

    def text_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """embeds: the tokens of CLIP, then those of T5."""
        config, clip = self.core.config, self.pipe.text_encoder.config.max_position_embeddings
        return {
            "embeds": (clip + length, config.joint_attention_dim),
            "pooled": (config.pooled_projection_dim,),
        }

    def encode(self, prompts: Sequence[str], length: int, device: Any) -> list[Text]:
        """embeds [L,D] and pooled [E] of each prompt."""
        texts = list(prompts)
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            texts,
            prompt_2=texts,
            prompt_3=texts,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return by_prompt(embeds=embeds, pooled=pooled)

    def inputs(self, x: Tensor, sigma: Tensor, text: Text, guidance: float) -> dict[str, Any]:
        return {
            "hidden_states": x,
            "encoder_hidden_states": text["embeds"].to(x.dtype),
            "pooled_projections": text["pooled"].to(x.dtype),
            "timestep": sigma * 1000,  # float32: bfloat16 would round 987 to 988
        }
