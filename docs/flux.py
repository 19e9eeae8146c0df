"""FLUX.1 as flowalign sees it: what differs from Stable Diffusion 3. Run by tests/test_flux.py on
random weights; never run with FLUX's own, and trained with none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from flowalign.backbone import DTYPES, Backbone
from flowalign.config import ModelConfig

LAYERS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]  # for `lora.targets`


class Text:
    """Prompts -> embeddings [P,L,D] and pooled [P,E]. (`flowalign.text.TextEncoder` also keeps them
    on disk and moves the encoders off the GPU.)"""

    def __init__(self, pipe: FluxPipeline, device: torch.device | str, length: int) -> None:
        self.pipe, self.device, self.max_sequence_length = pipe, device, length

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        embeds, pooled, _ = self.pipe.encode_prompt(
            list(prompts), device=self.device, max_sequence_length=self.max_sequence_length
        )
        return embeds, pooled

    def prepare(self, calls: Sequence[Sequence[str]]) -> None:
        """Nothing is encoded ahead: the encoders stay where they are."""

    def negative(self) -> tuple[Tensor, Tensor]:
        return self([""])


class Flux(Backbone):
    """One frozen FLUX with named adapters. embedded_guidance: what a guidance-distilled model
    (FLUX.1-dev) is told; it is no classifier-free guidance and costs nothing."""

    def __init__(
        self,
        pipe: FluxPipeline,
        *,
        height: int,
        width: int,
        max_sequence_length: int = 512,
        device: torch.device | str = "cpu",
        decode_batch: int | None = None,
        name: str | None = None,
        embedded_guidance: float = 3.5,
    ) -> None:
        self.pipe, self.name, self.decode_batch = pipe.to(device), name, decode_batch
        self.device = torch.device(device)
        self.core = pipe.transformer.requires_grad_(False).eval()
        self.transformer = self.core
        self.dtype = next(self.core.parameters()).dtype
        self.text = Text(pipe, device, max_sequence_length)
        self.embedded_guidance = embedded_guidance
        factor = pipe.vae_scale_factor  # of the autoencoder; the transformer sees 2x2 patches
        if height % (2 * factor) or width % (2 * factor):
            raise ValueError(f"{height}x{width} pixels: take multiples of {2 * factor}")
        self.latent_shape = (self.core.config.in_channels // 4, height // factor, width // factor)
        for part in (pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
            if part is not None:
                part.requires_grad_(False).eval()

    @classmethod
    def load(cls, model: ModelConfig, device: torch.device | str = "cpu") -> Flux:
        dtype = DTYPES[model.dtype]  # the key is torch_dtype before diffusers 0.40
        pipe = FluxPipeline.from_pretrained(
            model.id, revision=model.revision, use_safetensors=True, dtype=dtype
        )
        keys = {"height", "width", "max_sequence_length", "decode_batch"}
        return cls(pipe, **model.model_dump(include=keys), device=device, name=model.id)

    def sigmas(self, num_steps: int) -> Tensor:
        """[T+1], from FLUX's own scheduler, whose shift depends on the number of patches."""
        config = self.pipe.scheduler.config
        _, h, w = self.latent_shape
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        mu = calculate_shift(h * w // 4, *(config[name] for name in names))
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
        even = np.linspace(1.0, 1 / num_steps, num_steps)
        scheduler.set_timesteps(sigmas=even.tolist(), mu=mu)
        return scheduler.sigmas

    def inputs(self, x: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor) -> dict[str, Any]:
        b, c, h, w = x.shape
        patches = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
        rows, columns = torch.meshgrid(torch.arange(h // 2), torch.arange(w // 2), indexing="ij")
        places = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)
        scale = torch.full((b,), self.embedded_guidance, device=x.device)
        return {
            "hidden_states": patches.reshape(b, h * w // 4, 4 * c).to(self.dtype),
            "encoder_hidden_states": embeds.to(self.dtype),
            "pooled_projections": pooled.to(self.dtype),
            "timestep": sigma.to(self.dtype),
            "guidance": scale if self.core.config.guidance_embeds else None,
            "img_ids": places.to(x.device, self.dtype),
            "txt_ids": torch.zeros(embeds.shape[1], 3, device=x.device, dtype=self.dtype),
        }

    def unpack(self, output: Tensor) -> Tensor:
        c, h, w = self.latent_shape
        patches = output.view(-1, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return patches.reshape(-1, c, h, w).float()
