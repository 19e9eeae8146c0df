"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowalign.backbone.family import (
    FINAL_LAYER,
    JOINT_ATTENTION,
    Family,
    Text,
    by_prompt,
    in_blocks,
)

# Layers of Stability's own code in ours
STABILITY = {
    "x_block.attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "x_block.attn.proj": ["attn.to_out.0"],
    "x_block.attn2.qkv": ["attn2.to_q", "attn2.to_k", "attn2.to_v"],
    "x_block.attn2.proj": ["attn2.to_out.0"],
    "x_block.mlp.fc1": ["ff.net.0.proj"],
    "x_block.mlp.fc2": ["ff.net.2"],
    "x_block.adaLN_modulation.1": ["norm1.linear"],
    "context_block.attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "context_block.attn.proj": ["attn.to_add_out"],
    "context_block.mlp.fc1": ["ff_context.net.0.proj"],
    "context_block.mlp.fc2": ["ff_context.net.2"],
    "context_block.adaLN_modulation.1": ["norm1_context.linear"],
}


class SD3(Family):
    """Two CLIP encoders and T5 (which may be left out); positions up to a largest size."""

    name = "sd3"
    pipeline = "StableDiffusion3Pipeline"
    targets = JOINT_ATTENTION
    tokenizer = "tokenizer_3"
    max_shift = 1.16
    even_grid = False
    foreign = FINAL_LAYER | in_blocks("joint_blocks", "transformer_blocks", STABILITY)

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

    def text_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """embeds: the tokens of CLIP, then those of T5."""
        config = self.core.config
        clip = self.pipe.text_encoder.config.max_position_embeddings
        return {
            "embeds": (clip + length, config.joint_attention_dim),
            "pooled": (config.pooled_projection_dim,),
        }

    def encode(self, prompts: list[str], length: int, device: Any) -> list[Text]:
        """embeds [L,D] and pooled [E] of each prompt."""
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompts,
            prompt_2=None,  # the same
            prompt_3=None,
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
