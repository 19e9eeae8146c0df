"""The shapes of the public Stable Diffusion 3 models: the config of every part, no weights.

Sources: transformer, VAE and scheduler are the models' public config files, compared in three
independent copies of public code because the models are gated. The text encoders are
openai/clip-vit-large-patch14, laion/CLIP-ViT-bigG-14 and google/t5-v1_1-xxl, from memory.
tests/test_estimate.py checks the resulting parameter counts against the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

CLIP_L = {
    "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "projection_dim": 768, "max_position_embeddings": 77,
}  # fmt: skip
CLIP_G = {
    "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 1280,
    "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "max_position_embeddings": 77, "hidden_act": "gelu",
}  # fmt: skip
T5_XXL = {
    "model_type": "t5", "vocab_size": 32128, "d_model": 4096, "d_ff": 10240, "d_kv": 64,
    "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
VAE = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 16, "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512], "norm_num_groups": 32, "sample_size": 1024,
    "scaling_factor": 1.5305, "shift_factor": 0.0609,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
MMDIT = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16,
    "attention_head_dim": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """The configs of a pipeline's parts, as diffusers and (of `text`) transformers write them."""

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any] = field(default_factory=lambda: VAE)
    text: tuple[Mapping[str, Any], ...] = (CLIP_L, CLIP_G, T5_XXL)  # T5 may be left out
    scheduler: Mapping[str, Any] = field(default_factory=lambda: {"shift": 3.0})


ARCHITECTURES = {  # by Hub id
    "stabilityai/stable-diffusion-3.5-medium": Architecture(
        {**MMDIT, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
         "pos_embed_max_size": 384, "dual_attention_layers": list(range(13)), "qk_norm": "rms_norm"}
    ),
    "stabilityai/stable-diffusion-3.5-large": Architecture(
        {**MMDIT, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
         "pos_embed_max_size": 192, "qk_norm": "rms_norm"}
    ),
    "stabilityai/stable-diffusion-3-medium-diffusers": Architecture(
        {**MMDIT, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
         "pos_embed_max_size": 192}
    ),
}  # fmt: skip


def find(model: str, revision: str | None = None) -> Architecture:
    """The architecture of model.id, without weights or network: read from its folder or from the
    Hub's cache, else from ARCHITECTURES. LookupError where none of them has it."""
    folder = local_folder(model, revision)
    if folder is None and model in ARCHITECTURES:
        return ARCHITECTURES[model]
    if folder is None:
        raise LookupError(
            f"model.id {model!r} is neither a folder nor in the Hub's cache on this machine, and "
            f"its shapes are not built in. Download it, or use one of {', '.join(ARCHITECTURES)}."
        )

    def config(part: str, name: str = "config.json") -> dict[str, Any] | None:
        path = folder / part / name
        return json.loads(path.read_text()) if path.is_file() else None

    transformer, vae = config("transformer"), config("vae")
    if transformer is None or vae is None:
        raise LookupError(f"{folder}: transformer/config.json or vae/config.json is missing.")
    text = [config(part) for part in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    scheduler = config("scheduler", "scheduler_config.json") or {}
    return Architecture(transformer, vae, tuple(t for t in text if t is not None), scheduler)


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """The folder of a pipeline on this machine, in the Hub's cache or elsewhere; None if absent."""
    from huggingface_hub import try_to_load_from_cache

    from flowalign.backbone import resolve

    index = Path(resolve(model)) / "model_index.json"
    if index.is_file():
        return index.parent
    if model.count("/") != 1 or index.parent.exists():
        return None
    cached = try_to_load_from_cache(model, "model_index.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def build(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    """A StableDiffusion3Pipeline with random weights and no tokenizers, on the default device."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    # diffusers' own `to` would warn of hooks and dtypes that do not matter here
    to: Any = nn.Module.to
    transformer = SD3Transformer2DModel.from_config(dict(architecture.transformer))
    vae = AutoencoderKL.from_config(dict(architecture.vae))
    parts: dict[str, Any] = {
        "transformer": to(transformer, dtype).eval(),
        "vae": to(vae, dtype).eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler.from_config(dict(architecture.scheduler)),
    }
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    parts |= dict.fromkeys((*encoders, "tokenizer", "tokenizer_2", "tokenizer_3"))
    for name, config in zip(encoders, architecture.text, strict=False):  # T5 may be left out
        # a file's own dtype must not overrule ours
        sizes = {k: v for k, v in config.items() if k not in ("model_type", "dtype", "torch_dtype")}
        if config["model_type"] == "t5":
            encoder = T5EncoderModel(T5Config(**sizes))
        else:
            encoder = CLIPTextModelWithProjection(CLIPTextConfig(**sizes))
        parts[name] = to(encoder, dtype).eval()
    return StableDiffusion3Pipeline(**parts)
