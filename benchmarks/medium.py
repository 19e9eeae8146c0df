"""The structures of Stable Diffusion 3.5 Medium and FLUX.1-dev with random weights, and random
LoRAs on them: the models that the benchmarks beside this file measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from flowalign.backbone import DTYPES, Backbone
from flowalign.backbone.shapes import Architecture, public
from flowalign.backbone.structure import build
from flowalign.backbone.tiny import MODEL
from flowalign.config import ModelConfig

MEDIUM, FLUX = "stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev"


def shapes(width: float = 1.0, layers: int | None = None) -> Architecture:
    """A share of the attention heads, and the first layers (None = all 24). Where there are fewer,
    half of them attend twice, as in the whole model."""
    medium = scaled(public()[MEDIUM], width)
    if not layers:
        return medium
    all_dual = medium.parts["transformer"]["dual_attention_layers"]
    dual = [i for i in all_dual if i < (layers + 1) // 2]
    return medium.changed("transformer", num_layers=layers, dual_attention_layers=dual)


def flux(width: float = 1.0, layers: int | None = None) -> Architecture:
    """FLUX.1-dev with a share of the attention heads, and with so many double blocks and twice as
    many single ones."""
    layers = layers or 19
    whole = public()[FLUX].changed(
        "transformer",
        num_attention_heads=max(1, round(24 * width)),
        num_layers=layers,
        num_single_layers=2 * layers,
    )
    return with_scaled_vae(whole, width)


def scaled(whole: Architecture, width: float) -> Architecture:
    """The same structure with `width` times the attention heads and VAE channels."""
    transformer = whole.parts["transformer"]
    heads = max(1, round(transformer["num_attention_heads"] * width))
    inside = heads * transformer["attention_head_dim"]
    narrow = whole.changed("transformer", num_attention_heads=heads, caption_projection_dim=inside)
    return with_scaled_vae(narrow, width)


def with_scaled_vae(whole: Architecture, width: float) -> Architecture:
    """With `width` times the channels of the VAE."""
    vae = whole.parts["vae"]
    groups = max(1, round(vae["norm_num_groups"] * width))
    channels = [groups * max(1, round(n * width / groups)) for n in vae["block_out_channels"]]
    return whole.changed("vae", block_out_channels=channels, norm_num_groups=groups)


def with_small_text(whole: Architecture, vocabulary: int) -> Architecture:
    """With one-layer text encoders of the same output sizes."""
    clip = {"num_hidden_layers": 1, "intermediate_size": 64}
    t5 = {"num_layers": 1, "d_ff": 64, "num_heads": 1}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3, "vocab_size": vocabulary}
    for name, config in whole.parts.items():
        if name.startswith("text_encoder"):
            fewer = t5 if config["model_type"] == "t5" else clip
            whole = whole.changed(name, **ends, **fewer)
    return whole


def pipeline(architecture: Architecture, seed: int = 0, device: str = "cpu") -> Any:
    """A whole pipeline on a device, where its weights are drawn: random weights, small text
    encoders of the right output sizes, and the tiny world's tokenizer."""
    tokenizers = {
        name.replace("text_encoder", "tokenizer"): PreTrainedTokenizerFast.from_pretrained(
            MODEL / "tokenizer", model_max_length=77 if "clip" in part["model_type"] else 512
        )
        for name, part in architecture.parts.items()
        if name.startswith("text_encoder")
    }
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        pipe = build(with_small_text(architecture, len(tokenizers["tokenizer"])))
    for name, tokenizer in tokenizers.items():
        setattr(pipe, name, tokenizer)
        pipe.register_modules(**{name: tokenizer})
    return pipe


def write(
    folder: Path,
    width: float = 1.0,
    layers: int | None = None,
    *,
    adapters: Sequence[str] = ("a", "b"),
    dtype: str = "float32",
    rank: int = 32,
    alpha: float = 64.0,
    device: str = "cpu",
) -> str:
    """Write the Medium and LoRAs on it, each into its folder there; returns the model's. device:
    where the weights are drawn."""
    model = str(folder / "model")
    pipeline(shapes(width, layers), device=device).to(DTYPES[dtype]).save_pretrained(model)
    config = ModelConfig.model_validate({"id": model, "dtype": dtype})
    write_adapters(folder, config, adapters, rank=rank, alpha=alpha)
    return model


def write_adapters(
    folder: Path, model: ModelConfig, names: Sequence[str], *, rank: int, alpha: float
) -> None:
    """LoRAs of random weights on a model."""
    backbone = Backbone.load(model)
    for name in names:
        backbone.add_adapter(name, rank=rank, alpha=alpha)
        for parameter in backbone.adapter_parameters(name):
            torch.nn.init.normal_(parameter, std=0.01)
        backbone.save_adapter(name, folder / name)


def parts(loop: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """The three parts of an update, in order."""
    found: dict[str, Any] = {}

    def rollout() -> None:
        found["rollout"] = loop.rollout(loop.update)

    def labels() -> None:
        found["prepared"] = loop.algorithm.prepare(found["rollout"], loop.update)

    def update() -> None:
        loop.learn(found["prepared"])

    yield from (("rollout", rollout), ("labels", labels), ("update", update))
