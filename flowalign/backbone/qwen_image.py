"""Qwen-Image."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from flowalign.backbone.family import JOINT_ATTENTION, PackedFamily, Text, without_padding


class QwenImage(PackedFamily):
    """Prompts have the length that they need, and a mask. Classifier-free guidance keeps the norm
    of the conditional velocity in each token. The autoencoder has a time axis."""

    name = "qwen_image"
    pipeline = "QwenImagePipeline"
    targets = JOINT_ATTENTION
    scale = "true_cfg_scale"
    negative = " "  # of the model's card
    longest = 1024

    @property
    def unused(self) -> list[str]:
        """The layers of the last block whose output for the text is thrown away."""
        last = f"transformer_blocks.{self.core.config.num_layers - 1}.attn"
        return [f"{last}.add_q_proj", f"{last}.to_add_out"]

    def encoder_tokens(self, length: int) -> list[int]:
        """Tokens of a prompt and its template; the template's are dropped after encoding."""
        return [length + self.pipe.prompt_template_encode_start_idx]

    def text_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        return {"embeds": (length, self.core.config.joint_attention_dim), "mask": (length,)}

    def encode(self, prompts: list[str], length: int, device: Any) -> list[Text]:
        """embeds [L,D] and mask [L] of each prompt, L its own number of tokens."""
        embeds, mask = self.pipe.encode_prompt(prompts, device=device, max_sequence_length=length)
        if mask is None:  # all are of the same length
            mask = embeds.new_ones(embeds.shape[:2])
        pairs = zip(embeds, mask, strict=True)
        return without_padding([embed[keep.bool()] for embed, keep in pairs])

    def inputs(self, x: Tensor, sigma: Tensor, text: Text, guidance: float) -> dict[str, Any]:
        b, _, h, w = x.shape
        return {
            "hidden_states": self.packed(x),
            "encoder_hidden_states": text["embeds"].to(x.dtype),
            "encoder_hidden_states_mask": text["mask"].bool(),
            "timestep": sigma,
            "img_shapes": [[(1, h // 2, w // 2)]] * b,
        }

    def guided(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """CFG, then each token (2x2 latents) has the norm of the conditional velocity again."""
        combined = super().guided(negative, positive, scale)
        return combined * interpolate(_norm(positive) / _norm(combined), scale_factor=2)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents, normalised channel by channel -> images [B,3,H,W] in [-1,1]."""
        vae = self.pipe.vae
        mean, std = self._scales(latents)
        frames = (latents * std + mean)[:, :, None]
        return vae.decode(frames.to(vae.dtype)).sample[:, :, 0]

    def encode_image(self, images: Tensor) -> Tensor:
        vae = self.pipe.vae
        mean, std = self._scales(images)
        frames = vae.encode(images[:, :, None].to(vae.dtype)).latent_dist.mode()
        return (frames[:, :, 0].float() - mean) / std

    def _scales(self, like: Tensor) -> list[Tensor]:
        """Mean and standard deviation [1,C,1,1] of the channels."""
        config = self.pipe.vae.config
        both = config.latents_mean, config.latents_std
        return [like.new_tensor(values).view(1, -1, 1, 1) for values in both]


def _norm(velocity: Tensor) -> Tensor:
    """[B,C,h,w] -> the norm of each token [B,1,h/2,w/2]."""
    return (4 * avg_pool2d((velocity**2).sum(1, keepdim=True), 2)).sqrt()
