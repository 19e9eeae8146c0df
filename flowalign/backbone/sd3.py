"""Stable Diffusion 3 pipelines: how one is loaded, and the noise levels it steps along."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    PipelineQuantizationConfig,
    StableDiffusion3Pipeline,
)
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from packaging.version import Version
from torch import Tensor

from flowalign.tiny import MODEL as TINY


def resolve(model: str) -> str:
    """The folder of the shipped tiny model for "tiny"; any other id or folder as it is."""
    return str(TINY) if model == "tiny" else model


def load_pipeline(
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    vae_dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    revision: str | None = None,
) -> StableDiffusion3Pipeline:
    """A diffusers SD3 pipeline on the CPU, of safetensors files only.

    Raises ModelError if it cannot be loaded.

    dtype: of all parts but the VAE. quantization: the transformer is stored in "nf4" or "fp8"
    instead, and computes in dtype.
    """
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
        pipe = StableDiffusion3Pipeline.from_pretrained(
            resolve(model),
            revision=revision,
            use_safetensors=True,  # else diffusers takes a pickle where a part has no other file
            quantization_config=four_bits,
            **{key: {"default": dtype, "vae": vae_dtype}},
        )
    except (OSError, ValueError) as error:
        raise ModelError(_why_not(model, error)) from error
    pipe.set_progress_bar_config(disable=True)
    if quantization == "fp8":
        storage = torch.float8_e4m3fn  # the 8-bit format with more mantissa bits, for weights
        pipe.transformer.enable_layerwise_casting(storage_dtype=storage, compute_dtype=dtype)
    return pipe


class ModelError(OSError):
    """A base model that cannot be loaded: what was seen, what is possible, what to do."""


def _why_not(model: str, error: Exception) -> str:
    folder = Path(resolve(model))
    # the weights of a part: <part>/diffusion_pytorch_model.bin, <part>/pytorch_model.bin
    pickles = sorted(folder.glob("*/*pytorch_model*.bin")) if folder.is_dir() else []
    if pickles and "safetensors" in str(error):
        return (
            f"model.id {model!r}: {pickles[0]} is a pickle, and none is read: it could run code. "
            'If you trust it, convert the folder once: python -c "import diffusers as d; '
            f"d.StableDiffusion3Pipeline.from_pretrained({str(folder)!r}).save_pretrained('NEW')\""
        )
    if not folder.exists():
        state = "there is no such folder, and the Hub did not give it"
    elif not (folder / "model_index.json").exists():
        state = f"{folder} holds no model_index.json"
    else:
        state = "it does not load as a StableDiffusion3Pipeline"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"model.id {model!r}: {state} ({reason[:200]}). Give `tiny`, the folder of a diffusers "
        "pipeline, or a Hub id such as stabilityai/stable-diffusion-3.5-medium; a gated one needs "
        "its licence accepted on the Hub and `hf auth login`."
    )


def scheduler_sigmas(scheduler: Any, num_steps: int, tokens: int) -> Tensor:
    """The schedule [T+1], float32, from 1 down to 0, as a diffusers scheduler gives it to the SD3
    pipeline for images of so many tokens. The scheduler is not changed.

    Raises ModelError for a scheduler that a rollout cannot follow: rollouts take Euler steps
    between these noise levels, and the model's timestep is sigma * 1000.
    """

    def refusal(problem: str) -> ModelError:
        return ModelError(
            f"the model's scheduler {problem}, and rollouts take Euler steps of a flow from sigma "
            "1 to 0. Give the model a FlowMatchEulerDiscreteScheduler "
            "(scheduler/scheduler_config.json)."
        )

    config = scheduler.config
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise refusal(f"is a {type(scheduler).__name__}")
    supported = {"invert_sigmas": False, "stochastic_sampling": False, "num_train_timesteps": 1000}
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise refusal(f"has {key} = {config[key]!r}, where {value!r} is supported")
    changed = copy.deepcopy(scheduler)  # set_timesteps changes its state
    dynamic = config.get("use_dynamic_shifting")
    changed.set_timesteps(num_steps, mu=dynamic_shift(scheduler, tokens) if dynamic else None)
    sigmas = torch.as_tensor(changed.sigmas, dtype=torch.float32, device="cpu")
    if sigmas[0] != 1 or sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()):
        raise refusal(f"gives the noise levels {sigmas.tolist()}, not from 1 to 0")
    return sigmas


def dynamic_shift(scheduler: Any, tokens: int) -> float:
    """mu, as diffusers' SD3 pipeline computes it."""
    config = scheduler.config
    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),  # the defaults of diffusers' pipeline
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.16),
    )
