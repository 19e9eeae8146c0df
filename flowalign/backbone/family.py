"""Model families: each is described once, and all else derives from it. `FAMILIES` lists them."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import diffusers
import numpy as np
import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor, nn

from flowalign.types import Problem

LENGTH = "max_sequence_length"  # as diffusers calls it, too
Text = dict[str, Tensor]  # what the transformer is told of a prompt, by names of the family's own
JOINT_ATTENTION = [  # layers of blocks in which image and text attend to both
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
]  # fmt: skip
FINAL_LAYER = {  # BFL's and Stability's
    "final_layer.linear": ["proj_out"],
    "final_layer.adaLN_modulation.1": ["norm_out.linear"],
}
BFL_ATTENTION = {  # of a block in which image and text attend to both
    "img_attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "img_attn.proj": ["attn.to_out.0"],
    "txt_attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "txt_attn.proj": ["attn.to_add_out"],
}
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
SUPPORTED = {"invert_sigmas": False, "stochastic_sampling": False, "num_train_timesteps": 1000}


class ModelError(OSError):
    """A base model that cannot be loaded: what was seen, what is possible, what to do."""


def in_blocks(theirs: str, ours: str, layers: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Layers of each block, as `Family.foreign` has them."""
    return {
        f"{theirs}.{{}}.{name}": [f"{ours}.{{}}.{part}" for part in parts]
        for name, parts in layers.items()
    }


def by_prompt(**parts: Tensor) -> list[Text]:
    """`Text` of each prompt, of tensors [P,...] of all prompts."""
    return [dict(zip(parts, rows, strict=True)) for rows in zip(*parts.values(), strict=True)]


def without_padding(embeds: Sequence[Tensor]) -> list[Text]:
    """embeds [L,D] and mask [L] of each prompt, L its own number of tokens."""
    return [{"embeds": e, "mask": e.new_ones(len(e), dtype=torch.bool)} for e in embeds]


def default_length(pipeline: type[Any]) -> int:
    """Tokens of a prompt in a call of a pipeline, unless it says otherwise."""
    return inspect.signature(pipeline.__call__).parameters[LENGTH].default


class Family(ABC):
    """A pipeline of a family: text -> what conditions the transformer; latents -> its inputs, and
    its output -> a velocity; latents -> pixels; noise levels. This class is what most families
    share: patches of 2x2 latents, classifier-free guidance, an AutoencoderKL, a
    FlowMatchEulerDiscreteScheduler.

    pipeline: the class in diffusers that `model_index.json` names.
    targets: layers of a LoRA, by the end of their names. negative: the prompt without content of
    CFG, always encoded alone.
    foreign: layers by their names in the model's own code, for LoRAs of other programs: those here
    that they are made of, side by side. {} is the number of a block.
    tokenizer: the part whose tokens `max_sequence_length` limits. longest: its largest value.
    even_grid: whether the scheduler shifts linspace(1, 1/T, T), not a grid of its own.
    guidance: what a guidance scale is: of classifier-free guidance, an input of the transformer, or
    nothing (the scale must be 1).
    unused: names of layers among `targets` on which no velocity depends: adapters of them get no
    gradient.
    largest: pixels of the longest side that the transformer has positions for; None = any.

    A latent is [C,h,w]; pipe may lie on the meta device.
    """

    name: ClassVar[str]
    pipeline: ClassVar[str]
    targets: ClassVar[Sequence[str]]
    foreign: ClassVar[Mapping[str, Sequence[str]]] = {}
    scale: ClassVar[str] = "guidance_scale"  # what the pipeline's call names it
    negative: ClassVar[str] = ""
    tokenizer: ClassVar[str] = "tokenizer"
    longest: ClassVar[int] = 512
    patch: int = 2  # latents a side of a token
    even_grid: bool = True
    guidance: Literal["cfg", "embedded", "none"] = "cfg"
    unused: Sequence[str] = ()
    largest: int | None = None
    max_shift: ClassVar[float] = 1.15  # where the scheduler's config has none
    gpu_attention: ClassVar[str | None] = None  # in 16 bits, where model.attention is null

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.core = pipe.transformer

    @property
    def scheduler(self) -> Any:
        """The scheduler whose noise levels rollouts step along."""
        return self.pipe.scheduler

    @property
    def encoders(self) -> list[nn.Module]:
        """The text encoders that the pipeline has."""
        parts = (getattr(self.pipe, name, None) for name in ENCODERS)
        return [part for part in parts if part is not None]

    @classmethod
    def defaults(cls) -> tuple[int, float]:
        """(steps, guidance scale) of a call of the pipeline in diffusers."""
        call = inspect.signature(getattr(diffusers, cls.pipeline).__call__).parameters
        return call["num_inference_steps"].default, call[cls.scale].default

    @property
    def length(self) -> int:
        """Tokens of a prompt where `model.max_sequence_length` is null."""
        return default_length(getattr(diffusers, self.pipeline))

    def length_problems(self, length: int) -> Iterator[Problem]:
        """Why prompts cannot have so many tokens; nothing where they can."""
        if length > self.longest:
            yield Problem(
                "model.max_sequence_length",
                f"{length}; this model takes {self.longest} tokens at most. Use fewer.",
            )

    # Sizes -------------------------------------------------------------------------------------

    @property
    def factor(self) -> int:
        """Pixels a side of a latent."""
        return self.pipe.vae_scale_factor

    @property
    def usual(self) -> int:
        """Pixels of the side that the model was made for."""
        return self.core.config.get("sample_size", 128) * self.factor

    @property
    def channels(self) -> int:
        """C of a latent."""
        return self.core.config.in_channels

    def size_problems(self, height: int, width: int) -> Iterator[Problem]:
        """Why the model has no images of this size; nothing for one that it has."""
        grid = self.factor * self.patch
        if height % grid or width % grid:
            yield Problem(
                "model.height", f"{height}x{width} pixels; this model takes multiples of {grid}."
            )
        if self.largest and max(height, width) > self.largest:
            yield Problem(
                "model.height",
                f"{height}x{width} pixels; this model has positions for {self.largest} at most, "
                f"and was made for {self.usual}. Use fewer.",
            )

    def dtype_problems(self, model: str, dtype: str) -> Iterator[Problem]:
        """Why model.id does not run in a dtype; by default nothing."""
        yield from ()

    def tokens(self, latent: Sequence[int]) -> int:
        """Tokens of an image, on which a dynamic shift depends."""
        _, height, width = latent
        return (height // self.patch) * (width // self.patch)

    def encoder_tokens(self, length: int) -> list[int]:
        """Tokens that each text encoder sees of a prompt, at most."""
        return [length for _ in self.encoders]

    @abstractmethod
    def text_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of `Text` for the longest prompt."""

    # Sampling ----------------------------------------------------------------------------------

    def mu(self, tokens: int, steps: int) -> float:
        """The dynamic shift of an image of so many tokens: on a line between two sizes. The
        defaults are those of diffusers' pipelines."""
        config = self.scheduler.config
        return calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", self.max_shift),
        )

    def sigmas(self, steps: int, tokens: int) -> Tensor:
        """The schedule [T+1], float32, from 1 to 0, as the pipeline's own scheduler gives it.

        Raises ModelError for a scheduler that a rollout cannot follow: rollouts take Euler steps
        between these noise levels, and the model's timestep is sigma * 1000.
        """
        scheduler = self.scheduler
        config = self.scheduler.config
        problems = [f"{key} = {config[key]!r}, not {value!r}" for key, value in SUPPORTED.items()
                    if config.get(key, value) != value]  # fmt: skip
        if not isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
            problems = [type(scheduler).__name__]
        if not problems:
            mu = self.mu(tokens, steps) if config.get("use_dynamic_shifting") else None
            changed = copy.deepcopy(scheduler)  # set_timesteps changes its state
            if self.even_grid:
                changed.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)
            else:
                changed.set_timesteps(steps, mu=mu)
            sigmas = torch.as_tensor(changed.sigmas, dtype=torch.float32, device="cpu")
            if sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all()):
                return sigmas
            problems = [f"noise levels {sigmas.tolist()}, not from 1 to 0"]
        raise ModelError(
            f"rollouts take Euler steps of a flow, and the model's scheduler has {problems[0]}. "
            "Give it a FlowMatchEulerDiscreteScheduler (scheduler/scheduler_config.json)."
        )

    def shift(self, tokens: int, steps: int) -> float:
        """The shift of the schedule: sigma = shift u / (1 + (shift - 1) u) of an even grid u."""
        scheduler = self.scheduler
        if not scheduler.config.get("use_dynamic_shifting"):
            return scheduler.shift
        mu = self.mu(tokens, steps)
        return mu if scheduler.config.time_shift_type == "linear" else math.exp(mu)

    @abstractmethod
    def encode(self, prompts: list[str], length: int, device: Any) -> list[Text]:
        """`Text` of each prompt, of at most `length` tokens. Where their first dimensions differ, a
        batch pads them with zeros at the end."""

    @abstractmethod
    def inputs(self, x: Tensor, sigma: Tensor, text: Text, guidance: float) -> dict[str, Any]:
        """The transformer's keyword arguments for x [B,C,h,w] in its dtype at sigma [B], float32.
        guidance is of use where it is embedded."""

    def embedded(self, sigma: Tensor, guidance: float) -> Tensor | None:
        """A scale that is an input of the transformer [B], float32; None where it is none."""
        return sigma.new_full(sigma.shape, guidance) if self.guidance == "embedded" else None

    def velocity(self, output: Tensor, x: Tensor) -> Tensor:
        """The transformer's output for x [B,C,h,w] as v = noise - image [B,C,h,w], float32."""
        return output.float()

    def guided(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance of two velocities [B,C,h,w], float32."""
        return negative + scale * (positive - negative)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B,C,h,w], float32 -> images [B,3,H,W] in [-1,1]."""
        vae = self.pipe.vae
        latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        return vae.decode(latents.to(vae.dtype)).sample

    def encode_image(self, images: Tensor) -> Tensor:
        """`decode` backwards, by the mode of the VAE: images [B,3,H,W] in [-1,1] -> [B,C,h,w]."""
        vae = self.pipe.vae
        latents = vae.encode(images.to(vae.dtype)).latent_dist.mode().float()
        return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


class PackedFamily(Family):
    """A family whose transformer takes latents as tokens: 2x2 of them, with its channels
    together."""

    @property
    def channels(self) -> int:
        return self.core.config.in_channels // 4

    def packed(self, x: Tensor) -> Tensor:
        """[B,C,h,w] -> [B, h/2 * w/2, 4C], row by row; in a token the channels come first."""
        return self.pipe._pack_latents(x, *x.shape)

    def velocity(self, output: Tensor, x: Tensor) -> Tensor:
        """Tokens -> v [B,C,h,w]."""
        return FluxPipeline._unpack_latents(output, *x.shape[2:], vae_scale_factor=1).float()
