"""Which family a pipeline is of, and how its files are loaded."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import BitsAndBytesConfig
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

from flowalign.backbone.adapters import Lora
from flowalign.backbone.family import LENGTH, Family, ModelError, default_length
from flowalign.backbone.flux import Flux
from flowalign.backbone.flux2 import Flux2, Flux2Klein
from flowalign.backbone.pretrained import WeightsError, load_complete
from flowalign.backbone.qwen_image import QwenImage
from flowalign.backbone.sana import Sana
from flowalign.backbone.sd3 import SD3
from flowalign.backbone.shapes import public
from flowalign.backbone.tiny import MODEL as TINY
from flowalign.backbone.tiny import T5_LENGTH
from flowalign.backbone.z_image import ZImage
from flowalign.config.section import did_you_mean
from flowalign.system import packages
from flowalign.system.files import expanded
from flowalign.system.hub_files import FAILED, TEXTS, WEIGHTS, HubFiles

FAMILIES: dict[str, type[Family]] = {
    family.pipeline: family for family in (SD3, Flux, Flux2, Flux2Klein, QwenImage, ZImage, Sana)
}
ANSWER = 5  # seconds in which the Hub answers whether it has a model
LIBRARIES = {"diffusers": diffusers, "transformers": transformers}  # of a pipeline's parts


@functools.cache
def families() -> Mapping[str, type[Family]]:
    """{pipeline class: Family}: those built in, and those of plugins (entry points)."""
    plugins = [point.load() for point in packages.entry_points("flowalign.backbones")]
    return FAMILIES | {family.pipeline: family for family in plugins}


def family_of(pipeline: str) -> type[Family]:
    """The family of a pipeline's class. Raises ModelError for an unknown one."""
    known = families()
    if pipeline not in known:
        raise ModelError(
            f"model.id: its model_index.json names a {pipeline}; flowalign knows "
            f"{', '.join(known)}. docs/backbones.md says how to add a family."
        )
    return known[pipeline]


def resolve_model(model: str) -> str:
    """The folder of the shipped tiny model for "tiny"; any other folder, `expanded`, or id."""
    return str(TINY) if model == "tiny" else expanded(model)


def pipeline_name(model: str, **hub: Any) -> str:
    """The class that model_index.json names, in a folder, of a public model or on the Hub. hub:
    options of `hf_hub_download`, such as revision. Raises ModelError if it cannot be read."""
    if model in public() and not Path(model).is_dir():
        return public()[model].pipeline
    return model_index(model, **hub)["_class_name"]


def model_index(model: str, **hub: Any) -> dict[str, Any]:
    """model_index.json, with a `_class_name`; see `pipeline_name`."""
    index = Path(resolve_model(model), "model_index.json")
    try:
        if not index.parent.is_dir():
            if not try_to_load_from_cache(model, index.name, revision=hub.get("revision")):
                HfApi().model_info(model, timeout=ANSWER)  # a download would ask for half a minute
            index = Path(hf_hub_download(model, index.name, **hub))
        content = json.loads(index.read_text())
        return {**content, "_class_name": str(content["_class_name"])}
    except (*FAILED, ValueError, KeyError, TypeError) as error:
        raise model_error(model, error) from error


def hub_files(model: str, revision: str | None = None) -> list[HubFiles]:
    """What `load_pipeline` reads of a model on the Hub: the parts in their folders, safetensors
    without variant, and no files of other programs beside them. [] for a folder here."""
    if Path(resolve_model(model)).is_dir():
        return []
    weights = (*WEIGHTS, *(f"diffusion_pytorch_{name}" for name in WEIGHTS))
    patterns = (*TEXTS, *(f"*/{name}" for name in weights))
    return [HubFiles(model, patterns, revision=revision)]


def check_packages(model: str, index: Mapping[str, Any]) -> None:
    """Raise ModelError if transformers lacks a package for a part of a pipeline, as for a processor
    of images: diffusers does not name it. Before anything large is downloaded."""
    for part in index.values():
        kind = getattr(transformers, str(part[-1]), None) if isinstance(part, list) else None
        for package in getattr(kind, "_backends", ()):  # of its stand-ins for such classes
            if not packages.installed(package):
                raise ModelError(
                    f"model.id: the {part[-1]} of {model} needs {package}, which is not installed. "
                    f"{packages.hint(package)}"
                )


def load_pipeline(
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    revision: str | None = None,
    parts: Mapping[str, Any] | None = None,
) -> Any:
    """A diffusers pipeline of a known family on the CPU, of safetensors files only.

    Raises ModelError if it cannot be loaded.

    dtype: of all parts but the VAE. quantization: the transformer is stored in "nf4" or "fp8"
    instead, and computes in dtype. parts: those that are there, and are not loaded.
    """
    index = model_index(model, revision=revision)
    kind = family_of(index["_class_name"])
    check_packages(model, index)
    options: dict[str, Any] = {"dtype": {"default": dtype, "vae": torch.float32}, **(parts or {})}
    four_bits = dict[str, Any]()
    if quantization == "nf4":
        settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        four_bits["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **settings)
    try:
        loader = getattr(diffusers, kind.pipeline)
        part_options = {"transformer": four_bits}
        pipe = complete_pipeline(loader, model, part_options, revision=revision, **options)
    except (OSError, ValueError) as error:
        raise model_error(model, error) from error
    pipe.set_progress_bar_config(disable=True)
    if quantization == "fp8":
        store_in_fp8(pipe.transformer, dtype)
    return pipe


def complete_pipeline(
    loader: Any, model: str, part_options: Mapping[str, Any] = {}, **options: Any
) -> Any:
    """`loader.from_pretrained(model, **options)`, with its models loaded by `load_complete`. With
    `device_map` or `quantization_config` diffusers loads them, and nothing is checked.
    part_options: {part: more options of it}."""
    options = {"use_safetensors": True, **options}  # else a pickle, where a part has no other file
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        folder = Path(loader.download(model, **options))
    if options.keys() & {"device_map", "quantization_config"}:
        return loader.from_pretrained(folder, **options)
    dtypes = options.get("dtype", options.get("torch_dtype"))
    variant = options.get("variant")
    index = model_index(str(folder))
    for name, part in ((n, part) for n, part in index.items() if isinstance(part, list)):
        kind = getattr(LIBRARIES.get(str(part[0])), str(part[-1]), None)
        if name in options or not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            continue
        dtype = dtypes.get(name, dtypes.get("default")) if isinstance(dtypes, dict) else dtypes
        more = {"dtype": dtype, **part_options.get(name, {})}
        if variant and any((folder / name).glob(f"*.{variant}*")):
            more["variant"] = variant
        options[name] = load_complete(kind, folder / name, **more)
    return loader.from_pretrained(folder, **options)


def store_in_fp8(transformer: Any, dtype: torch.dtype) -> None:
    """Weights in 8 bits between forward passes; computes in `dtype`. Not those of convolutions
    (half of SANA's): autograd keeps such a weight itself for the backward pass, where it would be
    in 8 bits again."""
    transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn,  # the 8-bit format with more mantissa bits
        compute_dtype=dtype,
        skip_modules_classes=(torch.nn.Conv2d,),
    )


def meant(model: str) -> str:
    """Which public model somebody may have meant; "" if none has nearly this id."""
    return did_you_mean(model, public(), cutoff=0.8)


def model_error(model: str, error: Exception) -> ModelError:
    """What is wrong with model.id, from what reading it raised."""
    if isinstance(error, WeightsError):
        return ModelError(f"model.id {model!r}: {error}")
    folder = Path(resolve_model(model))
    files = list[str]()
    if "safetensors" in str(error):
        with suppress(*FAILED):
            files = [f.relative_to(folder).as_posix() for f in sorted(folder.rglob("*"))]
            files = files or HfApi().list_repo_files(model)
    # the weights of a part: <part>/diffusion_pytorch_model.bin, <part>/pytorch_model.bin
    if pickles := fnmatch.filter(files, "*/*pytorch_model*.bin"):
        return ModelError(
            f"model.id {model!r}: {pickles[0]} is a pickle, and none is read: it could run code. "
            "If you trust it, let diffusers load the folder once, and `save_pretrained` it."
        )
    # the weights of a variant: <part>/model.fp16.safetensors
    whole = {Path(f).parts[0] for f in files if re.search(r"model(-\d+-of-\d+)?\.safetensors$", f)}
    variants = fnmatch.filter(files, "*/*model.*.safetensors")
    if variants := [file for file in variants if Path(file).parts[0] not in whole]:
        variant = variants[0].split("model.")[1].split(".")[0].split("-")[0]
        return ModelError(
            f"model.id {model!r}: a part has weights of the variant {variant!r} alone "
            f"({variants[0]}), and no variant is read. Let diffusers load the model once with "
            f"`variant={variant!r}`, `save_pretrained` it, and give that folder."
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    state = "does not load" if folder.exists() else "is no folder here, and the Hub did not give it"
    return ModelError(
        f"model.id {model!r} {state} ({reason[:200]}).{meant(model)} Give `tiny`, the folder of a "
        "diffusers pipeline, or a Hub id such as stabilityai/stable-diffusion-3.5-medium; a gated "
        "one needs its licence accepted on the Hub and `hf auth login`."
    )


def text_length(model: str, lora: Lora | None) -> int | None:
    """Tokens of a prompt: as in the LoRA's training if its file says so, else those of the tiny
    model, else None = diffusers' default."""
    if lora and lora.text_length:
        return lora.text_length
    return T5_LENGTH if resolve_model(model) == str(TINY) else None


def pipeline_class(model: str, length: int | None, **hub: Any) -> type[Any]:
    """The class in diffusers of a model's pipeline, or one like it whose prompts have `length`
    tokens by default. hub: see `pipeline_name`. Raises ModelError for a pipeline of no family.

    diffusers has that number only in the defaults of two methods. The class has the name of its
    parent, which `save_pretrained` writes: what is saved is an ordinary pipeline.
    """
    parent = getattr(diffusers, family_of(pipeline_name(model, **hub)).pipeline)
    if length in (None, default_length(parent)):
        return parent
    methods = {
        name: functools.partialmethod(getattr(parent, name), **{LENGTH: length})
        for name in ("__call__", "encode_prompt")
    }
    return type(parent.__name__, (parent,), {**methods, "__doc__": parent.__doc__})
