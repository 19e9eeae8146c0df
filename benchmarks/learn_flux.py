r"""Does another family learn? A FLUX as small as the tiny Stable Diffusion 3, from random weights.

    python benchmarks/learn_flux.py --minutes 15 --out outputs/learn_flux
    flowalign train --config configs/tiny/teacher_preference_nft.yaml \
        model.id=outputs/learn_flux/model lora.init=null

The first command builds a FluxPipeline of the tiny model's text encoders and autoencoder with a new
transformer, and trains that by flow matching on rendered scenes, through the library's own forward
pass (`Backbone.velocity`). It writes the moving average of the weights as a pipeline, and prints
the held-out loss. The second trains a teacher on it, as on any model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from flowalign.backbone import Backbone, load_pipeline
from flowalign.backbone.tiny import MODEL
from flowalign.config import ModelConfig

sys.path.append(str(Path(__file__).parent.parent / "scripts" / "tiny"))
import parts
import stream
from pretrain import UNCONDITIONAL, muon, noise_levels

SCENES, HELD_OUT, BATCH = 24_000, 512, 64


def untrained(seed: int) -> Any:
    """A FluxPipeline on the tiny model's parts; the transformer's weights are random."""
    tiny = load_pipeline("tiny")
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        in_channels=4 * parts.LATENT_CHANNELS,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=48,
        num_attention_heads=3,
        joint_attention_dim=tiny.text_encoder_3.config.d_model,
        pooled_projection_dim=tiny.text_encoder.config.hidden_size,
        axes_dims_rope=(16, 16, 16),
    )
    return FluxPipeline(
        transformer=transformer,
        scheduler=tiny.scheduler,
        vae=tiny.vae,
        # without the projection that Stable Diffusion 3 adds
        text_encoder=CLIPTextModel.from_pretrained(MODEL / "text_encoder"),
        tokenizer=tiny.tokenizer,
        text_encoder_2=tiny.text_encoder_3,
        tokenizer_2=tiny.tokenizer_3,
    )


@torch.no_grad()
def encoded(backbone: Backbone, count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Latents [N,C,h,w] of so many scenes, and their prompts."""
    source, vae, latents, texts = stream.draws(seed), backbone.pipe.vae, [], []
    for _ in range(0, count, 256):
        images, prompts = stream.batch(source, 256)
        found = vae.encode(images).latent_dist.mean
        latents.append((found - vae.config.shift_factor) * vae.config.scaling_factor)
        texts += prompts
    return torch.cat(latents)[:count], texts[:count]


def loss(backbone: Backbone, x0: Tensor, texts: list[str], generator: torch.Generator) -> Tensor:
    """|v - (eps - x0)|^2 at the noise levels of scripts/tiny/pretrain.py."""
    sigma = noise_levels(len(x0), generator)
    noise, s = torch.randn(x0.shape, generator=generator), sigma.view(-1, 1, 1, 1)
    velocity = backbone.velocity(
        (1 - s) * x0 + s * noise, sigma, backbone.encode(texts), guidance=1.0
    )
    return (velocity - (noise - x0)).square().mean()


def optimizers(transformer: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest, as scripts/tiny/pretrain.py."""
    inside = [p for name, p in transformer.named_parameters() if "blocks" in name and p.ndim == 2]
    return muon(inside, transformer, lr)


def batches(
    latents: Tensor, texts: list[str], generator: torch.Generator
) -> Iterator[tuple[Tensor, list[str]]]:
    """Random rows for ever; some prompts are emptied, for guidance."""
    while True:
        rows = torch.randint(len(latents), (BATCH,), generator=generator)
        kept = torch.rand(BATCH, generator=generator) >= UNCONDITIONAL
        yield latents[rows], [texts[i] if keep else "" for i, keep in zip(rows, kept, strict=True)]


def main() -> None:
    """Train for so many minutes, and write the pipeline."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/learn_flux"))
    args = parser.parse_args()
    parts.quiet()
    pipe = untrained(args.seed)
    model = ModelConfig(id="flux", height=64, width=64, max_sequence_length=parts.T5_LENGTH)
    backbone = Backbone(pipe, model)
    transformer = backbone.core.requires_grad_(True).train()
    generator = torch.Generator().manual_seed(args.seed)
    latents, texts = encoded(backbone, SCENES, seed=args.seed + 1)
    unseen, unseen_texts = encoded(backbone, HELD_OUT, seed=args.seed + 2)
    steps, source = optimizers(transformer, args.lr), batches(latents, texts, generator)
    average = torch.optim.swa_utils.AveragedModel(
        transformer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998)
    )
    began, update, share = time.monotonic(), 0, 0.0
    while share < 1:
        share = min(1.0, (time.monotonic() - began) / (60 * args.minutes))
        for optimizer in steps:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (update + 1) / 100) * (1 - 0.9 * share)
        error = loss(backbone, *next(source), generator)
        error.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average.update_parameters(transformer)
        update += 1
        if update % 500 == 0 or share == 1:
            with torch.no_grad():
                fixed = torch.Generator().manual_seed(0)
                held_out = float(loss(backbone, unseen, unseen_texts, fixed))
            print(
                f"{update} updates, {update * BATCH} samples: held-out loss {held_out:.4f}",
                flush=True,
            )
    transformer.load_state_dict(average.module.state_dict())
    pipe.save_pretrained(args.out / "model")
    print(args.out / "model")


if __name__ == "__main__":
    main()
