"""Turn a trained preference model into the one that the package ships.

    python scripts/tiny/preference_ship.py --work DIR

Writes flowalign/backbone/tiny/preference_model in fp16, as a hub folder of a CLIP, with a card that
holds what it scores on held-out prompts (measured here, on the fp16 weights read back).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import parts
import preference
import torch
from preference import KINDS, SPOILT, Codec, chunk, embed, pixels
from torch import Tensor
from transformers import CLIPModel

from flowalign.backbone.tiny import PREFERENCE

SCENES = 200  # held-out scenes a kind, with SPOILT pairs each
BLOCK = 32  # prompts that an image is told apart from
CARD = """---
library_name: transformers
license: apache-2.0
tags: [clip, pickscore, tiny, flowalign]
---

# The tiny world's preference model

A genuine `CLIPModel` of {parameters:.2f}M parameters for 64x64 images, in the form of
[PickScore](https://huggingface.co/yuvalkirstain/PickScore_v1): exp(logit_scale) * cos(text, image)
says how well a picture pleases for its prompt. It judges scenes of shapes and signs: clean, sharp,
well-formed, uncluttered, and what the prompt says. As a reward:
`{{name: pickscore, options: {{model: tiny, normalizer: {normalizer:g}}}}}`.

## How it was made

From scratch, on one CPU core, by `python scripts/tiny/preference.py` ({history}): CLIP's
contrastive loss on scenes drawn by `flowalign.backbone.tiny.scenes`, then PickScore's loss
(2305.01569) on pairs of a clean scene and a spoilt one (scripts/tiny/degrade.py), beside the
contrastive one. Half of the images, clean and spoilt alike, went through the tiny model's
autoencoder. No image of a diffusion model was used. The combinations and words of
`flowalign/backbone/tiny/prompts/*_val` and `*_test` were never drawn.

## What it measures on held-out prompts

By `python scripts/tiny/preference_ship.py`. The share of {pairs} pairs a kind in which the clean
scene scores higher, as rendered, and with both images through the autoencoder ("latent": only the
clean one is rendered in the first), with the mean score of the spoilt images:

{table}
Clean scenes score {clean:.2f} as rendered (deviation {spread:.2f}), {decoded:.2f} decoded. Top-1
retrieval among {block} held-out prompts, image to prompt: shapes {shapes:.2f}, signs {signs:.2f};
prompt to image: shapes {shapes_back:.2f}, signs {signs_back:.2f}.
"""


def scores(clip: CLIPModel, part: Mapping[str, Tensor]) -> Tensor:
    """exp(logit_scale) * cos [N,1+SPOILT] of the images of a Pool's tensors."""
    images, count = part["images"], part["images"].shape[1]
    seen, read = embed(clip, pixels(images.flatten(0, 1)), part["ids"].long())
    return clip.logit_scale.exp() * (seen.view(len(images), count, -1) * read[:, None]).sum(-1)


@torch.no_grad()
def accuracy(clip: CLIPModel, codec: Codec, kind: str, decoded: float) -> tuple[float, Tensor]:
    """The share of held-out pairs of one kind that are ranked right, and their scores."""
    kinds = np.full((SCENES, SPOILT), list(KINDS).index(kind))
    rng = np.random.default_rng([1, list(KINDS).index(kind)])
    found = scores(clip, chunk(codec, "test", kinds, decoded, rng))
    return float((found[:, :1] > found[:, 1:]).float().mean()), found


@torch.no_grad()
def retrieval(clip: CLIPModel, signs: bool) -> tuple[float, float]:
    """Top-1 among BLOCK different held-out prompts, image to prompt and back; 8 blocks."""
    rng, hits = np.random.default_rng(2), []
    source = preference.rows("test", rng)
    for _ in range(8):
        wanted: dict[str, np.ndarray] = {}
        while len(wanted) < BLOCK:
            row, _ = next(source)
            if ("target" in row) == signs:
                wanted[row["prompt"]] = preference.degrade.scenes.render(row, rng)
        ids = parts.tokenizer()(list(wanted), padding="max_length", return_tensors="pt").input_ids
        images = pixels(torch.from_numpy(np.stack(list(wanted.values()))))
        seen, read = embed(clip, images, ids)
        match, truth = seen @ read.T, torch.arange(BLOCK)
        hits.append([float((match.argmax(axis) == truth).float().mean()) for axis in (1, 0)])
    there, back = torch.tensor(hits).mean(0).tolist()
    return there, back


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
    half = [0.5, 0.5, 0.5]
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "CLIPProcessor",
        "size": {"shortest_edge": 64},
        "crop_size": {"height": 64, "width": 64},
        "image_mean": half,
        "image_std": half,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def card(clip: CLIPModel, history: str, normalizer: float) -> str:
    """Measure everything that the card says."""
    codec, lines, clean = Codec(), ["| spoilt by | rendered | decoded | mean score |"], []
    lines += ["|---|---|---|---|"]
    for kind in KINDS:
        sharp, found = accuracy(clip, codec, kind, 0.0)
        soft, after = accuracy(clip, codec, kind, 1.0)
        clean.append(torch.stack([found[:, 0], after[:, 0]], 1))
        lines.append(f"| {kind} | {sharp:.3f} | {soft:.3f} | {float(found[:, 1:].mean()):.2f} |")
        print(lines[-1], flush=True)
    (shapes, shapes_back), (signs, signs_back) = retrieval(clip, False), retrieval(clip, True)
    both = torch.cat(clean)
    return CARD.format(
        parameters=sum(p.numel() for p in clip.parameters()) / 1e6,
        normalizer=normalizer,
        history=history,
        pairs=SCENES * SPOILT,
        table="\n".join(lines) + "\n",
        clean=both[:, 0].mean(),
        spread=both[:, 0].std(),
        decoded=both[:, 1].mean(),
        block=BLOCK,
        shapes=shapes,
        signs=signs,
        shapes_back=shapes_back,
        signs_back=signs_back,
    )


def main() -> None:
    """Write the folder, read it back, measure it, write the card."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--out", type=Path, default=PREFERENCE)
    parser.add_argument("--normalizer", type=float, required=True, help="for the card")
    parser.add_argument("--history", required=True, help="what was trained on, for the card")
    args = parser.parse_args()
    parts.quiet()
    clip = preference.model()
    clip.load_state_dict(torch.load(args.work / "state", weights_only=True)["model"])
    args.out.mkdir(parents=True, exist_ok=True)
    write(clip, args.out)
    clip = CLIPModel.from_pretrained(args.out).eval()
    text = card(clip, args.history, args.normalizer)
    (args.out / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
