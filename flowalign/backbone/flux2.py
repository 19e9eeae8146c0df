"""FLUX.2: dev, which takes its guidance as an input, and klein, base (CFG) or distilled (none)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowalign.backbone.family import BFL_ATTENTION, JOINT_ATTENTION, Family, Text, by_prompt
from flowalign.backbone.flux import Flux, bfl_names

# Layers of BFL's own code in ours
DOUBLE = BFL_ATTENTION | {
    "img_mlp.0": ["ff.linear_in"], "img_mlp.2": ["ff.linear_out"],
    "txt_mlp.0": ["ff_context.linear_in"], "txt_mlp.2": ["ff_context.linear_out"],
}  # fmt: skip
SINGLE = {"linear1": ["attn.to_qkv_mlp_proj"], "linear2": ["attn.to_out"]}
EMBEDDERS = {"time": "timestep", "guidance": "guidance"}
MODULATIONS = {
    f"{name}.lin": [f"{name}.linear"]
    for name in ("single_stream_modulation", "double_stream_modulation_img",
                 "double_stream_modulation_txt")
}  # fmt: skip


class Flux2(Family):
    """A latent here is a token: 2x2 latents of the autoencoder, with its channels together. Prompts
    have no mask: their padding is seen, as in diffusers."""

    name = "flux2"
    gpu_attention = Flux.gpu_attention  # its single blocks are those of FLUX.1
    pipeline = "Flux2Pipeline"
    targets = [
        *JOINT_ATTENTION,
        "attn.to_qkv_mlp_proj",  # attn.to_out of these blocks is a list in the others
    ]  # fmt: skip
    foreign = MODULATIONS | bfl_names(DOUBLE, SINGLE, EMBEDDERS, "time_guidance_embed")
    patch = 1
    guidance = "embedded"

    @property
    def factor(self) -> int:
        return 2 * self.pipe.vae_scale_factor

    @property
    def usual(self) -> int:
        return self.pipe.default_sample_size * self.pipe.vae_scale_factor

    def mu(self, tokens: int, steps: int) -> float:
        """FLUX.2's shift depends on the number of steps, too."""
        return compute_empirical_mu(tokens, steps)

    def text_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Three hidden layers of the text encoder, side by side."""
        return {"embeds": (length, self.core.config.joint_attention_dim)}

    def encode(self, prompts: list[str], length: int, device: Any) -> list[Text]:
        """embeds [L,D] of each prompt."""
        embeds, _ = self.pipe.encode_prompt(prompts, device=device, max_sequence_length=length)
        return by_prompt(embeds=embeds)

    def inputs(self, x: Tensor, sigma: Tensor, text: Text, guidance: float) -> dict[str, Any]:
        """The transformer's keyword arguments. A place is (time, row, column, place in text)."""
        rows, columns = (torch.arange(side, device=x.device) for side in x.shape[2:])
        one = torch.arange(1, device=x.device)
        words = torch.arange(text["embeds"].shape[1], device=x.device)
        return {
            "hidden_states": x.flatten(2).transpose(1, 2),
            "encoder_hidden_states": text["embeds"].to(x.dtype),
            "timestep": sigma,
            "guidance": self.embedded(sigma, guidance),
            "img_ids": torch.cartesian_prod(one, rows, columns, one),
            "txt_ids": torch.cartesian_prod(one, one, one, words),
        }

    def velocity(self, output: Tensor, x: Tensor) -> Tensor:
        return output.transpose(1, 2).reshape(x.shape).float()

    def decode(self, latents: Tensor) -> Tensor:
        """Latents, normalised by the autoencoder's batch norm -> images [B,3,H,W] in [-1,1]."""
        vae = self.pipe.vae
        mean, std = self._norm()
        latents = pixel_shuffle(latents * std + mean, 2)
        return vae.decode(latents.to(vae.dtype)).sample

    def encode_image(self, images: Tensor) -> Tensor:
        vae = self.pipe.vae
        mean, std = self._norm()
        latents = vae.encode(images.to(vae.dtype)).latent_dist.mode().float()
        return (pixel_unshuffle(latents, 2) - mean) / std

    def _norm(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [1,C,1,1] of the autoencoder's batch norm."""
        vae = self.pipe.vae
        std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        return vae.bn.running_mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)


class Flux2Klein(Flux2):
    """klein: a smaller transformer, Qwen3 as its text encoder."""

    name = "flux2_klein"
    pipeline = "Flux2KleinPipeline"

    @property
    def guidance(self) -> Literal["cfg", "none"]:
        """ "none" if the pipeline was distilled, else "cfg"."""
        return "none" if self.pipe.config.is_distilled else "cfg"
