"""Pipelines without weights: read from their config files, or built in for public models."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import nn

from flowalign.backbone.base import DTYPES, Backbone
from flowalign.backbone.loading import family_of, pipeline_name, resolve
from flowalign.backbone.shapes import PUBLIC, Architecture, Config

if TYPE_CHECKING:
    from flowalign.backbone.family import Family
    from flowalign.config import ModelConfig


def find(model: str, revision: str | None = None) -> Architecture:
    """The architecture of model.id, without weights or network: read from its folder or from the
    Hub's cache, else of a public model. LookupError where none of them has it."""
    folder = local_folder(model, revision)
    if folder is None and model in PUBLIC:
        return PUBLIC[model]
    if folder is None:
        raise LookupError(
            f"model.id {model!r} is neither a folder nor in the Hub's cache on this machine, and "
            f"its shapes are not built in. Download it, or use one of {', '.join(PUBLIC)}."
        )
    index = json.loads((folder / "model_index.json").read_text())
    options = {name: value for name, value in index.items() if not isinstance(value, list)}
    parts: dict[str, Config] = {}
    for name in (name for name in index if name not in options and "tokenizer" not in name):
        file = folder / name / ("scheduler_config.json" if name == "scheduler" else "config.json")
        if index[name][-1] and file.is_file():
            parts[name] = {**json.loads(file.read_text()), "_class_name": index[name][-1]}
    missing = [name for name in ("transformer", "vae") if name not in parts]
    if missing:
        raise LookupError(f"{folder}: {missing[0]}/config.json is missing.")
    return Architecture(index["_class_name"], parts, options)


def model_family(model: ModelConfig) -> type[Family]:
    """The family of a config's model. The Hub is asked if nothing here tells. Raises ModelError."""
    try:
        name = find(model.id, model.revision).pipeline
    except (LookupError, OSError, ValueError):
        name = pipeline_name(model.id, revision=model.revision)
    return family_of(name, model.family)


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """The folder of a pipeline on this machine, in the Hub's cache or elsewhere; None if absent."""
    index = Path(resolve(model)) / "model_index.json"
    if index.is_file():
        return index.parent
    if model.count("/") != 1 or index.parent.exists():
        return None
    cached = try_to_load_from_cache(model, "model_index.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def without_data(model: ModelConfig) -> Backbone:
    """The model of a config on the meta device. LookupError where its shapes are not known."""
    with torch.device("meta"):
        pipe = build(find(model.id, model.revision), DTYPES[model.dtype])
        nn.Module.to(pipe.vae, DTYPES[model.vae_dtype])
        # a cache and moving between devices need values
        plain = {"text_cache": None, "offload_text_encoders": False}
        return Backbone(pipe, model.model_copy(update=plain), "meta")


@lru_cache(maxsize=4)  # every stage of a recipe asks for the same one
def family_without_text(
    model: str, revision: str | None = None, family: str | None = None
) -> Family:
    """The family of a model, with its transformer and autoencoder on the meta device. LookupError
    where its shapes are not known."""
    architecture = find(model, revision)
    parts = {name: architecture.parts[name] for name in ("transformer", "vae")}
    with torch.device("meta"):
        pipe = build(replace(architecture, parts=parts))
    return family_of(architecture.pipeline, family)(pipe)


def build(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    """A pipeline with random weights and no tokenizers, on the default device."""
    loader = getattr(diffusers, architecture.pipeline)
    wanted = inspect.signature(loader.__init__).parameters
    parts: dict[str, Any] = {
        name: architecture.options.get(name) for name in wanted if name != "self"
    }
    for name, config in architecture.parts.items():
        part = _part(config)
        # diffusers' own `to` would warn of hooks and dtypes that do not matter here
        parts[name] = nn.Module.to(part, dtype).eval() if isinstance(part, nn.Module) else part
    return loader(**parts)


def _part(config: Config) -> Any:
    """A part of a pipeline, of the class that its config names."""
    # the dtype of a file must not overrule ours
    options = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    name = options.pop("_class_name")
    if "Scheduler" in name:
        with torch.device("cpu"):  # some compute with the values of their schedule
            return getattr(diffusers, name).from_config(options)
    if hasattr(diffusers, name):
        return getattr(diffusers, name).from_config(options)
    kind = options.pop("model_type")
    return getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **options))
