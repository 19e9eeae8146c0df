"""Make the tiny model from nothing, on one device: the autoencoder, then the flow.

    python pretrain.py vae OUT --seconds 170
    python pretrain.py flow OUT --vae OUT/vae.safetensors --seconds 380 --wrong 130

Scenes are painted and encoded on the device; worker processes only draw captions and layouts. Each
stage runs for so many seconds, its learning rate falls with the time that is left, and it writes a
few small files into one folder. The flow (x_sigma = (1-sigma) x0 + sigma eps, v = eps - x0) sees
right captions first, until it can draw what a prompt says, and then captions of which many are
wrong (`mistakes`), until it often does not. `--init FILE` trains earlier weights on.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import parts
import prompts
import styles
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from mistakes import BLURRED, FADED, RIGHT, SPOTTED, TAG_SHARES, WRONG, Rates, captioned
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from flowalign.backbone.tiny import scenes

LONG_EVERY, LONG_SHARE = 24, 8  # one batch in so many has a longer T5 context, and is so much less
EMA_DECAY = 0.999
EMPTY = 0.1  # prompts dropped for CFG
RING = 2**19  # latents that are kept on the device
SCALE = ".scale_of_rows"  # of a packed matrix
STYLED = 0.25  # share of the decoder's scenes
FRESH = 16  # of so many scenes that are trained on, one is new


@dataclass(frozen=True)
class Scenes:
    """Captions and what is drawn for them: layers int16 [N,L,3], grounds uint8 [N,3], effects
    uint8 [N] (what spoils each, `mistakes`), ids uint8 [N,T]."""

    layers: Tensor
    grounds: Tensor
    effects: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> Scenes:
        """The same on a device."""
        return Scenes(*(part.to(device, non_blocking=True) for part in vars(self).values()))

    def pin_memory(self) -> Scenes:
        """The same in page-locked memory; DataLoader calls it."""
        return Scenes(*(part.pin_memory() for part in vars(self).values()))


class Captions(IterableDataset):
    """Endless batches of `size` scenes; the seed fixes the stream, and each worker has its own."""

    def __init__(self, seed: int, size: int, rates: Rates, signs: float) -> None:
        self.seed = seed
        self.size = size
        self.rates = rates
        self.signs = signs

    def __iter__(self) -> Iterator[Scenes]:
        worker = torch.utils.data.get_worker_info()
        if worker:
            torch.set_num_threads(1)
        rng = np.random.default_rng(self.seed * 1000 + (worker.id if worker else 0))
        pools = {tag: prompts.splits(tag)["train"] for tag in TAG_SHARES}
        spell = speller()
        empty = spell("")
        while True:
            layers = np.empty((self.size, scenes.LAYERS, 3), np.int16)
            grounds = np.empty((self.size, 3), np.uint8)
            effects = np.empty(self.size, np.uint8)
            ids = np.empty((self.size, len(empty)), np.uint8)
            for i in range(self.size):
                text, scene, effects[i] = captioned(self.rates, rng, pools, self.signs)
                layers[i] = scenes.compose(scene, rng)
                grounds[i] = scenes.ground(rng)
                ids[i] = empty if rng.random() < EMPTY else spell(text)
            yield Scenes(*map(torch.from_numpy, (layers, grounds, effects, ids)))


def speller():
    """Prompt -> token ids, with a memory."""
    tokenizer = parts.tokenizer()

    @lru_cache(200_000)
    def spell(text: str) -> list[int]:
        ids = tokenizer(text, padding="max_length").input_ids
        if len(ids) != parts.MAX_LENGTH:
            raise ValueError(f"{len(ids)} tokens in {text!r}; {parts.MAX_LENGTH} at most")
        return ids

    return spell


def loader(args, seed: int, size: int, rates: Rates, signs: float) -> Iterator[Scenes]:
    """The stream, made by `--workers` processes, on the device."""
    data = Captions(seed, size, rates, signs)
    batches = DataLoader(
        data,
        batch_size=None,
        num_workers=args.workers,
        pin_memory=args.device != "cpu",
        prefetch_factor=8 if args.workers else None,
    )
    for batch in batches:
        yield batch.to(torch.device(args.device))


class Painter:
    """Scenes -> images in [-1,1] on the device, spoilt as their effects say."""

    def __init__(self, device: torch.device) -> None:
        self.table = scenes.drawings()[0].to(device)
        self.generator = torch.Generator(device).manual_seed(1)

    def __call__(self, batch: Scenes) -> Tensor:
        """Images [B,3,96,96], channels last."""
        images = scenes.paint(self.table, batch.layers, batch.grounds)
        for effect, spoil in ((FADED, self.faded), (BLURRED, self.blurred), (SPOTTED, self.spots)):
            rows = (batch.effects == effect).nonzero()[:, 0]
            if len(rows):
                images[rows] = spoil(images[rows])
        return (images * 2 - 1).contiguous(memory_format=torch.channels_last)

    def uniform(self, rows: Tensor, low: float, high: float) -> Tensor:
        """One number an image, [B,1,1,1]."""
        size = (len(rows), 1, 1, 1)
        device = rows.device
        return torch.rand(size, generator=self.generator, device=device) * (high - low) + low

    def faded(self, images: Tensor) -> Tensor:
        """Little contrast, towards a grey."""
        grey = self.uniform(images, 0.6, 0.95)
        return images + (grey - images) * self.uniform(images, 0.5, 0.8)

    def blurred(self, images: Tensor) -> Tensor:
        """A Gaussian blur of 1 to 2 pixels, made from two fixed ones."""
        share = self.uniform(images, 0.0, 1.0)
        return blur(images, 1.0) * (1 - share) + blur(images, 2.2) * share

    def spots(self, images: Tensor) -> Tensor:
        """Mottled colours."""
        size = (len(images), 3, 12, 12)
        device = images.device
        noise = torch.randn(size, generator=self.generator, device=device)
        noise = F.interpolate(noise, scale_factor=8, mode="bicubic")
        return (images + noise * self.uniform(images, 0.1, 0.22)).clamp(0, 1)


def blur(images: Tensor, sigma: float) -> Tensor:
    """Separable Gaussian blur."""
    radius = math.ceil(3 * sigma)
    at = torch.arange(-radius, radius + 1, device=images.device)
    kernel = torch.exp(-(at**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).repeat(3, 1, 1, 1)
    images = F.pad(images, (radius,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(images, kernel, groups=3), kernel.mT, groups=3)


class Clock:
    """Seconds that are left of a stage, and the learning rate that goes with it."""

    def __init__(self, seconds: float, decay: float) -> None:
        self.began = time.time()
        self.seconds = seconds
        self.decay = decay

    def gone(self) -> float:
        """The share of the time that has gone."""
        return (time.time() - self.began) / self.seconds

    def scale(self, step: int) -> float:
        """Warm-up over 100 steps; a linear decay over the last `decay` of the time."""
        return min(1.0, (step + 1) / 100) * max(0.01, min(1.0, (1 - self.gone()) / self.decay))


# The autoencoder


def train_vae(args: argparse.Namespace) -> None:
    """The `reconstruction` of a posterior sample, plus 5e-4 KL."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    vae = parts.vae()
    if args.init:
        vae.load_state_dict(read(args.init))
    vae.to(device, memory_format=torch.channels_last)  # pyright: ignore
    encoder, decoder = vae.encoder, vae.decoder
    if args.compile:
        encoder, decoder = torch.compile(encoder), torch.compile(decoder)
    source = loader(args, args.seed, args.batch, Rates(bad=0.1, bad_picture=0.1), 0.3)
    painter = Painter(device)

    def loss() -> tuple[Tensor, Tensor]:
        images = painter(next(source))
        with parts.autocast(device):
            mean, logvar = encoder(images).float().chunk(2, 1)
            logvar = logvar.clamp(-30, 20)
            noise = torch.randn(mean.shape, device=device)
            output = decoder(mean + (0.5 * logvar).exp() * noise).float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        error = output - images
        return reconstruction(error, torch.ones_like(error[:, :1])) + 5e-4 * kl, error

    fit(args, "vae", list(vae.parameters()), loss, decay=0.7)
    set_scale(vae, painter(next(source)))
    keep(vae, painter(next(source))[:24], args.out / "vae")


def train_decoder(args: argparse.Namespace) -> None:
    """Train the decoder alone on, on the same latents, so that it can run beside the flow. What is
    drawn counts four times as much as the plain background. Some scenes are in a style of
    `styles`, which the encoder has never seen."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    vae = load_vae(args.vae, device)
    source = loader(args, args.seed + 99, args.batch, Rates(bad=0.05, bad_picture=0.05), 0.15)
    painter = Painter(device)
    filters = [style.filter for style in styles.STYLES.values() if style.filter]
    rng = np.random.default_rng(args.seed)

    def loss() -> tuple[Tensor, Tensor]:
        batch = next(source)
        images = painter(batch)
        for row in range(int(STYLED * len(images))):
            styled = filters[rng.integers(len(filters))](images[row : row + 1] / 2 + 0.5)
            images[row : row + 1] = styled * 2 - 1
        ground = (batch.grounds.float() / 127.5 - 1)[:, :, None, None]
        drawn = ((images - ground).abs().amax(1, keepdim=True) > 0.04).float()
        weight = 1 + 3 * F.max_pool2d(drawn, 5, stride=1, padding=2)
        with parts.autocast(device):
            with torch.no_grad():
                mean, logvar = vae.encoder(images).float().chunk(2, 1)
                noise = torch.randn(mean.shape, device=device)
                latents = mean + 0.5 * (0.5 * logvar).exp() * noise
            error = vae.decoder(latents).float() - images
        return reconstruction(error, weight / weight.mean()), error

    fit(args, "decoder", list(vae.decoder.parameters()), loss, decay=0.9)
    keep(vae, painter(next(source))[:24], args.out / "vae_refined")


def reconstruction(error: Tensor, weight: Tensor) -> Tensor:
    """L1 + MSE + L1 of the image gradients, which carry outlines and letters, of errors [B,3,H,W].
    weight [B,1,H,W]: of the pixels, 1 on average."""
    across, down = error.diff(dim=-1).abs(), error.diff(dim=-2).abs()
    edges = (across * weight[..., 1:]).mean() + (down * weight[..., 1:, :]).mean()
    return ((error.abs() + error.square()) * weight).mean() + edges


def fit(
    args: argparse.Namespace,
    name: str,
    weights: list[nn.Parameter],
    loss: Callable[[], tuple[Tensor, Tensor]],
    decay: float,
) -> None:
    """Lower a loss by AdamW for --seconds. loss: its value and the pixels' errors, of a new
    batch. decay: the share of the time in which the learning rate falls."""
    optimizer = torch.optim.AdamW(
        weights, args.lr, betas=(0.9, 0.99), weight_decay=1e-4, fused=True
    )
    clock = Clock(args.seconds, decay)
    step = 0
    began = time.time()
    while clock.gone() < 1:
        value, error = loss()
        value.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = args.lr * clock.scale(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % args.log == 0:
            psnr = -10 * math.log10(error.square().mean().item() / 4)
            rate = step * args.batch / (time.time() - began)
            text = f"{name} {step} steps  loss {value:.4f}  {psnr:.2f} dB  {rate:.0f} images/s"
            print(text, flush=True)


@torch.no_grad()
def set_scale(vae: AutoencoderKL, images: Tensor) -> None:
    """Write the shift and the scale that give latents of these images mean 0 and deviation 1."""
    latents = vae.encode(images, return_dict=False)[0].mean
    vae.register_to_config(
        shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std())
    )


@torch.no_grad()
def keep(vae: AutoencoderKL, images: Tensor, path: Path) -> None:
    """Write an autoencoder, with its scale, and a sheet of images above what it makes of them."""
    numbers = {"shift": vae.config["shift_factor"], "scale": vae.config["scaling_factor"]}
    write(vae, path.with_suffix(".safetensors"), **numbers)
    latents = vae.encode(images, return_dict=False)[0].mean
    output = decoded(vae, latents)
    sheet = torch.cat([images, output]) / 2 + 0.5
    save_grid(sheet, min(12, len(images)), path.with_suffix(".png"))


def decoded(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Images [B,3,96,96] in [-1,1] of latents [B,16,12,12] without the scale."""
    return vae.decode(latents, return_dict=False)[0]  # pyright: ignore[reportArgumentType]


def load_vae(path: Path, device: torch.device | str = "cpu") -> AutoencoderKL:
    """The autoencoder of a file of `train_vae`."""
    vae = parts.vae()
    tensors = read(path)
    shift, scale = float(tensors.pop("shift")), float(tensors.pop("scale"))
    vae.load_state_dict(tensors)
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    vae.to(device, memory_format=torch.channels_last)  # pyright: ignore
    return vae.eval()


def write(model: nn.Module, path: Path, **numbers: float) -> None:
    """Weights in fp16, and a few numbers."""
    tensors = {k: v.detach().cpu().half().contiguous() for k, v in model.state_dict().items()}
    tensors |= {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
    save_file(tensors, path)


def read(path: Path) -> dict[str, Tensor]:
    """What `write` or `pack` wrote, in fp32."""
    stored = load_file(path)
    tensors = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            tensors[name] = tensor.float() * stored[name + SCALE].float()
        elif not name.endswith(SCALE):
            tensors[name] = tensor if tensor.dtype == torch.float64 else tensor.float()
    return tensors


def pack(source: Path, path: Path) -> None:
    """The weights of a file at half its size, to train them on: matrices in 8 bits, with a scale a
    row. It costs a little quality, which a few hundred updates bring back."""
    packed = {}
    for name, tensor in read(source).items():
        if tensor.ndim >= 2 and tensor.numel() > 4096:
            scale = tensor.flatten(1).abs().amax(1).clamp_min(1e-8) / 127
            scale = scale.view(-1, *[1] * (tensor.ndim - 1)).half()
            packed[name] = (tensor / scale.float()).round().clamp(-127, 127).to(torch.int8)
            packed[name + SCALE] = scale
        else:
            packed[name] = tensor if tensor.dtype == torch.float64 else tensor.half()
    save_file(packed, path)


def save_grid(images: Tensor, columns: int, path: Path) -> None:
    """A sheet of images [N,3,S,S] in [0,1]."""
    rows = len(images) // columns
    size = images.shape[-1]
    sheet = images[: rows * columns].view(rows, columns, 3, size, size).permute(0, 3, 1, 4, 2)
    pixels = sheet.reshape(rows * size, columns * size, 3).clamp(0, 1).mul(255).round().byte()
    Image.fromarray(pixels.cpu().numpy()).save(path)


# The flow


class Denoiser(nn.Module):
    """The transformer and its three text encoders, trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.clips = nn.ModuleList(parts.clip(width) for width in parts.CLIP_WIDTHS)
        self.t5 = parts.t5()
        self.transformer = parts.transformer()

    def encode(self, ids: Tensor, t5_ids: Tensor) -> tuple[Tensor, Tensor]:
        """embeds [B,T+L,160] and pooled [B,160], as StableDiffusion3Pipeline joins them."""
        outputs = [clip(ids, output_hidden_states=True) for clip in self.clips]
        hidden = torch.cat([o.hidden_states[-2] for o in outputs], -1)
        pooled = torch.cat([o.text_embeds for o in outputs], -1)
        return torch.cat([hidden, self.t5(t5_ids).last_hidden_state], 1), pooled

    def forward(self, x: Tensor, sigma: Tensor, ids: Tensor, t5_ids: Tensor) -> Tensor:
        """Velocity [B,16,12,12] at x_sigma, sigma [B]."""
        embeds, pooled = self.encode(ids, t5_ids)
        return self.transformer(x, embeds, pooled, sigma * 1000, return_dict=False)[0]


class Ring:
    """Encoded scenes on the device: latents [N,16,12,12] (bf16) and ids [N,T], renewed in turn."""

    def __init__(self, vae: AutoencoderKL, size: int, device: torch.device, fast: bool) -> None:
        self.config = vae.config
        self.painter = Painter(device)
        self.encoder = torch.compile(vae.encoder) if fast and device.type != "cpu" else vae.encoder
        shape = (size, parts.LATENT_CHANNELS, parts.SIDE, parts.SIDE)
        self.latents = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.ids = torch.empty((size, parts.MAX_LENGTH), dtype=torch.long, device=device)
        self.seen = 0

    @torch.no_grad()
    def add(self, batch: Scenes) -> None:
        """Encode scenes; the oldest go."""
        images = self.painter(batch)
        with parts.autocast(images.device):
            mean = self.encoder(images).float().chunk(2, 1)[0]
        mean = (mean - self.config["shift_factor"]) * self.config["scaling_factor"]
        size = len(images)
        start = self.seen % len(self.latents)
        self.latents[start : start + size] = mean.to(torch.bfloat16)
        self.ids[start : start + size] = batch.ids.long()
        self.seen += size

    def draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random latents [size,16,12,12] in fp32 and ids [size,T]."""
        filled = min(self.seen, len(self.latents))
        device = self.latents.device
        rows = torch.randint(filled, (size,), generator=generator, device=device)
        return self.latents[rows].float(), self.ids[rows]


def noise_levels(size: int, generator: torch.Generator) -> Tensor:
    """[size], logit-normal (SD3, 2403.03206) with a fifth uniform; the mean of 0.3 favours the high
    noise, where it is decided what stands where."""
    device = generator.device
    normal = (torch.randn(size, generator=generator, device=device) + 0.3).sigmoid()
    uniform = torch.rand(size, generator=generator, device=device)
    return torch.where(torch.rand(size, generator=generator, device=device) < 0.2, uniform, normal)


def averaged(average: Tensor, weight: Tensor, updates: Tensor | int) -> Tensor:
    """The moving average, which forgets the first weights sooner: a short run is averaged, too."""
    return average.lerp(weight, 1 - min(EMA_DECAY, (1 + int(updates)) / (10 + int(updates))))


def optimizers(
    model: nn.Module, blocks: list[nn.Parameter], lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for some matrices of a model, at the size of AdamW's updates (2502.16982, eq. 4), and
    AdamW for its other weights."""
    chosen = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(blocks, lr, weight_decay=0.01, ns_steps=4, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


class Run:
    """The flow stage: its model, optimizers and the moving average of the weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        self.model = Denoiser()
        if args.init:
            self.model.load_state_dict(read(args.init))
        self.model.to(self.device)
        self.average = AveragedModel(self.model, avg_fn=averaged)
        blocks = [
            p
            for name, p in self.model.transformer.transformer_blocks.named_parameters()
            if p.ndim == 2 and "norm1" not in name
        ]
        self.optimizers = optimizers(self.model, blocks, args.lr)
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.vae = load_vae(args.vae, self.device)
        self.ring = Ring(self.vae, args.ring, self.device, args.compile)
        self.step = self.seen = 0
        if args.compile:
            for block in self.model.transformer.transformer_blocks:
                block.compile(dynamic=False)

    def train(self, rates: Rates, seconds: float, name: str, lr: float) -> None:
        """For so many seconds on one kind of captions; then write the averaged weights."""
        clock = Clock(seconds, 0.4)
        args = self.args
        fresh = args.batch // FRESH
        source = loader(args, args.seed + 7 * self.step + 1, fresh, rates, args.signs)
        self.ring.seen = 0
        self.step = 0
        began = time.time()
        for _ in range(max(1, args.ring // fresh // 2)):
            self.ring.add(next(source))
        print(f"{name}: {self.ring.seen} scenes encoded, {time.time() - began:.0f} s", flush=True)
        saved = 0
        while clock.gone() < 1:
            self.ring.add(next(source))
            value = self.update(lr * clock.scale(self.step))
            if self.step % args.log == 0:
                rate = self.step * args.batch / (time.time() - began)
                print(
                    f"{name} {self.step} steps  {self.seen} samples  loss {value.item():.4f}"
                    f"  {rate:.0f} samples/s  {time.time() - began:.0f} s",
                    flush=True,
                )
            if saved < args.saves and clock.gone() * (args.saves + 1) > saved + 1:
                saved += 1
                self.save(f"{name}_{saved}")
        self.save(name)
        self.show(name)

    def update(self, lr: float) -> Tensor:
        """One update; the loss."""
        long = self.step % LONG_EVERY == LONG_EVERY - 1
        size = self.args.batch // LONG_SHARE if long else self.args.batch
        length = (64, 256)[self.step // LONG_EVERY % 2] if long else parts.T5_LENGTH
        z, ids = self.ring.draw(size, self.generator)
        sigma = noise_levels(size, self.generator)
        eps = torch.randn(z.shape, generator=self.generator, device=self.device)
        s = sigma.view(-1, 1, 1, 1)
        with torch.compiler.set_stance("force_eager" if long else "default"):
            with parts.autocast(self.device):  # one compiled shape is enough
                v = self.model((1 - s) * z + s * eps, sigma, ids, t5_ids(ids, length))
                value = (v.float() - (eps - z)).square().mean()
                value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += size
        self.average.update_parameters(self.model)
        return value.detach()

    def save(self, name: str) -> None:
        """The averaged weights."""
        write(self.average.module, self.args.out / f"{name}.safetensors")

    @torch.no_grad()
    def show(self, name: str) -> None:
        """48 samples of the average, ten Euler steps without CFG, their captions in a text file."""
        rng = np.random.default_rng(3)
        pools = {tag: prompts.splits(tag)["val"] or prompts.splits(tag)["train"]
                 for tag in TAG_SHARES}  # fmt: skip
        texts = [captioned(RIGHT, rng, pools)[0] for _ in range(48)]
        pipe = pipeline(self.average.module.state_dict(), self.args.vae).to(self.device)
        pipe.set_progress_bar_config(disable=True)
        with torch.compiler.set_stance("force_eager"):
            images = parts.sample(pipe, texts, 1.0, 3)
        save_grid(images, 12, self.args.out / f"{name}.png")
        (self.args.out / "captions.txt").write_text("\n".join(texts))


def t5_ids(ids: Tensor, length: int) -> Tensor:
    """The same tokens, padded (pad id 0) to T5's length."""
    return F.pad(ids, (0, max(0, length - ids.shape[1])))


def pipeline(weights: dict[str, Tensor], vae: Path) -> StableDiffusion3Pipeline:
    """The pipeline of a flow's weights and an autoencoder's file."""
    model = Denoiser()
    model.load_state_dict(weights)
    spell = parts.tokenizer()
    components: dict[str, Any] = {
        "transformer": model.transformer,
        "scheduler": parts.scheduler(),
        "vae": load_vae(vae),
        "text_encoder": model.clips[0],
        "tokenizer": spell,
        "text_encoder_2": model.clips[1],
        "tokenizer_2": spell,
        "text_encoder_3": model.t5,
        "tokenizer_3": parts.tokenizer(max_length=256),
    }
    return StableDiffusion3Pipeline(**components)


def train_flow(args: argparse.Namespace) -> None:
    """Right captions, then wrong ones."""
    run = Run(args)
    if args.seconds:
        run.train(RIGHT, args.seconds, "right", args.lr)
    if args.wrong:
        run.train(WRONG, args.wrong, "wrong", args.lr * args.wrong_lr)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=("vae", "decoder", "flow"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="of the stage, right captions")
    parser.add_argument("--wrong", type=float, default=0, help="seconds with wrong captions")
    parser.add_argument("--vae", type=Path, help="the autoencoder's file, for the flow")
    parser.add_argument("--init", type=Path, help="weights to begin with")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--wrong-lr", type=float, default=0.5, help="of the learning rate, then")
    parser.add_argument("--signs", type=float, default=0.25, help="share of signs")
    parser.add_argument("--ring", type=int, default=RING, help="latents kept; a multiple of batch")
    parser.add_argument("--saves", type=int, default=0, help="saves within a phase")
    parser.add_argument("--log", type=int, default=100, help="steps between lines")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw captions")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts.quiet()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    scenes.drawings()  # before the workers are forked, which share them
    for tag in TAG_SHARES:
        prompts.splits(tag)
    {"vae": train_vae, "decoder": train_decoder, "flow": train_flow}[args.stage](args)


if __name__ == "__main__":
    main()
