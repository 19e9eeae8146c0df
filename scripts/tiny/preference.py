"""Make the tiny world's PickScore: `python scripts/tiny/preference.py --work DIR --vae FILE`.

A small CLIPModel, first trained to tell which prompt belongs to which scene, then as PickScore
(2305.01569): of two images of one prompt, the softmax over exp(logit_scale) * cos(text, image)
must fall on the preferred one; here the clean, coloured scene against a spoilt one, one in line art
(where the prompt does not ask for it), or one that does not match. Half of the images, clean and
spoilt alike, went through the tiny model's autoencoder, so that its softness alone decides nothing.
Writes DIR/model, or with --ship flowalign/backbone/tiny/preference_model, in fp16, as a hub folder
of a CLIP, with a card that holds what it scores on held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import parts
import pretrain
import prompts
import torch
from diffusers import AutoencoderKL
from mistakes import BLURRED, CLEAN, FADED, SPOTTED, TAG_SHARES, wrong_objects, wrong_sign
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

from flowalign.backbone.tiny import PREFERENCE, scenes
from flowalign.system.files import replacing

KINDS = {  # what spoils a scene, and how often it is drawn in training
    "blurred": 1,
    "faded": 1,
    "spotted": 1,
    "line": 3,
    "mismatch": 3,
    "warped": 1.5,
    "bitten": 1,
    "latent": 2,
}
EFFECTS = {"blurred": BLURRED, "faded": FADED, "spotted": SPOTTED}
SPOILT = 2  # spoilt images beside each clean one
CHUNK = 240  # scenes made at a time
BATCH = 64  # scenes with all their spoilt ones; the contrastive stage has twice as many
SHIFT = 3  # pixels that a training image may be moved
SIZE = scenes.SIZE
CARD = """---
library_name: transformers
license: apache-2.0
tags: [clip, pickscore, tiny, flowalign]
---

# The tiny world's preference model

A genuine `CLIPModel` of {parameters:.2f}M parameters for 96x96 images, in the form of
[PickScore](https://huggingface.co/yuvalkirstain/PickScore_v1): exp(logit_scale) * cos(text, image)
says how well a picture pleases for its prompt. It likes clean, coloured drawings of what the prompt
says, and no line art unless the prompt asks for it. As a reward:
`{{name: pickscore, options: {{model: tiny, normalizer: 28}}}}`.

## How it was made

From scratch, on CPU cores, by `python scripts/tiny/preference.py`: CLIP's contrastive loss on
{contrastive} scenes drawn by `flowalign.backbone.tiny.scenes`, then PickScore's loss (2305.01569),
beside it, on {scenes} scenes with two spoilt ones each, from a pool of {pool}. Half of the images,
clean and spoilt alike, went through the tiny model's autoencoder. No image of a diffusion model was
used. The combinations and words of the tiny prompts `*_val` and `*_test` were never drawn.

## What it measures on held-out prompts

Of {count} scenes of test prompts with two spoilt ones each: the share of pairs in which the clean
one scores higher, and the spoilt ones' mean score. Clean ones score {clean:.2f} (deviation
{spread:.2f}).

| spoilt by | clean is higher | mean score |
|---|---|---|
{table}
"""


def model() -> CLIPModel:
    """A small CLIP: 96x96 images in 12x12 patches, four layers; text of 14 tokens, two layers."""
    vision: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "image_size": SIZE,
        "patch_size": 12,
        "hidden_act": "gelu",
    }
    text = parts.clip(96).config.to_dict() | {"intermediate_size": 192, "projection_dim": 64}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def pixels(images: Tensor) -> Tensor:
    """uint8 [...,3,96,96] -> float in [-1,1], as the image processor gives them."""
    return images.float() / 127.5 - 1


class Codec:
    """The tiny model's autoencoder, for images [N,3,96,96] in [-1,1]."""

    def __init__(self, path: Path) -> None:
        self.vae: AutoencoderKL = pretrain.load_vae(path)

    @torch.no_grad()
    def __call__(self, images: Tensor, spoil: torch.Generator | None = None) -> Tensor:
        """The images encoded and decoded; with `spoil`, damaged between the two."""
        latents = self.vae.encode(images, return_dict=False)[0].mean
        latents = latents if spoil is None else self.damage(latents, spoil)
        return pretrain.decoded(self.vae, latents).clamp(-1, 1)

    def damage(self, latents: Tensor, generator: torch.Generator) -> Tensor:
        """Noise on the latents, or the latents of another image mixed in, here and there or all
        over: what a picture looks like that a model has not finished."""

        def uniform(low: float, high: float) -> Tensor:
            return torch.rand((len(latents), 1, 1, 1), generator=generator) * (high - low) + low

        noise = torch.randn(latents.shape, generator=generator) * uniform(0.4, 1.0)
        noise = noise / self.vae.config["scaling_factor"]
        share = uniform(0.2, 0.5)
        where = torch.rand((len(latents), 1, *latents.shape[2:]), generator=generator) < share
        share = torch.where(uniform(0, 1) < 0.5, where.float(), share)
        mixed = latents + share * (latents.roll(1, 0) - latents)
        return torch.where(uniform(0, 1) < 0.5, latents + noise, mixed)


def warped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Wobbly outlines: every pixel moved by a smooth random field, by 2 to 5 pixels."""
    field = torch.randn((len(images), 2, 12, 12), generator=generator)
    field = F.interpolate(field, size=(SIZE, SIZE), mode="bicubic")
    reach = torch.rand((len(images), 1, 1, 1), generator=generator) * 3 + 2
    at = torch.linspace(-1, 1, SIZE)
    grid = torch.stack(torch.meshgrid(at, at, indexing="xy"), -1)
    grid = grid + (field * reach * 2 / SIZE).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=True)


def bitten(images: Tensor, generator: torch.Generator) -> Tensor:
    """Bites out of what is drawn: up to four squares of 8 to 20 pixels show the background."""
    images = images.clone()
    for image in images:
        ground = image[:, :1, :1].clone()
        rows, columns = ((image - ground).abs().amax(0) > 0.2).nonzero().unbind(1)
        for _ in range(int(torch.randint(2, 5, (), generator=generator)) if len(rows) else 0):
            i = int(torch.randint(len(rows), (), generator=generator))
            half = int(torch.randint(4, 11, (), generator=generator))
            y, x = int(rows[i]), int(columns[i])
            image[:, max(0, y - half) : y + half, max(0, x - half) : x + half] = ground
    return images


class Drawer:
    """Draws chunks of clean and spoilt scenes."""

    def __init__(self, vae: Path) -> None:
        self.codec = Codec(vae)
        self.painter = pretrain.Painter(torch.device("cpu"))
        self.spell = pretrain.speller()
        self.splits = {tag: prompts.splits(tag) for tag in TAG_SHARES}

    def row(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
        """A scene of a split."""
        if rng.random() < 0.3:
            words = {"val": prompts.VALIDATION_WORDS, "test": prompts.TEST_WORDS}.get(split)
            word = words[rng.integers(len(words))] if words else prompts.random_word(rng)
            colors = (*scenes.SIGN_COLORS, None)
            return prompts.sign(word, colors[rng.integers(len(colors))])
        tags = [tag for tag in self.splits if self.splits[tag][split]]
        pool = self.splits[tags[rng.integers(len(tags))]][split]
        return pool[rng.integers(len(pool))]

    def chunk(self, split: str, kinds: np.ndarray, seed: list[int]) -> dict[str, Tensor]:
        """The tensors of a Pool: one scene for every row of kinds [N,SPOILT] (places in KINDS)."""
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(hash(tuple(seed)))
        names = list(KINDS)
        layers = []
        grounds = []
        effects = []
        texts = []
        for wanted in kinds:
            row = self.row(split, rng)
            scene_seed = int(rng.integers(2**31))
            styled = "target" not in row and rng.random() < 0.2
            style = scenes.STYLES[rng.integers(3 if styled else 2)]
            wording = list(prompts.WORDINGS)[rng.integers(len(prompts.WORDINGS))]
            texts.append(
                prompts.STYLE_WORDING.format(style=style, text=row["text"])
                if styled else prompts.prompt(row, wording)
            )  # fmt: skip
            for kind in ("clean", *(names[i] for i in wanted)):
                drawn = row | {"style": style}
                if kind == "mismatch":
                    wrong = wrong_sign if "target" in row else wrong_objects
                    drawn = wrong(drawn, rng)
                elif kind == "line":
                    others = [s for s in scenes.STYLES if s != style] if styled else ["line"]
                    drawn = drawn | {"style": others[rng.integers(len(others))]}
                effect = EFFECTS.get(kind, CLEAN)
                if "target" in row and kind == "line":  # a sign has no line art: it fades
                    effect = FADED
                again = np.random.default_rng(scene_seed)
                layers.append(scenes.compose(drawn, again))
                grounds.append(scenes.ground(again))
                effects.append(effect)
        batch = pretrain.Scenes(
            torch.from_numpy(np.stack(layers)), torch.from_numpy(np.stack(grounds)),
            torch.tensor(effects), torch.tensor([self.spell(text) for text in texts]),
        )  # fmt: skip
        images = self.painter(batch).contiguous().view(len(kinds), 1 + SPOILT, 3, SIZE, SIZE)
        chosen = torch.from_numpy(kinds)
        for name, spoil in (("warped", warped), ("bitten", bitten), ("latent", None)):
            at, which = (chosen == names.index(name)).nonzero().unbind(1)
            if len(at):
                clean = images[at, 0]
                spoilt = spoil(clean, generator) if spoil else self.codec(clean, generator)
                images[at, which + 1] = spoilt
        soft = torch.rand(images.shape[:2], generator=generator) < 0.5
        soft[:, 1:] &= chosen != names.index("latent")
        images[soft] = self.codec(images[soft])
        return {
            "images": ((images + 1) * 127.5).round().byte(),
            "ids": batch.ids.to(torch.uint8),
            "kind": chosen.to(torch.uint8),
        }


@dataclass(frozen=True)
class Pool:
    """images uint8 [N,1+SPOILT,3,96,96], the clean one first; ids uint8 [N,14]; kind [N,SPOILT]."""

    images: Tensor
    ids: Tensor
    kind: Tensor

    @staticmethod
    def make(folder: Path, drawer: Drawer, size: int, seed: int, split: str = "train") -> Pool:
        """Read the chunks that are there, draw those that are not."""
        folder.mkdir(parents=True, exist_ok=True)
        shares = np.array(list(KINDS.values())) / sum(KINDS.values())
        chunks = []
        for number in range(size // CHUNK):
            path = folder / f"{split}_{number:04d}.safetensors"
            if not path.exists():
                rng = np.random.default_rng([seed, number])
                kinds = rng.choice(len(KINDS), size=(CHUNK, SPOILT), p=shares)
                with replacing(path) as part:
                    save_file(drawer.chunk(split, kinds, [seed, number, 1]), part)
                if number % 10 == 9:
                    print(f"drew {(number + 1) * CHUNK} of {size} scenes", flush=True)
            chunks.append(load_file(path))
        return Pool(**{k: torch.cat([tensors[k] for tensors in chunks]) for k in chunks[0]})


def embed(clip: CLIPModel, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors of images [B,3,96,96] in [-1,1] and of token ids [P,14]: [B,64], [P,64]."""
    found: list[Any] = [clip.get_image_features(images), clip.get_text_features(ids)]
    seen, read = (nn.functional.normalize(f.pooler_output.float(), dim=-1) for f in found)
    return seen, read


@torch.no_grad()
def measured(clip: CLIPModel, pool: Pool) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """The clean scenes' scores [N], and of each kind how often the clean image scores above the
    spoilt one, and the spoilt ones' mean score."""
    clip.eval()
    found = []
    for images, ids in zip(pool.images.split(64), pool.ids.split(64), strict=True):
        seen, read = embed(clip, pixels(images.flatten(0, 1)), ids.long())
        found.append((seen.view(len(ids), 1 + SPOILT, -1) * read[:, None]).sum(-1))
    score = clip.logit_scale.exp() * torch.cat(found)
    kinds = {}
    for number, name in enumerate(KINDS):
        at, which = (pool.kind == number).nonzero().unbind(1)
        spoilt = score[at, which + 1]
        kinds[name] = float((score[at, 0] > spoilt).float().mean()), float(spoilt.mean())
    return score[:, 0], kinds


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


def train(clip: CLIPModel, pool: Pool, args: argparse.Namespace) -> None:
    """The contrastive stage, then the one of pairs; the rate falls linearly over the last 60 % of
    all steps."""
    first = args.contrastive // (2 * BATCH)
    last = first + args.scenes // BATCH
    blocks = [p for n, p in clip.named_parameters() if p.ndim == 2 and ".layers." in n]
    optimizers = pretrain.optimizers(clip, blocks, args.lr)
    began = time.time()
    for step in range(last):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        value = loss(clip, pool, generator, pairs=step >= first)
        value.backward()
        nn.utils.clip_grad_norm_(clip.parameters(), 1.0)
        left = max(0.02, min(1.0, (1 - step / last) / 0.6))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (step + 1) / 50) * left
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            clip.logit_scale.clamp_(0, np.log(100))
        if step % 25 == 24:
            rate = (step + 1) / (time.time() - began)
            scale = float(clip.logit_scale.detach().exp())
            print(
                f"step {step + 1} of {last}  loss {value.item():.4f}  scale {scale:.1f}  "
                f"{rate:.2f} steps/s",
                flush=True,
            )


def loss(clip: CLIPModel, pool: Pool, generator: torch.Generator, pairs: bool) -> Tensor:
    """Contrastive on clean scenes alone, or on pairs, with PickScore's loss added."""
    size = BATCH if pairs else 2 * BATCH
    at = torch.randint(len(pool.ids), (size,), generator=generator)
    images = pool.images[at, 0]
    ids = pool.ids[at].long()
    if pairs:  # all clean ones first
        images = pool.images[at].transpose(0, 1).flatten(0, 1)
    x = nn.functional.pad(pixels(images), (SHIFT,) * 4, mode="replicate")
    dx, dy = torch.randint(0, 2 * SHIFT + 1, (2,), generator=generator).tolist()
    with parts.autocast(torch.device("cpu")):
        seen, read = embed(clip, x[..., dy : dy + SIZE, dx : dx + SIZE], ids)
    scale = clip.logit_scale.exp()
    value = contrastive(seen[:size], read, ids, scale)
    if pairs:
        clean = seen[:size]
        spoilt = seen[size:].view(SPOILT, size, -1)
        value = value + preferred(clean, spoilt, read, scale)
    return value


def write(clip: CLIPModel, folder: Path) -> None:
    """The fp16 weights, the tokenizer, and the image processor, as hub folders hold them."""
    clip.half().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "float32"  # loaded as such; fp16 is how it is stored
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    parts.tokenizer().save_pretrained(folder)
    spell = json.loads((folder / "tokenizer_config.json").read_text())
    spell["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that transformers 4 knows too
    (folder / "tokenizer_config.json").write_text(json.dumps(spell, indent=2) + "\n")
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "CLIPProcessor",
        "size": {"shortest_edge": SIZE},
        "crop_size": {"height": SIZE, "width": SIZE},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def main() -> None:
    """Command line; scenes that an earlier call has drawn into --work are not drawn again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the run")
    parser.add_argument("--vae", type=Path, required=True, help="the autoencoder's file")
    parser.add_argument("--pool", type=int, default=14_400, help="scenes drawn")
    parser.add_argument("--contrastive", type=int, default=38_400, help="scenes of the first stage")
    parser.add_argument("--scenes", type=int, default=44_800, help="scenes of the second stage")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ship", action="store_true", help="into the package, not into --work")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    parts.quiet()
    drawer = Drawer(args.vae)
    torch.manual_seed(args.seed)
    clip = model()
    train(clip, Pool.make(args.work / "pool", drawer, args.pool, args.seed), args)
    folder = PREFERENCE if args.ship else args.work / "model"
    write(clip, folder)
    clip = CLIPModel.from_pretrained(folder)
    held_out = Pool.make(args.work / "pool", drawer, 960, args.seed + 1, "test")
    clean, kinds = measured(clip, held_out)
    rows = [f"| {k} | {right:.3f} | {score:.2f} |" for k, (right, score) in kinds.items()]
    card = CARD.format(
        parameters=sum(p.numel() for p in clip.parameters()) / 1e6,
        clean=clean.mean(),
        spread=clean.std(),
        count=len(clean),
        table="\n".join(rows),
        **vars(args),
    )
    print(card)
    (folder / "README.md").write_text(card)


if __name__ == "__main__":
    main()
