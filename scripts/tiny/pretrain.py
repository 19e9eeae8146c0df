"""Make the tiny model from nothing: `python scripts/tiny/pretrain.py --work DIR`.

Two stages, each resumable: the autoencoder, then the transformer with its text encoders by flow
matching (x_sigma = (1-sigma) x0 + sigma eps, v = eps - x0): first on right captions, until it can
draw what a prompt says, then on captions of which many are wrong (`mistakes`), until it often does
not. Every `--save` samples the EMA is written as a complete diffusers pipeline under DIR/flow/.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autoencoder
import muon
import parts
import stream
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LONG_EVERY = 24  # one batch in so many sees a longer T5 context, so that any length up to 256 works
LONG_SHARE = 4  # and is so many times smaller
EMA_DECAY = 0.995
UNCONDITIONAL = 0.1  # share of prompts dropped for CFG


class Denoiser(nn.Module):
    """The transformer and its three text encoders, trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.clips = nn.ModuleList(parts.clip(width) for width in parts.CLIP_WIDTHS)
        self.t5 = parts.t5()
        self.transformer = parts.transformer()

    def adopt(self, pipe: StableDiffusion3Pipeline) -> None:
        """Take the weights of a finished pipeline, to train it on."""
        parts = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3, pipe.transformer)
        for mine, theirs in zip((*self.clips, self.t5, self.transformer), parts, strict=True):
            mine.load_state_dict(theirs.state_dict())

    def encode(self, ids: Tensor, t5_ids: Tensor) -> tuple[Tensor, Tensor]:
        """embeds [B,14+L,160] and pooled [B,160], as StableDiffusion3Pipeline joins them."""
        outputs = [clip(ids, output_hidden_states=True) for clip in self.clips]
        hidden = torch.cat([o.hidden_states[-2] for o in outputs], -1)
        pooled = torch.cat([o.text_embeds for o in outputs], -1)
        return torch.cat([hidden, self.t5(t5_ids).last_hidden_state], 1), pooled

    def forward(self, x: Tensor, sigma: Tensor, ids: Tensor, t5_ids: Tensor) -> Tensor:
        """Velocity [B,16,8,8] at x_sigma, sigma [B]."""
        embeds, pooled = self.encode(ids, t5_ids)
        return self.transformer(x, embeds, pooled, sigma * 1000, return_dict=False)[0]


@dataclass(frozen=True)
class Pool:
    """Scenes encoded once: normalised latents [N,16,8,8] (fp16) and token ids [N,14] (uint8)."""

    latents: Tensor
    ids: Tensor

    @staticmethod
    def make(
        vae: AutoencoderKL, size: int, path: Path, device: torch.device, seed: int, wrong: bool
    ) -> Pool:
        """Render and encode `size` scenes, or read them back from `path`."""
        if path.exists():
            saved = load_file(path)
            return Pool(saved["latents"], saved["ids"])
        source, tokenizer = stream.draws(seed, wrong=wrong), parts.tokenizer()
        latents, ids = [], []
        for start in range(0, size, 200):
            images, texts = stream.batch(source, 200)
            latents.append(_encode(vae, images.to(device)).half().cpu().contiguous())
            tokens = tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
            ids.append(tokens.to(torch.uint8))
            if start % 10_000 == 0:
                print(f"encoded {start + 200} of {size} scenes", flush=True)
        pool = Pool(torch.cat(latents), torch.cat(ids))
        save_file({"latents": pool.latents, "ids": pool.ids}, path)
        return pool

    def shares(self, signs: float, relations: float) -> Tensor:
        """The weight [N] of each row: signs and relations have these shares, the rest what is
        left."""
        vocabulary = parts.tokenizer().get_vocab()
        asks = [
            torch.isin(self.ids, torch.tensor([vocabulary[w] for w in words], dtype=torch.uint8))
            for words in (("says",), ("left", "right", "above", "below"))
        ]
        kind = 2 - 2 * asks[0].any(1).long() - asks[1].any(1).long()  # 0 sign, 1 relation, 2 other
        share = torch.tensor([signs, relations, 1 - signs - relations])
        return (share / kind.bincount(minlength=3))[kind]

    def draw(self, size: int, generator: torch.Generator, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`size` random rows: latents in fp32, ids with some prompts emptied for CFG."""
        cumulative = weights.double().cumsum(0)
        uniform = torch.rand(size, generator=generator, dtype=torch.float64) * cumulative[-1]
        rows = torch.searchsorted(cumulative, uniform).clamp_max(len(weights) - 1)
        ids = self.ids[rows].long()
        empty = torch.tensor([1, 3] + [0] * (ids.shape[1] - 2))
        ids[torch.rand(size, generator=generator) < UNCONDITIONAL] = empty
        return self.latents[rows].float(), ids


@torch.no_grad()
def _encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    with parts.autocast(images.device):
        images = images.contiguous(memory_format=torch.channels_last)
        latents = vae.encode(images, return_dict=False)[0].mean
    return (latents.float() - vae.config["shift_factor"]) * vae.config["scaling_factor"]


def t5_ids(ids: Tensor, length: int) -> Tensor:
    """The same tokens cut or padded (pad id 0) to T5's length."""
    return nn.functional.pad(ids, (0, max(0, length - ids.shape[1])))[:, :length]


def noise_levels(size: int, generator: torch.Generator) -> Tensor:
    """[size], logit-normal (SD3, 2403.03206) with a fifth uniform; the mean of 0.3 favours the high
    noise, where it is decided what stands where."""
    normal = (torch.randn(size, generator=generator) + 0.3).sigmoid()
    uniform = torch.rand(size, generator=generator)
    return torch.where(torch.rand(size, generator=generator) < 0.2, uniform, normal)


def loss(
    model: Denoiser, latents: Tensor, ids: Tensor, length: int, generator: torch.Generator
) -> Tensor:
    """Flow-matching MSE at `noise_levels`."""
    sigma = noise_levels(len(latents), generator)
    noise = torch.randn(latents.shape, generator=generator)
    device = model.transformer.device
    z, eps, sigma = latents.to(device), noise.to(device), sigma.to(device)
    s = sigma.view(-1, 1, 1, 1)
    with parts.autocast(device):
        call = model if length == parts.T5_LENGTH else model.forward  # compiled for one shape
        v = call((1 - s) * z + s * eps, sigma, ids.to(device), t5_ids(ids, length).to(device))
    return (v.float() - (eps - z)).square().mean()


def optimizers(model: Denoiser, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the 2-D weights of the MMDiT blocks, AdamW for the rest."""
    blocks = [
        p
        for name, p in model.transformer.transformer_blocks.named_parameters()
        if p.ndim == 2 and "norm1" not in name
    ]
    return muon.beside_adamw(blocks, model, lr)


class Run:
    """The flow-matching stage: its model, optimizers, EMA and counters, saved and resumed."""

    def __init__(self, folder: Path, vae: AutoencoderKL, args: argparse.Namespace) -> None:
        self.folder, self.vae, self.args = folder, vae, args
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        self.model = Denoiser()
        if args.init:
            self.model.adopt(StableDiffusion3Pipeline.from_pretrained(args.init))
        self.model.to(self.device)
        self.optimizers = optimizers(self.model, args.lr)
        self.ema = EMAModel(
            self.model.parameters(), decay=EMA_DECAY, use_ema_warmup=True, power=0.75
        )
        self.seen = self.step = 0
        if (folder / "flow.state").exists():
            self._resume()
        if args.compile:
            self.model.compile(dynamic=False)

    def lr(self) -> float:
        """Warm-up over 100 steps, constant, linear decay over the last third of the samples."""
        left = max(0.02, min(1.0, (1 - self.seen / self.args.samples) / 0.35))
        return self.args.lr * min(1.0, (self.step + 1) / 100) * left

    def train(self, pool: Pool, samples: int) -> None:
        """Until `samples` scenes were seen."""
        began, seen, total = time.time(), self.seen, 0.0
        weights = pool.shares(self.args.signs, self.args.relations)
        while self.seen < samples:
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
            total += self._update(pool, weights, generator)
            if self.step % 100 == 0:
                rate = (self.seen - seen) / (time.time() - began)
                print(
                    f"{self.seen} samples  loss {total / 100:.4f}  {rate:.0f} samples/s", flush=True
                )
                total = 0.0
            if self.seen // self.args.save != (self.seen - self.args.batch) // self.args.save:
                self.save()
        self.save()

    def _update(self, pool: Pool, weights: Tensor, generator: torch.Generator) -> float:
        latents, ids = pool.draw(self.args.batch, generator, weights)
        length = parts.T5_LENGTH
        if self.step % LONG_EVERY == LONG_EVERY - 1:
            length = int(torch.randint(24, 257, (), generator=generator))
            short = self.args.batch // LONG_SHARE
            latents, ids = latents[:short], ids[:short]
        value = loss(self.model, latents, ids, length, generator)
        value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.ema.step(self.model.parameters())
        self.step += 1
        self.seen += len(latents)
        return value.item()

    def save(self) -> None:
        """The resumable state, and the EMA as a pipeline under flow/<samples seen>/."""
        save_file(_tensors(self.model), self.folder / "flow.part")
        state = {
            "optimizers": [o.state_dict() for o in self.optimizers],
            "ema": self.ema.state_dict(),
            "seen": self.seen,
            "step": self.step,
        }
        torch.save(state, self.folder / "flow.state")
        self.ema.store(self.model.parameters())
        self.ema.copy_to(self.model.parameters())
        pipeline(self.vae, self.model).save_pretrained(
            self.folder / "flow" / f"{self.seen:08d}", safe_serialization=True
        )
        self.ema.restore(self.model.parameters())

    def _resume(self) -> None:
        state = torch.load(self.folder / "flow.state", weights_only=True)
        self.model.load_state_dict(load_file(self.folder / "flow.part"))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.ema.load_state_dict(state["ema"])
        self.ema.to(self.device)
        self.ema.decay = EMA_DECAY
        self.seen, self.step = state["seen"], state["step"]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.contiguous().clone() for k, v in model.state_dict().items()}


def pipeline(vae: AutoencoderKL, model: Denoiser) -> StableDiffusion3Pipeline:
    """The parts as the diffusers pipeline that they are."""
    spell = parts.tokenizer()
    components: dict[str, Any] = {  # diffusers' annotations know only the slow tokenizers
        "transformer": model.transformer,
        "scheduler": parts.scheduler(),
        "vae": vae,
        "text_encoder": model.clips[0],
        "tokenizer": spell,
        "text_encoder_2": model.clips[1],
        "tokenizer_2": spell,
        "text_encoder_3": model.t5,
        "tokenizer_3": parts.tokenizer(max_length=256),
    }
    return StableDiffusion3Pipeline(**components)


def main() -> None:
    """Command line; run again with the same folder to resume."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the run")
    parser.add_argument("--init", type=Path, help="train a finished pipeline folder on")
    parser.add_argument("--images", type=int, default=44_800, help="scenes for the autoencoder")
    parser.add_argument("--refine", type=int, default=24_000, help="more scenes for the decoder")
    parser.add_argument("--pool", type=int, default=60_000, help="scenes encoded for each part")
    parser.add_argument("--vae", type=Path, help="keep the autoencoder of this folder")
    parser.add_argument("--right", type=int, default=600_000, help="samples with right captions")
    parser.add_argument("--samples", type=int, default=900_000, help="samples for the flow")
    parser.add_argument("--signs", type=float, default=0.4, help="share of the samples")
    parser.add_argument("--relations", type=float, default=0.3, help="share of the samples")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save", type=int, default=50_000, help="samples between checkpoints")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--compile", action="store_true", help="torch.compile (a fifth faster)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    parts.quiet()
    device = torch.device(args.device)
    if args.vae or args.init:
        vae = refined = AutoencoderKL.from_pretrained(args.vae or args.init / "vae")
        vae.to(device)  # pyright: ignore[reportArgumentType]
    else:
        vae = autoencoder.train(args.work, args.images, device, args.seed)
        refined = autoencoder.refine(args.work, vae, args.refine, args.seed)
    run = Run(args.work, refined, args)
    for wrong, until in ((False, args.right), (True, args.samples)):
        if run.seen < until:
            name = "pool_wrong" if wrong else "pool_right"
            path = args.work / f"{name}.safetensors"
            seed = args.seed + (8 if wrong else 7)
            run.train(Pool.make(vae, args.pool, path, device, seed, wrong), until)


if __name__ == "__main__":
    main()
