"""Make the tiny world's PickScore: `python scripts/tiny/preference.py --work DIR`.

A small CLIPModel, first trained to tell which prompt belongs to which scene, then as PickScore
(2305.01569): of two images of one prompt, the softmax over exp(logit_scale) * cos(text, image)
must fall on the preferred one; here the clean scene against a spoilt one (`degrade`). Half of the
images, clean and spoilt alike, went through the tiny model's autoencoder, so that its softness
alone decides nothing. Every part is resumable; `preference_ship` ships the result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import degrade
import muon
import numpy as np
import parts
import prompts
import stream
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from flowalign.backbone.tiny import MODEL
from flowalign.system.files import replacing

KINDS = {  # what spoils a scene, and how often it is drawn in training
    "blur": 1,
    "bleed": 1.5,
    "malformed": 2,
    "clutter": 2,
    "faded": 1,
    "oversaturated": 1,
    "missing": 1,
    "mismatch": 2.5,
    "latent": 2,
}
SPOILT = 2  # spoilt images beside each clean one
CHUNK = 200  # scenes made at a time
BATCH = 64  # scenes with all their spoilt ones; the contrastive stage has twice as many
SHIFT = 2  # pixels that a training image may be moved


def model() -> CLIPModel:
    """A small CLIP: 64x64 images in 8x8 patches, four layers; text of 18 tokens, two layers."""
    vision: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "image_size": 64,
        "patch_size": 8,
        "hidden_act": "gelu",
    }
    text = parts.clip(96).config.to_dict() | {"intermediate_size": 192, "projection_dim": 64}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def wordings(row: dict[str, Any]) -> list[str]:
    """The ways in which prompts of the tiny world ask for this scene."""
    return [row["prompt"], prompts.preference_prompt(row)["prompt"]]


def rows(split: str, rng: np.random.Generator) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Prompts of a split without end, each with the prompts that its mismatch is taken from, which
    are training prompts always."""
    splits = {tag: prompts.geneval_splits(tag) for tag in stream.TAG_SHARES}
    tags = [tag for tag in splits if splits[tag][split]]
    shares = np.array([stream.TAG_SHARES[tag] for tag in tags])
    shares /= shares.sum()
    words = {"val": prompts.VALIDATION_WORDS, "test": prompts.TEST_WORDS}.get(split)
    colors = [*degrade.scenes.SIGN_COLORS, None]
    while True:
        if rng.random() < 0.4:
            word = words[rng.integers(len(words))] if words else prompts.random_word(rng)
            yield prompts.sign_prompt(word, colors[rng.integers(len(colors))]), []
        else:
            pools = splits[tags[rng.choice(len(tags), p=shares)]]
            yield pools[split][rng.integers(len(pools[split]))], pools["train"]


class Codec:
    """The tiny model's autoencoder, for images uint8 [N,64,64,3]."""

    def __init__(self) -> None:
        vae: Any = AutoencoderKL.from_pretrained(MODEL, subfolder="vae")
        self.vae = vae.float().to(memory_format=torch.channels_last)

    @torch.no_grad()
    def __call__(self, images: np.ndarray, spoil: np.random.Generator | None = None) -> np.ndarray:
        """The images encoded and decoded; with `spoil`, damaged between the two."""
        x = pixels(torch.from_numpy(images)).contiguous(memory_format=torch.channels_last)
        with parts.autocast(torch.device("cpu")):
            latents = self.vae.encode(x, return_dict=False)[0].mean
            latents = latents if spoil is None else self.damage(latents.float(), spoil)
            out = self.vae.decode(latents, return_dict=False)[0].float()
        out = ((out.clamp(-1, 1) + 1) * 127.5).round().byte()  # another rounding than to_uint8's
        return out.permute(0, 2, 3, 1).contiguous().numpy()

    def damage(self, latents: Tensor, rng: np.random.Generator) -> Tensor:
        """Noise on the latents, or the latents of another image mixed in, here and there or all
        over: what a picture looks like that a model has not finished."""
        unit = 1 / float(self.vae.config["scaling_factor"])
        shape = (len(latents), 1, 1, 1)
        noise = torch.from_numpy(rng.normal(size=latents.shape)).float() * unit
        noise *= torch.from_numpy(rng.uniform(0.25, 0.8, shape)).float()
        share = torch.from_numpy(rng.uniform(0.2, 0.5, shape)).float()
        where = torch.from_numpy(rng.random((len(latents), 1, *latents.shape[2:]))).float() < share
        share = torch.where(torch.from_numpy(rng.random(shape)) < 0.5, where.float(), share)
        mixed = latents + share * (latents.roll(1, 0) - latents)
        return torch.where(torch.from_numpy(rng.random(shape)) < 0.5, latents + noise, mixed)


def pixels(images: Tensor) -> Tensor:
    """uint8 [...,64,64,3] -> float [...,3,64,64] in [-1,1], as the image processor gives them."""
    return images.movedim(-1, -3).float() / 127.5 - 1


@dataclass(frozen=True)
class Pool:
    """images uint8 [N,1+SPOILT,64,64,3], the clean one first; ids uint8 [N,14]; kind [N,SPOILT]."""

    images: Tensor
    ids: Tensor
    kind: Tensor

    @staticmethod
    def make(folder: Path, size: int, seed: int) -> Pool:
        """Read the chunks that are there, draw those that are not."""
        folder.mkdir(parents=True, exist_ok=True)
        codec, names = Codec(), list(KINDS)
        shares = np.array(list(KINDS.values())) / sum(KINDS.values())
        chunks = []
        for number in range(size // CHUNK):
            path = folder / f"{number:04d}.safetensors"
            if not path.exists():
                rng = np.random.default_rng([seed, number])
                kinds = rng.choice(len(names), size=(CHUNK, SPOILT), p=shares)
                with replacing(path) as part:
                    save_file(chunk(codec, "train", kinds, 0.5, rng), part)
                if number % 10 == 9:
                    print(f"drew {(number + 1) * CHUNK} of {size} scenes", flush=True)
            chunks.append(load_file(path))
        return Pool(**{k: torch.cat([tensors[k] for tensors in chunks]) for k in chunks[0]})


def chunk(
    codec: Codec, split: str, kinds: np.ndarray, decoded: float, rng: np.random.Generator
) -> dict[str, Tensor]:
    """The tensors of a Pool: one scene for every row of kinds [N,SPOILT] (places in KINDS).

    decoded: the share of images that go through the autoencoder, drawn for each image alone.
    """
    names, source, tokenizer = list(KINDS), rows(split, rng), parts.tokenizer()
    images, texts = [], []
    for wanted in kinds:
        row, pool = next(source)
        seed = int(rng.integers(2**31))  # one clean scene beside all its spoilt ones
        scene = []
        for kind in wanted:
            name = names[kind] if names[kind] != "latent" else "blur"  # replaced below
            clean, spoilt = degrade.pair(row, name, pool, seed, rng)
            scene += [spoilt] if scene else [clean, spoilt]
        images.append(np.stack(scene))
        texts.append(wordings(row)[rng.integers(2)])
    stack = np.stack(images)
    damaged = kinds == names.index("latent")
    if damaged.any():
        at, which = np.nonzero(damaged)
        stack[at, which + 1] = codec(stack[at, 0], spoil=rng)
    soft = rng.random(stack.shape[:2]) < decoded
    soft[:, 1:] &= ~damaged
    if soft.any():
        stack[soft] = codec(stack[soft])
    ids = tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
    return {
        "images": torch.from_numpy(stack),
        "ids": ids.to(torch.uint8),
        "kind": torch.from_numpy(kinds.astype(np.uint8)),
    }


def embed(clip: CLIPModel, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors of images [B,3,64,64] in [-1,1] and of token ids [P,18]: [B,64], [P,64]."""
    found: list[Any] = [clip.get_image_features(images), clip.get_text_features(ids)]
    seen, read = (nn.functional.normalize(f.pooler_output.float(), dim=-1) for f in found)
    return seen, read


def contrastive(seen: Tensor, read: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss both ways over unit vectors [B,D]; equal prompts are no negatives."""
    logits = scale * seen @ read.T
    same = (ids[:, None] == ids[None]).all(-1) & ~torch.eye(len(ids), dtype=torch.bool)
    logits = logits.masked_fill(same, -torch.inf)
    truth = torch.arange(len(ids))
    cross = nn.functional.cross_entropy
    return (cross(logits, truth) + cross(logits.T, truth)) / 2


def preferred(clean: Tensor, spoilt: Tensor, read: Tensor, scale: Tensor) -> Tensor:
    """PickScore's loss: -log softmax over the two scores of a pair, on its clean image."""
    margin = scale * ((clean - spoilt) * read).sum(-1)
    return nn.functional.softplus(-margin).mean()


class Run:
    """Both stages, counted in steps, with their one optimizer; saved and resumed."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.folder, self.args, self.model, self.step = folder, args, model(), 0
        self.first = args.contrastive // (2 * BATCH)
        self.last = self.first + args.scenes // BATCH
        blocks = [p for n, p in self.model.named_parameters() if p.ndim == 2 and ".layers." in n]
        self.optimizers = muon.beside_adamw(blocks, self.model, args.lr)
        if (folder / "state").exists():
            state = torch.load(folder / "state", weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step = state["step"]

    def train(self, pool: Pool) -> None:
        """Until the last step; the rate falls linearly over the last 60 % of the steps."""
        began, start, total = time.time(), self.step, 0.0
        while self.step < self.last:
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
            total += self._update(pool, generator)
            if self.step % 25 == 0:
                rate = (self.step - start) / (time.time() - began)
                scale = float(self.model.logit_scale.detach().exp())
                print(
                    f"step {self.step} of {self.last}  loss {total / 25:.4f}  "
                    f"scale {scale:.1f}  {rate:.2f} steps/s",
                    flush=True,
                )
                total = 0.0
            if self.step % 100 == 0 or self.step == self.last:
                self.save()

    def _update(self, pool: Pool, generator: torch.Generator) -> float:
        value = self.loss(pool, generator)
        value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        left = max(0.02, min(1.0, (1 - self.step / self.last) / 0.6))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.args.lr * min(1.0, (self.step + 1) / 50) * left
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, np.log(100))
        self.step += 1
        return value.item()

    def loss(self, pool: Pool, generator: torch.Generator) -> Tensor:
        """Contrastive on clean scenes alone, then on pairs, with PickScore's loss added."""
        pairs = self.step >= self.first
        size = BATCH if pairs else 2 * BATCH
        at = torch.randint(len(pool.ids), (size,), generator=generator)
        images, ids = pool.images[at, 0], pool.ids[at].long()
        if pairs:  # all clean ones first
            images = pool.images[at].transpose(0, 1).flatten(0, 1)
        x = nn.functional.pad(pixels(images), (SHIFT,) * 4, mode="replicate")
        dx, dy = torch.randint(0, 2 * SHIFT + 1, (2,), generator=generator).tolist()
        with parts.autocast(torch.device("cpu")):
            seen, read = embed(self.model, x[..., dy : dy + 64, dx : dx + 64], ids)
        scale = self.model.logit_scale.exp()
        value = contrastive(seen[:size], read, ids, scale)
        if pairs:
            clean, spoilt = seen[:size], seen[size:].view(SPOILT, size, -1)
            value = value + preferred(clean, spoilt, read, scale)
        return value

    def save(self) -> None:
        """The resumable state, replaced at once."""
        optimizers = [o.state_dict() for o in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step}
        with replacing(self.folder / "state") as part:
            torch.save(state, part)


def main() -> None:
    """Command line; run again with the same folder to resume."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the run")
    parser.add_argument("--pool", type=int, default=20_000, help="scenes drawn")
    parser.add_argument("--contrastive", type=int, default=38_400, help="scenes of the first stage")
    parser.add_argument("--scenes", type=int, default=44_800, help="scenes of the second stage")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    parts.quiet()
    pool = Pool.make(args.work / "pool", args.pool, args.seed)
    Run(args.work, args).train(pool)


if __name__ == "__main__":
    main()
