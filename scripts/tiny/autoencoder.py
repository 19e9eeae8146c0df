"""Pretraining, first stage: the f8 autoencoder of the tiny world."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import parts
import stream
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor

BATCH = 32
LR = 1.5e-3


def loss(vae: AutoencoderKL, images: Tensor, generator: torch.Generator) -> Tensor:
    """The reconstruction loss of a posterior sample, plus 5e-4 KL."""
    posterior = vae.encode(images, return_dict=False)[0]
    noise = torch.randn(posterior.mean.shape, generator=generator).to(images.device)
    latents = posterior.mean + posterior.std * noise
    output = vae.decode(latents, return_dict=False)[0].float()  # pyright: ignore[reportArgumentType]
    kl = posterior.kl().float().mean() / posterior.mean[0].numel()
    return reconstruction(output, images) + 5e-4 * kl


def reconstruction(output: Tensor, images: Tensor) -> Tensor:
    """L1 + MSE + L1 of the image gradients, which carry shapes and letters."""
    error = output - images
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return error.abs().mean() + error.square().mean() + edges


def refine(folder: Path, vae: AutoencoderKL, images: int, seed: int = 0) -> AutoencoderKL:
    """Train the decoder alone on `images` more scenes: sharper letters, the same latents, so that
    it can run beside the flow stage. Writes folder/vae_refined, or reads it back."""
    done = folder / "vae_refined"
    if done.exists():
        return AutoencoderKL.from_pretrained(done).to(vae.device)  # pyright: ignore[reportArgumentType]
    vae = copy.deepcopy(vae)
    vae.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    parameters = list(vae.decoder.parameters())
    optimizer = torch.optim.AdamW(parameters, LR, betas=(0.9, 0.99), weight_decay=1e-4)
    source, steps = stream.draws(seed + 77, sign_share=0.6), images // BATCH
    generator = torch.Generator(vae.device).manual_seed(seed)
    for step in range(steps):
        batch = stream.batch(source, BATCH)[0].to(vae.device, memory_format=torch.channels_last)
        with parts.autocast(vae.device):
            with torch.no_grad():
                latents = vae.encode(batch, return_dict=False)[0].sample(generator)
            output = vae.decode(latents, return_dict=False)[0].float()  # pyright: ignore[reportArgumentType]
        value = reconstruction(output, batch)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 50) * max(0.01, 1 - step / steps)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"decoder {(step + 1) * BATCH} images  loss {value:.4f}", flush=True)
    vae.eval().save_pretrained(done)
    return vae


@torch.no_grad()
def set_scale(vae: AutoencoderKL, images: Tensor) -> None:
    """Write the shift and the scale that give latents of these images mean 0 and deviation 1."""
    latents = vae.encode(images, return_dict=False)[0].mean
    vae.register_to_config(
        shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std())
    )


def train(folder: Path, images: int, device: torch.device, seed: int = 0) -> AutoencoderKL:
    """Train on `images` scenes, or load the result; resumes from `folder`/vae.*."""
    done = folder / "vae"
    if done.exists():
        return AutoencoderKL.from_pretrained(done).to(device)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(seed)
    vae = parts.vae()
    vae.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(vae.parameters(), LR, betas=(0.9, 0.99), weight_decay=1e-4)
    steps = images // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 100) * max(0.01, (1 - i / steps) ** 1.0)
    )
    start = _resume(folder, vae, optimizer, schedule)
    source = stream.draws(seed + 1000 * start)
    generator = torch.Generator().manual_seed(seed + start)
    began = time.time()
    for step in range(start, steps):
        batch, _ = stream.batch(source, BATCH)
        batch = batch.to(device, memory_format=torch.channels_last)
        with parts.autocast(device):
            value = loss(vae, batch, generator)
        value.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            rate = (step + 1 - start) * BATCH / (time.time() - began)
            print(
                f"vae {(step + 1) * BATCH} images  loss {value:.4f}  {rate:.0f} images/s",
                flush=True,
            )
        if step % 250 == 249:
            _save(folder, vae, optimizer, schedule, step + 1)
    vae.eval()
    set_scale(vae, stream.batch(stream.draws(seed + 1), 1024)[0].to(device))
    vae.save_pretrained(done)
    return vae


def _save(folder: Path, vae: AutoencoderKL, optimizer, schedule, step: int) -> None:
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, folder / "vae.part")
    state = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "step": step}
    torch.save(state, folder / "vae.state")


def _resume(folder: Path, vae: AutoencoderKL, optimizer, schedule) -> int:
    if not (folder / "vae.state").exists():
        return 0
    state = torch.load(folder / "vae.state", weights_only=True)
    vae.load_state_dict(load_file(folder / "vae.part"))
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return state["step"]
