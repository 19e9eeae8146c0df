"""The public Stable Diffusion 3 models without their weights: the shapes of every part.

For predictions (`flowalign.doctor.estimate`), and for tests that need the real structure.
Values of transformers, VAE and schedule: the models' public config files, here from three
independent copies of them in public code (the models themselves are gated); of the text encoders:
openai/clip-vit-large-patch14, laion/CLIP-ViT-bigG-14 and google/t5-v1_1-xxl, from memory. The
parameter counts that result are checked against the published ones (tests/test_architectures.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """The configs of diffusers' transformer and VAE, of transformers' text encoders (CLIP, CLIP
    and, unless it is left out, T5), and of the scheduler."""

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any] = field(default_factory=lambda: VAE)
    text: tuple[Mapping[str, Any], ...] = (CLIP_L, CLIP_G, T5_XXL)
    scheduler: Mapping[str, Any] = field(default_factory=lambda: {"shift": 3.0})

    def scaled(self, width: float) -> Architecture:
        """The same structure with `width` times the attention heads and VAE channels."""
        heads = max(1, round(self.transformer["num_attention_heads"] * width))
        head = self.transformer["attention_head_dim"]
        groups = max(1, round(self.vae["norm_num_groups"] * width))
        wide = [c * width / groups for c in self.vae["block_out_channels"]]
        channels = [groups * max(1, round(count)) for count in wide]
        sizes = {"num_attention_heads": heads, "caption_projection_dim": heads * head}
        vae = {"block_out_channels": channels, "norm_num_groups": groups}
        return replace(self, transformer={**self.transformer, **sizes}, vae={**self.vae, **vae})

    def with_small_text(self, vocabulary: int) -> Architecture:
        """With one-layer text encoders of the same output sizes."""
        clip = {"num_hidden_layers": 1, "intermediate_size": 64}
        t5 = {"num_layers": 1, "d_ff": 64, "num_heads": 1}
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3, "vocab_size": vocabulary}
        return replace(
            self, text=tuple({**c, **ends, **(t5 if c["model_type"] == "t5" else clip)}
                             for c in self.text)
        )  # fmt: skip


ARCHITECTURES = {
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
"""By the id on the Hub."""


def find(model: str, revision: str | None = None) -> Architecture:
    """Of a config's model.id, without weights and without a network: from the folder (or the
    Hub's local cache), else from the table. LookupError where neither has it."""
    folder = local_folder(model, revision)
    if folder is not None:
        return _read(folder)
    if model in ARCHITECTURES:
        return ARCHITECTURES[model]
    raise LookupError(
        f"model.id {model!r} lies neither in a folder nor in the Hub's cache here, and its shapes "
        f"are not known; known are {', '.join(ARCHITECTURES)}. Download it, or name one of these."
    )


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Where a pipeline lies on this machine: its folder, or that in the Hub's cache; None = not."""
    from huggingface_hub import try_to_load_from_cache

    from flowalign.backbone import resolve

    index = Path(resolve(model)) / "model_index.json"
    if index.is_file():
        return index.parent
    if model.count("/") != 1 or index.parent.exists():
        return None
    cached = try_to_load_from_cache(model, "model_index.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def build(found: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    """A StableDiffusion3Pipeline without tokenizers, on the current default device (`meta` for
    shapes alone), with random weights."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    transformer = SD3Transformer2DModel(**_known(SD3Transformer2DModel, found.transformer))
    vae = AutoencoderKL(**_known(AutoencoderKL, found.vae))
    to: Any = nn.Module.to  # diffusers' own would warn of modules that it does not have
    text: list[Any] = [to(text_encoder(config), dtype) for config in found.text]
    names = ("text_encoder", "text_encoder_2", "text_encoder_3")
    none: dict[str, Any] = {f"tokenizer{n}": None for n in ("", "_2", "_3")} | dict.fromkeys(names)
    return StableDiffusion3Pipeline(
        transformer=to(transformer, dtype).eval(),
        vae=to(vae, dtype).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(**found.scheduler),
        **{**none, **dict(zip(names, text, strict=False))},
    )


def pipeline(found: Architecture, seed: int = 0) -> Any:
    """A whole pipeline on the CPU with random weights, small text encoders of the right output
    sizes, and the tiny world's tokenizer: for tests and benchmarks of the real structure."""
    from transformers import PreTrainedTokenizerFast

    from flowalign.tiny import MODEL

    spell = [PreTrainedTokenizerFast.from_pretrained(MODEL / "tokenizer", model_max_length=length)
             for length in (77, 77, 256)]  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = build(found.with_small_text(len(spell[0])))
    for name, tokenizer in zip(("tokenizer", "tokenizer_2", "tokenizer_3"), spell, strict=True):
        setattr(pipe, name, tokenizer)
        pipe.register_modules(**{name: getattr(pipe, name)})
    return pipe


def text_encoder(config: Mapping[str, Any]) -> nn.Module:
    """A CLIP text model with projection, or a T5 encoder."""
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        T5Config,
        T5EncoderModel,
    )

    rest = {k: v for k, v in config.items() if k not in ("model_type", "dtype", "torch_dtype")}
    if config["model_type"] == "t5":
        return T5EncoderModel(T5Config(**rest)).eval()
    return CLIPTextModelWithProjection(CLIPTextConfig(**rest)).eval()


def _read(folder: Path) -> Architecture:
    def config(part: str, name: str = "config.json") -> dict[str, Any] | None:
        path = folder / part / name
        return json.loads(path.read_text()) if path.is_file() else None

    text = [config(part) for part in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    transformer, vae = config("transformer"), config("vae")
    if transformer is None or vae is None:
        raise LookupError(f"{folder}: no transformer/config.json and vae/config.json lie there.")
    scheduler = config("scheduler", "scheduler_config.json") or {}
    return Architecture(
        transformer, vae, tuple(t for t in text if t is not None), _plain(scheduler)
    )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if not k.startswith("_")}


def _known(kind: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that this release of diffusers takes."""
    import inspect

    taken = inspect.signature(kind.__init__).parameters
    return {k: v for k, v in config.items() if k in taken}
