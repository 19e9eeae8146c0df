"""The parts of the tiny pipeline before any training: tokenizer, three text encoders, VAE, SD3.

Genuine diffusers and transformers classes, so that stock `from_pretrained` loads the result.
"""

from __future__ import annotations

import logging

import prompts
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from flowalign.backbone.tiny import T5_LENGTH as T5_LENGTH
from flowalign.backbone.tiny.drawings import CLASSES, COLORS
from flowalign.backbone.tiny.scenes import RELATIONS, SIZE

MAX_LENGTH = 14  # CLIP tokens: the longest prompt has 12 words
CLIP_WIDTHS = (64, 96)
WIDTH, BLOCKS, HEADS = 160, 6, 4
SIDE = SIZE // 8  # of the latents
LATENT_CHANNELS = 16
AT_ONCE = 64  # images of a batch that is sampled
SPECIAL = ["<pad>", "<bos>", "<unk>", "<eos>"]  # eos must not be 2: CLIP's legacy pooling path


def vocabulary() -> list[str]:
    """Special tokens, every capital letter, and every word of the prompts."""
    wordings = " ".join(prompts.WORDINGS.values())
    words = {word for word in wordings.split() if word.islower()}
    words.update("a an sign that says flat noto line drawing of and".split())
    for name in CLASSES:
        words.update((name, prompts.words(name, None, 2).split()[-1]))
    for relation in RELATIONS:
        words.update(relation.split())
    return [*SPECIAL, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *sorted(words | {*COLORS, *prompts.NUMBERS})]


def tokenizer(max_length: int = MAX_LENGTH) -> PreTrainedTokenizerFast:
    """Lower-case words are one token each; capitals are spelled by letter; quotes are dropped."""
    vocab = {token: i for i, token in enumerate(vocabulary())}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"[A-Z]|[a-z]+"), behavior="removed", invert=True
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[("<bos>", vocab["<bos>"]), ("<eos>", vocab["<eos>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        pad_token="<pad>",
        bos_token="<bos>",
        unk_token="<unk>",
        eos_token="<eos>",
    )


def clip(width: int) -> CLIPTextModelWithProjection:
    """A two-layer CLIP text encoder of the given width."""
    config = CLIPTextConfig(
        vocab_size=len(vocabulary()),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=width // 32,
        max_position_embeddings=MAX_LENGTH,
        hidden_act="gelu",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )
    return CLIPTextModelWithProjection(config)


def t5() -> T5EncoderModel:
    """A one-layer T5 encoder, as wide as both CLIPs together (what SD3's concatenation needs)."""
    width = sum(CLIP_WIDTHS)
    config = T5Config(
        vocab_size=len(vocabulary()),
        d_model=width,
        d_kv=16,
        d_ff=width,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
    )
    return T5EncoderModel(config)


def vae() -> AutoencoderKL:
    """f8 with 16 channels, as SD3's: 96x96 pixels become 16x12x12 latents."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,  # pyright: ignore[reportArgumentType]
        up_block_types=("UpDecoderBlock2D",) * 4,  # pyright: ignore[reportArgumentType]
        block_out_channels=(16, 32, 64, 96),  # pyright: ignore[reportArgumentType]
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=LATENT_CHANNELS,
        sample_size=SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=True,
    )


def transformer() -> SD3Transformer2DModel:
    """Six MMDiT blocks with SD3.5's qk_norm; 36 image tokens of 2x2 latents."""
    width = sum(CLIP_WIDTHS)
    return SD3Transformer2DModel(
        sample_size=SIDE,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=BLOCKS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        caption_projection_dim=WIDTH,
        joint_attention_dim=width,
        pooled_projection_dim=width,
        pos_embed_max_size=SIDE,
        qk_norm="rms_norm",
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Shift 1 (64 px needs none), last sigma 0.1: no step of a short schedule is lost."""
    return FlowMatchEulerDiscreteScheduler(shift=1.0, shift_terminal=0.1)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 where the device multiplies it faster than float32; a CPU without it is slower."""
    fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def quiet() -> None:
    """Keep the libraries' notes about untrained parts out of the training log."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)


def sample(pipe: StableDiffusion3Pipeline, texts: list[str], guidance: float, seed: int) -> Tensor:
    """One image [len(texts),3,H,W] in [0,1] for each text, by ten Euler steps."""
    generator = torch.Generator().manual_seed(seed)
    images = []
    for start in range(0, len(texts), AT_ONCE):
        part = texts[start : start + AT_ONCE]
        (drawn,) = pipe(
            part, num_inference_steps=10, guidance_scale=guidance, generator=generator,
            max_sequence_length=T5_LENGTH, output_type="pt", return_dict=False,
        )  # fmt: skip
        images.append(drawn)
    return torch.cat(images)
