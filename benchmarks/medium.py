"""The structure of Stable Diffusion 3.5 Medium with random weights, and random LoRAs on it: the
model that the benchmarks beside this file measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowalign.backbone import DTYPES, Backbone
from flowalign.config import SD3_ATTENTION, ModelConfig
from flowalign.doctor.architectures import ARCHITECTURES, Architecture, pipeline

MEDIUM = "stabilityai/stable-diffusion-3.5-medium"


def shapes(width: float = 1.0, layers: int | None = None) -> Architecture:
    """A share of the attention heads, and the first layers (None = all 24). Where there are fewer,
    half of them attend twice, as in the whole model."""
    found = ARCHITECTURES[MEDIUM].scaled(width)
    if not layers:
        return found
    dual = [i for i in found.transformer["dual_attention_layers"] if i < (layers + 1) // 2]
    fewer = {"num_layers": layers, "dual_attention_layers": dual}
    return replace(found, transformer={**found.transformer, **fewer})


def write(
    folder: Path,
    width: float = 1.0,
    layers: int | None = None,
    *,
    adapters: Sequence[str] = ("a", "b"),
    dtype: str = "float32",
    rank: int = 32,
    alpha: float = 64.0,
) -> str:
    """Write the model and LoRAs on it, each into its folder there; returns the model's."""
    model = str(folder / "model")
    pipeline(shapes(width, layers)).to(DTYPES[dtype]).save_pretrained(model)
    config = ModelConfig.model_validate({"id": model, "dtype": dtype})
    write_adapters(folder, config, adapters, rank=rank, alpha=alpha)
    return model


def write_adapters(
    folder: Path, model: ModelConfig, names: Sequence[str], *, rank: int, alpha: float
) -> None:
    """LoRAs of random weights on a model."""
    backbone = Backbone.load(model)
    for name in names:
        backbone.add_adapter(name, rank=rank, alpha=alpha, targets=SD3_ATTENTION)
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
