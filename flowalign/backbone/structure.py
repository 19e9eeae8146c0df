"""A model described once, without weights: `ModelSpec`, which checks, doctor and build read.

It is made from the config files of a pipeline, or of a public model that is built in.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.modeling_utils import no_init_weights
from huggingface_hub import snapshot_download, try_to_load_from_cache
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from flowalign.backbone.attention import has_backends
from flowalign.backbone.family import ENCODERS, Family, ModelError
from flowalign.backbone.loading import (
    family_of,
    meant,
    model_error,
    resolve_model,
    store_in_fp8,
    text_length,
)
from flowalign.backbone.lora import adapted_layers
from flowalign.backbone.shapes import Architecture, Config, public
from flowalign.config import ModelConfig
from flowalign.types import Problem


@dataclass(frozen=True)
class ModelSpec:
    """What the config of a model and its family say together. family: of a pipeline that may lie
    on the meta device."""

    config: ModelConfig
    family: Family

    @property
    def length(self) -> int:
        """Tokens of a prompt: of the config, else of the tiny model, else of the family."""
        config = self.config
        return config.max_sequence_length or text_length(config.id, None) or self.family.length

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """C, h, w of a latent."""
        (height, width), factor = self.config.size, self.family.factor
        return self.family.channels, height // factor, width // factor

    def adapted(self, targets: Sequence[str] | None = None) -> list[str]:
        """The layers that a LoRA of these targets adapts; None = the family's."""
        return adapted_layers(self.family.core, targets or self.family.targets)

    def problems(self) -> Iterator[Problem]:
        """A size, a length of prompts, a dtype and an attention that the model does not have."""
        yield from self.family.size_problems(*self.config.size)
        yield from self.family.length_problems(self.length)
        yield from self.family.dtype_problems(self.config.id, self.config.dtype)
        if self.config.attention and not has_backends(self.family.core):
            yield Problem(
                "model.attention",
                f"{self.config.attention!r}; diffusers' layers of this model have torch's SDPA "
                "alone. Use null.",
            )


def model_spec(model: ModelConfig, *, whole: bool = False) -> ModelSpec:
    """The model of a config, on the meta device: transformer and autoencoder, or all its parts.
    LookupError where its shapes are not known here, ModelError for a pipeline of no family."""
    return ModelSpec(model, _family(model.id, model.revision, whole))


def known(model: ModelConfig) -> ModelSpec | None:
    """The model as by `model_spec`; None if it cannot be had: its loader says what is wrong."""
    try:
        return model_spec(model)
    except (LookupError, OSError, ValueError):
        return None


def read_family(model: ModelConfig, **hub: Any) -> Family:
    """The family of a model, as `model_spec` has it. Config files that are not here are downloaded
    from the Hub. hub: options of `snapshot_download`. Raises ModelError."""
    try:
        return model_spec(model).family
    except LookupError:
        hub.setdefault("revision", model.revision)
    try:
        configs = ["model_index.json", "*/config.json", "scheduler/*.json"]
        folder = snapshot_download(model.id, allow_patterns=configs, **hub)
        return _family(folder, None, False)
    except ModelError:
        raise
    except (LookupError, OSError, ValueError) as error:
        raise model_error(model.id, error) from error


def mismatches(model: ModelConfig, other: ModelConfig) -> Iterator[str]:
    """Why the transformer of another model cannot label a model's states. Raises LookupError where
    the shapes of one are not known."""
    student = model_spec(model, whole=True)
    longest = other.model_copy(update={"max_sequence_length": student.length})
    teacher = model_spec(longest, whole=True)
    yield from map(str, teacher.problems())
    ours, theirs = _interface(student), _interface(teacher)
    for key in ours | theirs:
        if ours.get(key) != theirs.get(key):
            yield f"its {key} is {theirs.get(key)}, and that of {model.id} is {ours.get(key)}"


def _interface(spec: ModelSpec) -> dict[str, Any]:
    """What a transformer shares with all others that can label its states, by the config files: the
    weights of encoders and VAE are not compared."""
    family = spec.family
    interface: dict[str, Any] = {"family": family.name, "latent": spec.latent_shape}
    interface["text"] = family.text_shapes(spec.length)
    parts = ((n, part) for n, part in family.pipe.components.items() if part is not None)
    for name, part in parts:
        if name in ENCODERS:
            weights = sum(parameter.numel() for parameter in part.parameters())
            interface[name] = f"{type(part).__name__} of {weights:,} weights"
        elif name in ("vae", "scheduler"):
            interface |= {f"{name}.{key}": v for key, v in part.config.items() if key[0] != "_"}
    return interface


# Architectures -----------------------------------------------------------------------------------


def find(model: str, revision: str | None = None) -> Architecture:
    """The architecture of model.id, without weights or network: read from its folder or from the
    Hub's cache, else of a public model. LookupError where none of them has it."""
    folder = local_folder(model, revision)
    if folder is None and model in public():
        return public()[model]
    if folder is None:
        raise LookupError(
            f"model.id {model!r} is neither a folder nor in the Hub's cache on this machine, and "
            "its shapes are not built in. Download it, or use a public model."
            f"{meant(model) or ' There are ' + ', '.join(public())}"
        )

    def read(path: str) -> Config | None:
        file = folder / path
        return json.loads(file.read_text()) if file.is_file() else None

    return Architecture.of(read)


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """The folder of a pipeline on this machine, in the Hub's cache or elsewhere; None if absent."""
    index = Path(resolve_model(model)) / "model_index.json"
    if index.is_file():
        return index.parent
    if model.count("/") != 1 or index.parent.exists():
        return None
    cached = try_to_load_from_cache(model, "model_index.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _family(model: str, revision: str | None, whole: bool, ids: bool = False) -> Family:
    """The family of a model on the meta device. ids: with its tokenizers, and encoders that give
    back the ids of tokens; LookupError where they are not here."""
    return _described(str(local_folder(model, revision) or model), whole, ids)


@lru_cache(maxsize=8)  # every stage of a recipe asks for the same one
def _described(model: str, whole: bool, ids: bool) -> Family:
    """model: a folder, which for a revision of the Hub is its commit's own, or a public model."""
    architecture = find(model)
    kind = family_of(architecture.pipeline)
    tokenizers = dict[str, Any]()
    if ids:
        tokenizers = _encoders_of_ids(local_folder(model), kind)
    if not whole:
        parts = {name: architecture.parts[name] for name in ("transformer", "vae")}
        architecture = replace(architecture, parts=parts)
    with weightless():
        return kind(build(architecture, given=tokenizers))


@contextmanager
def weightless() -> Iterator[None]:
    """Inside the `with`, models are made on the meta device and no weights are drawn, which would
    take half the time."""
    with torch.device("meta"), no_init_weights():
        yield


def bare(model: ModelConfig) -> ModelConfig:
    """The settings of a model that its shapes depend on; all others have their defaults."""
    keys = {"id", "revision", "dtype", "height", "width", "max_sequence_length"}
    if model.quantization == "fp8":
        keys.add("quantization")
    return ModelConfig(**model.model_dump(include=keys))


def weightless_pipeline(model: ModelConfig, dtype: torch.dtype, parts: Mapping[str, Any]) -> Any:
    """A pipeline on the meta device; parts: those that are there. LookupError where its shapes are
    not known."""
    with weightless():
        pipe = build(find(model.id, model.revision), dtype, parts)
        nn.Module.to(pipe.vae, torch.float32)
        if model.quantization == "fp8":  # bitsandbytes stores 4 bits on a GPU alone
            store_in_fp8(pipe.transformer, dtype)
    return pipe


def build(
    architecture: Architecture,
    dtype: torch.dtype = torch.float32,
    given: Mapping[str, Any] = {},
) -> Any:
    """A pipeline with random weights and no tokenizers, on the default device. given: parts that
    exist already."""
    loader = getattr(diffusers, architecture.pipeline)
    parts = dict[str, Any]()
    for name, option in inspect.signature(loader.__init__).parameters.items():
        if name != "self":
            default = None if option.default is option.empty else option.default
            parts[name] = architecture.options.get(name, default)
    for name, config in architecture.parts.items():
        if name in given:
            continue
        part = _part(config)
        # diffusers' own `to` would warn of hooks and dtypes that do not matter here
        parts[name] = nn.Module.to(part, dtype).eval() if isinstance(part, nn.Module) else part
    return loader(**{**parts, **given})


def _part(config: Config) -> Any:
    # the dtype of a file must not overrule ours
    options = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    name = options.pop("_class_name")
    if "Scheduler" in name:
        with torch.device("cpu"):  # some compute with the values of their schedule
            return getattr(diffusers, name).from_config(options)
    if hasattr(diffusers, name):
        kind = getattr(diffusers, name)  # which warns of entries that it does not know
        taken = inspect.signature(kind.__init__).parameters
        return kind.from_config({key: value for key, value in options.items() if key in taken})
    kind = options.pop("model_type")
    return getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **options))


# Prompts that are too long -----------------------------------------------------------------------


class _Ids(nn.Module):
    """A text encoder that gives back the ids of its tokens [B,L,1], at every index and under every
    name. pooled: its first output is a vector [B,1]."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        ids = input_ids[..., None].float()
        first = ids[:, 0] if self.pooled else ids
        layers = defaultdict[int, Tensor](lambda: ids)
        return BaseModelOutputWithPooling(first, ids[:, 0], layers)  # pyright: ignore


def _encoders_of_ids(folder: Path | None, family: type[Family]) -> dict[str, Any]:
    """The tokenizers of a pipeline, each with an encoder of `_Ids`."""
    if folder is None:
        raise LookupError("its tokenizers are not on this machine")
    parts = {}
    for name, kind in json.loads((folder / "model_index.json").read_text()).items():
        if "tokenizer" in name and kind[-1]:
            parts[name] = getattr(transformers, kind[-1]).from_pretrained(folder / name)
        elif name in ENCODERS and kind[-1]:
            tokenizer = name.replace("text_encoder", "tokenizer")
            parts[name] = _Ids(pooled=tokenizer != family.tokenizer)
    return parts


def cut_prompts(model: ModelConfig, prompts: Sequence[str]) -> list[str] | None:
    """The prompts that the model does not see to their end, by what the family's own encoding
    leaves of them, such as behind a chat template. None where the tokenizers are not here."""
    try:
        family = _family(model.id, model.revision, whole=False, ids=True)
    except (LookupError, OSError, ValueError, ImportError, AttributeError):
        return None
    if (tokenizer := getattr(family.pipe, family.tokenizer)) is None:
        return None
    padding = getattr(tokenizer, "tokenizer", tokenizer).pad_token_id  # a processor has one inside
    limit = ModelSpec(model, family).length

    def seen(length: int) -> list[list[float]]:
        """The ids of each prompt that reach the transformer."""
        embeds = [text["embeds"][:, 0] for text in family.encode(list(prompts), length, "cpu")]
        return [ids[ids != padding].tolist() for ids in embeds]

    logging.disable(logging.WARNING)  # of diffusers, for each prompt
    try:
        both = zip(prompts, seen(limit), seen(limit + 1), strict=True)
        return [prompt for prompt, ids, more in both if ids != more]
    except (ValueError, RuntimeError):  # the marks around a prompt alone are more
        return list(prompts)
    finally:
        logging.disable(logging.NOTSET)
