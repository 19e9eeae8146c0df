"""A small pipeline of each family with random weights, as diffusers itself builds and writes it."""

# diffusers' annotations are narrower than what it takes:
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import fakes
import parts
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from tokenizers import Regex, pre_tokenizers

WIDTH = 32  # of the text encoders
CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
)
DECODER: dict[str, Any] = {
    "vocab_size": len(parts.vocabulary()), "hidden_size": WIDTH, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3,
}  # fmt: skip
DYNAMIC: dict[str, Any] = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0,
}  # fmt: skip


def tokenizer(length: int) -> Any:
    """The tiny world's, to which a mark is a token, too, as to a real one; with a chat template
    that leaves a prompt as it is."""
    found = parts.tokenizer(max_length=length)
    marks = pre_tokenizers.Split(
        Regex(r"[A-Z]|[a-z]+|[^\sA-Za-z]"), behavior="removed", invert=True
    )
    found.backend_tokenizer.pre_tokenizer = marks
    found.chat_template = CHAT
    return found


def autoencoder(latent: int = 4, kind: str = "AutoencoderKL", **more: Any) -> Any:
    """Eight pixels a latent."""
    return getattr(diffusers, kind)(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=latent,
        **more,
    )


def flux(guidance_embeds: bool = True) -> Any:
    """FLUX.1-dev, or schnell."""
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=sum(parts.CLIP_WIDTHS),
            pooled_projection_dim=64, axes_dims_rope=(4, 4, 8), guidance_embeds=guidance_embeds,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**(DYNAMIC if guidance_embeds else {})),
        vae=autoencoder(shift_factor=0.1, scaling_factor=0.4),
        text_encoder=transformers.CLIPTextModel(parts.clip(64).config),
        tokenizer=parts.tokenizer(),
        text_encoder_2=parts.t5(),
        tokenizer_2=parts.tokenizer(max_length=256),
    )  # fmt: skip


def schnell() -> Any:
    """FLUX.1-schnell: no guidance, a fixed shift."""
    return flux(guidance_embeds=False)


def pixtral() -> Any:
    """The processor of FLUX.2-dev; None where torchvision is not installed, which it needs."""
    if not transformers.utils.is_torchvision_available():
        return None
    inner = tokenizer(512)
    inner.add_special_tokens({"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]})
    images = transformers.PixtralImageProcessor()
    return transformers.PixtralProcessor(images, inner, chat_template=CHAT)


def _flux2(
    kind: str, encoder: Any, guidance_embeds: bool, processor: Any = None, **options: Any
) -> Any:
    vae = autoencoder(kind="AutoencoderKLFlux2")
    torch.nn.init.normal_(vae.bn.running_mean, std=0.1)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return getattr(diffusers, kind)(
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=3 * WIDTH, timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance_embeds,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**DYNAMIC),
        vae=vae,
        text_encoder=encoder,
        tokenizer=processor or tokenizer(512),
        **options,
    )  # fmt: skip


def flux2() -> Any:
    """FLUX.2-dev. Its pipeline takes three layers of an encoder with more than 30."""
    text = transformers.MistralConfig(**{**DECODER, "num_hidden_layers": 31})
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16,
              "intermediate_size": 16, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Mistral3Config(
        text_config=text, vision_config=transformers.PixtralVisionConfig(**vision)
    )
    encoder = transformers.Mistral3ForConditionalGeneration(config)
    return _flux2("Flux2Pipeline", encoder, True, pixtral())


def klein(is_distilled: bool = False) -> Any:
    """FLUX.2-klein-base, or the distilled one. Its pipeline takes layers up to 27."""
    config = transformers.Qwen3Config(**{**DECODER, "num_hidden_layers": 28})
    encoder = transformers.Qwen3ForCausalLM(config)
    return _flux2("Flux2KleinPipeline", encoder, False, is_distilled=is_distilled)


def klein_distilled() -> Any:
    """FLUX.2-klein."""
    return klein(is_distilled=True)


def qwen_image() -> Any:
    """Qwen-Image."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {**DECODER, "rope_parameters": rope, "rope_scaling": rope}  # names in 5.x and in 4.x
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1,
              "out_hidden_size": WIDTH, "fullatt_block_indexes": [0]}  # fmt: skip
    del text["head_dim"]
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return diffusers.QwenImagePipeline(
        transformer=diffusers.QwenImageTransformer2DModel(
            in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**DYNAMIC, shift_terminal=0.02),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.7, 2.0, 1.0],
        ),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer(512),
    )  # fmt: skip


def z_image() -> Any:
    """Z-Image."""
    config = transformers.Qwen3Config(**DECODER)
    return diffusers.ZImagePipeline(
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
            cap_feat_dim=WIDTH, axes_dims=[4, 4, 8], axes_lens=[512, 64, 64],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(shift_factor=0.1, scaling_factor=0.4),
        text_encoder=transformers.Qwen3Model(config),
        tokenizer=tokenizer(512),
    )  # fmt: skip


def sana() -> Any:
    """SANA, with a scheduler that takes Euler steps."""
    config = transformers.Gemma2Config(**DECODER, query_pre_attn_scalar=16)
    return diffusers.SanaPipeline(
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
            num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=16,
            cross_attention_dim=WIDTH, caption_channels=WIDTH, sample_size=2,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=diffusers.AutoencoderDC(
            latent_channels=4, attention_head_dim=4,
            encoder_block_out_channels=(4, 4, 4, 4, 8, 8),
            decoder_block_out_channels=(4, 4, 4, 4, 8, 8),
            encoder_layers_per_block=(1,) * 6, decoder_layers_per_block=(1,) * 6,
            encoder_qkv_multiscales=((),) * 6, decoder_qkv_multiscales=((),) * 6,
            scaling_factor=0.4,
        ),
        text_encoder=transformers.Gemma2Model(config),
        tokenizer=tokenizer(512),
    )  # fmt: skip


PIPELINES: dict[str, Callable[[], Any]] = {
    "sd3": fakes.pipeline, "flux": flux, "schnell": schnell, "flux2": flux2, "klein": klein,
    "klein_distilled": klein_distilled, "qwen_image": qwen_image, "z_image": z_image, "sana": sana,
}  # fmt: skip


def pipeline(name: str) -> Any:
    """One of them; every weight has a value that matters."""
    torch.manual_seed(0)
    pipe = PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    for part in (pipe.transformer, pipe.vae):
        part.eval()
        for parameter in part.parameters():  # some begin at 0, and would hide a mistake
            if float(parameter.detach().abs().max()) == 0:
                torch.nn.init.normal_(parameter, std=0.05)
    return pipe
