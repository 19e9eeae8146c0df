"""The shapes of public models: the config of every part, no weights.

Sources: transformer, VAE and scheduler are the models' public config files, compared in three
independent copies of public code because the models are gated. The text encoders are
openai/clip-vit-large-patch14, laion/CLIP-ViT-bigG-14 and google/t5-v1_1-xxl, from memory.
tests/test_estimate.py checks the resulting parameter counts against the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A pipeline without weights. pipeline: its class in diffusers. parts {name: config}, as
    diffusers and transformers write them, each with the name of its class as `_class_name`.
    options: other arguments of the pipeline."""

    pipeline: str
    parts: Mapping[str, Config]
    options: Config = field(default_factory=dict)

    def changed(self, part: str, **changes: Any) -> Architecture:
        """The same with other entries in the config of a part."""
        return replace(self, parts={**self.parts, part: {**self.parts[part], **changes}})


CLIP_L = {
    "_class_name": "CLIPTextModelWithProjection",
    "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "max_position_embeddings": 77,
}  # fmt: skip
CLIP_G = {
    "_class_name": "CLIPTextModelWithProjection",
    "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 1280,
    "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "max_position_embeddings": 77, "hidden_act": "gelu",
}  # fmt: skip
T5_XXL = {
    "_class_name": "T5EncoderModel",
    "model_type": "t5", "vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "d_kv": 64,
    "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
VAE = {
    "_class_name": "AutoencoderKL",
    "in_channels": 3, "out_channels": 3, "latent_channels": 16, "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512], "norm_num_groups": 32, "sample_size": 1024,
    "scaling_factor": 1.5305, "shift_factor": 0.0609,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
MMDIT = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16,
    "attention_head_dim": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
}  # fmt: skip


def _sd3(transformer: Config) -> Architecture:
    return Architecture(
        "StableDiffusion3Pipeline",
        {
            "transformer": {**MMDIT, **transformer},
            "vae": VAE,
            "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
            "text_encoder": CLIP_L,
            "text_encoder_2": CLIP_G,
            "text_encoder_3": T5_XXL,
        },
    )


PUBLIC = {  # by Hub id
    "stabilityai/stable-diffusion-3.5-medium": _sd3(
        {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
         "pos_embed_max_size": 384, "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm"}
    ),
    "stabilityai/stable-diffusion-3.5-large": _sd3(
        {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
         "pos_embed_max_size": 192, "qk_norm": "rms_norm"}
    ),
    "stabilityai/stable-diffusion-3-medium-diffusers": _sd3(
        {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
         "pos_embed_max_size": 192}
    ),
}  # fmt: skip
