"""Which family a pipeline is of, and how its files are loaded."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import PipelineQuantizationConfig
from huggingface_hub import hf_hub_download
from packaging.version import Version

from flowalign.backbone.errors import ModelError
from flowalign.backbone.family import Family
from flowalign.backbone.flux import Flux
from flowalign.backbone.flux2 import Flux2, Flux2Klein
from flowalign.backbone.qwen_image import QwenImage
from flowalign.backbone.sana import Sana
from flowalign.backbone.sd3 import SD3
from flowalign.backbone.tiny import MODEL as TINY
from flowalign.backbone.z_image import ZImage

FAMILIES: dict[str, type[Family]] = {
    family.pipeline: family for family in (SD3, Flux, Flux2, Flux2Klein, QwenImage, ZImage, Sana)
}
GROUP = "flowalign.backbones"  # of entry points, each a Family
PAGE = "docs/backbones.md"


@functools.cache
def families() -> Mapping[str, type[Family]]:
    """{pipeline class: Family}: those built in, and those of plugins (entry points)."""
    plugins = [point.load() for point in entry_points(group=GROUP)]
    return FAMILIES | {family.pipeline: family for family in plugins}


def family_named(name: str) -> type[Family]:
    """The family of `model.family`; ModelError for a name that is none."""
    known = {family.name: family for family in families().values()}
    if name not in known:
        raise ModelError(
            f"model.family: got {name!r}; there are {', '.join(known)}. {PAGE} says how to add one."
        )
    return known[name]


def family_of(pipeline: str, name: str | None = None) -> type[Family]:
    """The family of a pipeline's class, or the one of `model.family` instead. Raises ModelError for
    an unknown class, and for one that the installed diffusers does not have."""
    if name:
        return family_named(name)
    if pipeline not in families():
        raise ModelError(
            f"model.id: its model_index.json names a {pipeline}; flowalign knows "
            f"{', '.join(families())}. {PAGE} says how to add a family; `model.family` takes the "
            "pipeline for one of a known family."
        )
    family = families()[pipeline]
    if not hasattr(diffusers, pipeline):
        raise ModelError(
            f"model.id: a {pipeline} needs diffusers {family.since} or later; here is "
            f"{diffusers.__version__}."
        )
    return family


def resolve(model: str) -> str:
    """The folder of the shipped tiny model for "tiny"; any other id or folder as it is."""
    return str(TINY) if model == "tiny" else model


def pipeline_name(model: str, **hub: Any) -> str:
    """The class that model_index.json names, in a folder or on the Hub. hub: arguments of
    `hf_hub_download`, such as revision. Raises ModelError if it cannot be read."""
    index = Path(resolve(model), "model_index.json")
    try:
        if not index.parent.is_dir():
            index = Path(hf_hub_download(model, index.name, **hub))
        return json.loads(index.read_text())["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(_why_not(model, error)) from error


def load_pipeline(
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    vae_dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    revision: str | None = None,
    family: str | None = None,
) -> Any:
    """A diffusers pipeline of a known family on the CPU, of safetensors files only.

    Raises ModelError if it cannot be loaded.

    dtype: of all parts but the VAE. quantization: the transformer is stored in "nf4" or "fp8"
    instead, and computes in dtype. family: see `family_of`.
    """
    name = pipeline_name(model, revision=revision)
    kind = family_of(name, family)
    loader = getattr(diffusers, name, None) or getattr(diffusers, kind.pipeline)
    key = "dtype" if Version(diffusers.__version__) >= Version("0.40") else "torch_dtype"  # renamed
    four_bits = None
    if quantization == "nf4":
        computed: Any = {"bnb_4bit_compute_dtype": dtype}  # Any: diffusers' type knows no dtypes
        four_bits = PipelineQuantizationConfig(
            quant_backend="bitsandbytes_4bit",
            quant_kwargs={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **computed},
            components_to_quantize=["transformer"],
        )
    try:
        pipe = loader.from_pretrained(
            resolve(model),
            revision=revision,
            use_safetensors=True,  # else diffusers takes a pickle where a part has no other file
            quantization_config=four_bits,
            **{key: {"default": dtype, "vae": vae_dtype}},
        )
    except (OSError, ValueError) as error:
        raise ModelError(_why_not(model, error, loader.__name__)) from error
    pipe.set_progress_bar_config(disable=True)
    if quantization == "fp8":
        storage = torch.float8_e4m3fn  # the 8-bit format with more mantissa bits, for weights
        pipe.transformer.enable_layerwise_casting(storage_dtype=storage, compute_dtype=dtype)
    return pipe


def _why_not(model: str, error: Exception, loader: str = "diffusers pipeline") -> str:
    folder = Path(resolve(model))
    # the weights of a part: <part>/diffusion_pytorch_model.bin, <part>/pytorch_model.bin
    pickles = sorted(folder.glob("*/*pytorch_model*.bin")) if folder.is_dir() else []
    if pickles and "safetensors" in str(error):
        return (
            f"model.id {model!r}: {pickles[0]} is a pickle, and none is read: it could run code. "
            'If you trust it, convert the folder once: python -c "import diffusers as d; '
            f"d.{loader}.from_pretrained({str(folder)!r}).save_pretrained('NEW')\""
        )
    if not folder.exists():
        state = "there is no such folder, and the Hub did not give it"
    elif not (folder / "model_index.json").exists():
        state = f"{folder} holds no model_index.json"
    else:
        state = f"it does not load as a {loader}"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"model.id {model!r}: {state} ({reason[:200]}). Give `tiny`, the folder of a diffusers "
        "pipeline, or a Hub id such as stabilityai/stable-diffusion-3.5-medium; a gated one needs "
        "its licence accepted on the Hub and `hf auth login`."
    )
