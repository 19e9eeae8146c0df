"""The shapes of public models: the config of every part, no weights.

An entry that is missing has the default of its class in diffusers or transformers, which is often
the first published model's. Sources: the config files that tests/published holds, each with its own
source; tests/test_published.py compares them with this table. The config files of two models were
not found: FLUX.1-Krea-dev has the shapes of FLUX.1-dev (ComfyUI's documentation: "fully compatible
architecture"); the numbers of Stable Diffusion 3 Medium are those of three public copies.
tests/test_estimate.py checks the parameter counts against published ones.
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
    **CLIP_L, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
    "num_attention_heads": 20, "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
T5_XXL = {
    "_class_name": "T5EncoderModel",
    "model_type": "t5", "vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "d_kv": 64,
    "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
VAE = {
    "_class_name": "AutoencoderKL", "latent_channels": 16, "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512], "norm_num_groups": 32, "sample_size": 1024,
    "scaling_factor": 1.5305, "shift_factor": 0.0609,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
FLUX_VAE = {**VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159}
MMDIT = {"_class_name": "SD3Transformer2DModel", "attention_head_dim": 64}
CLIP_POOLED = {**CLIP_L, "_class_name": "CLIPTextModel"}
QWEN25_VL = {
    "_class_name": "Qwen2_5_VLForConditionalGeneration", "model_type": "qwen2_5_vl",
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "out_hidden_size": 3584,
    },
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
QWEN3_4B = {
    **QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288}
MISTRAL_24B = {"_class_name": "Mistral3ForConditionalGeneration", "model_type": "mistral3"}
GEMMA2_2B = {"_class_name": "Gemma2Model", "model_type": "gemma2"}
DC_AE = {
    "_class_name": "AutoencoderDC",
    "encoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
    "decoder_block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
    "upsample_block_type": "interpolate", "downsample_block_type": "Conv",
    "scaling_factor": 0.41407,
}  # fmt: skip
FLOW: Config = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
FIXED = {**FLOW, "shift": 3.0}
DYNAMIC = {**FLOW, "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}


def _sd3(**transformer: Any) -> Architecture:
    encoders = {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": T5_XXL}
    parts = {"transformer": {**MMDIT, **transformer}, "vae": VAE, "scheduler": FIXED, **encoders}
    return Architecture("StableDiffusion3Pipeline", parts)


def _flux(guidance_embeds: bool) -> Architecture:
    transformer = {"_class_name": "FluxTransformer2DModel", "guidance_embeds": guidance_embeds}
    return Architecture("FluxPipeline", {
        "transformer": transformer, "vae": FLUX_VAE, "text_encoder": CLIP_POOLED,
        "text_encoder_2": T5_XXL,
        "scheduler": DYNAMIC if guidance_embeds else {**FLOW, "shift": 1.0},
    })  # fmt: skip


def _flux2(pipeline: str, encoder: Config, options: Config, **transformer: Any) -> Architecture:
    parts = {
        "transformer": {"_class_name": "Flux2Transformer2DModel", **transformer},
        "vae": {"_class_name": "AutoencoderKLFlux2"},
        "text_encoder": encoder, "scheduler": DYNAMIC,
    }  # fmt: skip
    return Architecture(pipeline, parts, options)


def _klein(size: int, is_distilled: bool) -> Architecture:
    encoder = {**(QWEN3_4B if size == 4 else QWEN3_8B), "_class_name": "Qwen3ForCausalLM"}
    double, single, heads = (5, 20, 24) if size == 4 else (8, 24, 32)
    return _flux2(
        "Flux2KleinPipeline", encoder, {"is_distilled": is_distilled}, num_layers=double,
        num_single_layers=single, num_attention_heads=heads,
        joint_attention_dim=3 * encoder["hidden_size"], guidance_embeds=False,
    )  # fmt: skip


def _qwen_image() -> Architecture:
    return Architecture("QwenImagePipeline", {
        "transformer": {"_class_name": "QwenImageTransformer2DModel"},
        "vae": {"_class_name": "AutoencoderKLQwenImage"}, "text_encoder": QWEN25_VL,
        "scheduler": {**DYNAMIC, "shift": 1.0, "base_image_seq_len": 256,
                      "max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02},
    })  # fmt: skip


def _z_image(shift: float) -> Architecture:
    return Architecture("ZImagePipeline", {
        "transformer": {"_class_name": "ZImageTransformer2DModel"}, "vae": FLUX_VAE,
        "text_encoder": {**QWEN3_4B, "_class_name": "Qwen3Model"},
        "scheduler": {**FLOW, "shift": shift},
    })  # fmt: skip


def _sana(**transformer: Any) -> Architecture:
    scheduler = {"_class_name": "DPMSolverMultistepScheduler", "flow_shift": 3.0,
                 "use_flow_sigmas": True, "prediction_type": "flow_prediction"}  # fmt: skip
    return Architecture("SanaPipeline", {
        "transformer": {"_class_name": "SanaTransformer2DModel", **transformer}, "vae": DC_AE,
        "text_encoder": GEMMA2_2B, "scheduler": scheduler,
    })  # fmt: skip


STABILITY, FOREST = "stabilityai/stable-diffusion-3", "black-forest-labs/FLUX"
NVIDIA, NORM = "Efficient-Large-Model", {"qk_norm": "rms_norm_across_heads"}
LARGE: dict[str, Any] = {
    "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
    "pos_embed_max_size": 192, "qk_norm": "rms_norm",
}  # fmt: skip
PUBLIC = {  # by Hub id
    f"{STABILITY}.5-medium": _sd3(
        num_layers=24, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=384,
        dual_attention_layers=list(range(13)), qk_norm="rms_norm",
    ),
    f"{STABILITY}.5-large": _sd3(**LARGE),
    f"{STABILITY}.5-large-turbo": _sd3(**LARGE),
    f"{STABILITY}-medium-diffusers": _sd3(
        num_layers=24, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=192,
    ),
    f"{FOREST}.1-dev": _flux(guidance_embeds=True),
    f"{FOREST}.1-Krea-dev": _flux(guidance_embeds=True),
    f"{FOREST}.1-schnell": _flux(guidance_embeds=False),
    f"{FOREST}.2-dev": _flux2("Flux2Pipeline", MISTRAL_24B, {}),
    **{
        f"{FOREST}.2-klein-{base}{size}B": _klein(size, is_distilled=not base)
        for base in ("", "base-") for size in (4, 9)
    },
    "Qwen/Qwen-Image": _qwen_image(),
    "Qwen/Qwen-Image-2512": _qwen_image(),
    "Tongyi-MAI/Z-Image": _z_image(6.0),
    "Tongyi-MAI/Z-Image-Turbo": _z_image(3.0),
    f"{NVIDIA}/Sana_1600M_1024px_diffusers": _sana(),
    f"{NVIDIA}/Sana_1600M_1024px_BF16_diffusers": _sana(),
    f"{NVIDIA}/SANA1.5_1.6B_1024px_diffusers": _sana(**NORM),
    f"{NVIDIA}/SANA1.5_4.8B_1024px_diffusers": _sana(**NORM, num_layers=60),
}  # fmt: skip
