"""Pipelines without weights: read from their config files, or built in for public models."""

from __future__ import annotations

import inspect
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers
from diffusers.models.modeling_utils import no_init_weights
from huggingface_hub import snapshot_download, try_to_load_from_cache
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from flowalign.backbone.base import DTYPES, Backbone
from flowalign.backbone.family import ENCODERS, ModelError
from flowalign.backbone.loading import family_of, pipeline_name, prompt_length, resolve
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


def read_family(model: ModelConfig, **hub: Any) -> Family:
    """The family of a model, with its transformer on the meta device, as `family_without_text`. The
    Hub is asked for config files that are not here. hub: options of `snapshot_download`. Raises
    ModelError."""
    try:
        return family_without_text(model.id, model.revision, model.family)
    except LookupError:
        hub.setdefault("revision", model.revision)
    pipeline_name(model.id, **hub)  # what is wrong with the address, it says
    try:
        configs = ["model_index.json", "*/config.json", "scheduler/*.json"]
        folder = snapshot_download(model.id, allow_patterns=configs, **hub)
        return family_without_text(folder, None, model.family)
    except (LookupError, OSError, ValueError) as error:
        raise ModelError(f"model.id {model.id!r}: its configs cannot be read: {error}") from error


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
    with weightless():
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
    with weightless():
        pipe = build(replace(architecture, parts=parts))
    return family_of(architecture.pipeline, family)(pipe)


def mismatches(model: ModelConfig, other: ModelConfig) -> Iterator[str]:
    """Why the transformer of another model cannot label a model's states, by their config files:
    the weights of encoders and VAE are not compared. Raises LookupError where the shapes of one are
    not known, ModelError for sizes that it lacks."""
    student = without_data(model)  # whose text is as long
    length = {"max_sequence_length": student.text.max_sequence_length}
    ours, theirs = map(_interface, (student, without_data(other.model_copy(update=length))))
    for key in ours | theirs:
        if ours.get(key) != theirs.get(key):
            yield f"its {key} is {theirs.get(key)}, and that of {model.id} is {ours.get(key)}"


def _interface(backbone: Backbone) -> dict[str, Any]:
    """What a transformer shares with all others that can label its states."""
    family, length = backbone.family, backbone.text.max_sequence_length
    found: dict[str, Any] = {"family": family.name, "latent": backbone.latent_shapes}
    found["text"] = family.text_shapes(length)
    parts = ((n, part) for n, part in backbone.pipe.components.items() if part is not None)
    for name, part in parts:
        if name in ENCODERS:
            weights = sum(parameter.numel() for parameter in part.parameters())
            found[name] = f"{type(part).__name__} of {weights:,} weights"
        elif name in ("vae", "scheduler"):
            entries = part.config.items()
            found |= {f"{name}.{key}": value for key, value in entries if key[0] != "_"}
    return found


class _Ids(nn.Module):
    """A text encoder that gives back the ids of its tokens [B,L,1], at every index and under every
    name. pooled: its first output is a vector [B,1]."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        ids = input_ids[..., None].float()
        first, layers = ids[:, 0] if self.pooled else ids, defaultdict[int, Tensor](lambda: ids)
        return BaseModelOutputWithPooling(first, ids[:, 0], layers)  # pyright: ignore


@lru_cache(maxsize=4)
def _family_of_ids(model: str, revision: str | None, family: str | None) -> Family | None:
    """The family of a model, whose `encode` gives the ids of tokens; None where the tokenizers are
    not on this machine."""
    folder = local_folder(model, revision)
    if folder is None:
        return None
    architecture, given = find(model, revision), dict[str, Any]()
    its_family = family_of(architecture.pipeline, family)
    for name, kind in json.loads((folder / "model_index.json").read_text()).items():
        if "tokenizer" in name and kind[-1]:
            try:
                given[name] = getattr(transformers, kind[-1]).from_pretrained(folder / name)
            except (OSError, ValueError, ImportError, AttributeError):
                return None
        elif name in ENCODERS and kind[-1]:
            tokenizer = name.replace("text_encoder", "tokenizer")
            given[name] = _Ids(pooled=tokenizer != its_family.tokenizer)
    parts = {name: architecture.parts[name] for name in ("transformer", "vae")}
    with weightless():
        pipe = build(replace(architecture, parts=parts), given=given)
    return its_family(pipe)


def cut_prompts(model: ModelConfig, prompts: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """(prompts that the model does not see to their end, those of them that it sees nothing of), by
    what the family's own encoding leaves of them, such as behind a chat template. None where the
    tokenizers are not on this machine."""
    family = _family_of_ids(model.id, model.revision, model.family)
    if family is None:
        return None
    tokenizer = getattr(family.pipe, family.tokenizer)
    if tokenizer is None:
        return None
    padding = getattr(tokenizer, "tokenizer", tokenizer).pad_token_id  # a processor has one inside
    limit = prompt_length(model, family)

    def seen(texts: Sequence[str], length: int) -> list[list[float]]:
        """The ids of each prompt that reach the transformer."""
        found = [text["embeds"][:, 0] for text in family.encode(list(texts), length, "cpu")]
        return [ids[ids != padding].tolist() for ids in found]

    logging.disable(logging.WARNING)  # of diffusers, for each prompt
    try:
        found, longer = (seen(prompts, length) for length in (limit, limit + 1))
        (nothing,) = seen([""], limit)
    except (ValueError, RuntimeError):  # the marks around a prompt alone are more
        return list(prompts), list(prompts)
    finally:
        logging.disable(logging.NOTSET)
    cut = {p: one for p, one, more in zip(prompts, found, longer, strict=True) if one != more}
    return list(cut), [prompt for prompt, ids in cut.items() if ids == nothing]


@contextmanager
def weightless() -> Iterator[None]:
    """Models that are made here lie on the meta device; nothing is drawn, which takes half the
    time."""
    with torch.device("meta"), no_init_weights():
        yield


def build(
    architecture: Architecture,
    dtype: torch.dtype = torch.float32,
    given: Mapping[str, Any] | None = None,
) -> Any:
    """A pipeline with random weights and no tokenizers, on the default device. given: parts of it
    that are there."""
    loader = getattr(diffusers, architecture.pipeline)
    wanted = inspect.signature(loader.__init__).parameters
    defaults = {name: None if option.default is option.empty else option.default
                for name, option in wanted.items() if name != "self"}  # fmt: skip
    parts: dict[str, Any] = {
        name: architecture.options.get(name, default) for name, default in defaults.items()
    }
    for name, config in architecture.parts.items():
        part = _part(config)
        # diffusers' own `to` would warn of hooks and dtypes that do not matter here
        parts[name] = nn.Module.to(part, dtype).eval() if isinstance(part, nn.Module) else part
    return loader(**{**parts, **(given or {})})


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
