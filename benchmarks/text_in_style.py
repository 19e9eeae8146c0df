"""Correct text in a style that the lettering LoRA does not know: merges of both, by their weights,
and training that starts from one of them.

    python benchmarks/text_in_style.py --out outputs/text_in_style

The style is a LoRA that draws a green floor below everything, trained here on 200 rendered shapes
and as many signs. The lettering is tiny/ocr. The training is NFT from the merge of full weights, on
the product of OCR and a score of the style: the share of the floor that is green, or `similarity`
to the pictures that the style was trained on. Scores are of sign prompts that none has seen: OCR,
and the green share. Prints Markdown, writes OUT/text_in_style.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from many_loras import IMAGES, MODEL, drawn, styles, train_lora
from PIL import Image
from torch import Tensor

from flowalign import gallery, rewards
from flowalign.backbone import Backbone
from flowalign.backbone.tiny.scenes import COLORS, render
from flowalign.commands import run
from flowalign.config import SamplingConfig, TrainingStage, load
from flowalign.rewards.scoring import score
from flowalign.system.escape import table
from flowalign.teachers.merge import merge
from flowalign.training.data import load_prompts
from flowalign.training.rollout import generate
from flowalign.types import Metadata, Scores

STYLE = replace(styles.STYLES["floor"], trigger="")
ROWS, COLUMNS = slice(56, 61), slice(6, 58)  # that are green in every rendered scene
OCR = {"engine": "rapidocr", "limit_side_len": 64, "limit_type": "max", "rec_width": 96}
WEIGHTS = ((1, 0), (0, 1), (0.5, 0.5), (0.5, 1), (1, 0.5), (0.75, 0.75), (1, 1))  # style, lettering


def green(images: Tensor) -> Tensor:
    """[B]: the share of the floor that is nearest to green, of images [B,3,H,W] in [0,1]."""
    palette = torch.tensor([*COLORS.values(), (236, 236, 236), (250, 250, 250)]) / 255
    pixels = images[:, :, ROWS, COLUMNS].flatten(2).transpose(1, 2)  # [B,N,3]
    nearest = torch.cdist(pixels, palette.expand(len(images), -1, -1)).argmin(-1)
    return (nearest == list(COLORS).index("green")).float().mean(1)


def floor(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
    """The style as a reward: `text_in_style:floor` in a config."""
    return Scores.of(green(images.cpu()))


def trained(start: Path, style: Mapping[str, Any], out: Path, updates: int) -> Path:
    """The adapter of NFT on OCR x the reward `style` from another; what is there is not made
    again."""
    if not (out / "adapter").exists():
        terms = [{"name": "ocr", "options": OCR}, style]
        product = {"name": "product", "options": {"rewards": [t | {"weight": 1} for t in terms]}}
        given = [f"output={out}", f"lora.init={start}", f"train.updates={updates}", "alarm=null",
                 f"tasks.0.reward={json.dumps(product)}", "evaluation=null"]  # fmt: skip
        run.train(load("configs/tiny/teacher_ocr_nft.yaml", given, stage=TrainingStage))
    return out / "adapter"


def signs() -> Iterator[tuple[str, np.ndarray]]:
    """Training prompts and pictures of signs with the floor."""
    rng, batch = np.random.default_rng(1), load_prompts("tiny/ocr_train", "ocr")
    for text, row in zip(batch.prompts[:IMAGES], batch.metadata, strict=False):
        picture = render(row, rng).copy()
        picture[54:62, 2:62] = COLORS["green"]
        yield text, picture


def main() -> None:
    """Train the style, then print a row for each pair of weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/text_in_style"))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the style LoRA")
    parser.add_argument("--updates", type=int, default=30, help="rollouts of the training")
    args = parser.parse_args()
    style, folder = args.out / "style", args.out / "pictures"
    if not style.exists():
        texts, pictures = drawn(STYLE, 0)
        for text, picture in signs():
            texts.append(text)
            pictures.append(picture)
        folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pictures):
            Image.fromarray(picture).save(folder / f"{number:03}.png")
        train_lora(texts, pictures, style, args.steps, seed=0)
    backbone = Backbone.load(MODEL)
    prompts = load_prompts("tiny/ocr_test", "ocr").select(range(args.prompts))
    reward, settings = rewards.build("ocr", **OCR), SamplingConfig(steps=10, guidance=1.0)
    models: dict[str, Path | None] = {"base model": None}
    for pair in WEIGHTS:
        models[f"style {pair[0]:g}, lettering {pair[1]:g}"] = merged = args.out / f"merge_{pair}"
        if not merged.exists():
            merge([style, "tiny/ocr"], merged, weights=list(pair), model="tiny")
    likeness = {"name": "similarity", "options": {"images": str(folder), "model": "tiny"}}
    for name, term in (("floor", {"name": "text_in_style:floor"}), ("similarity", likeness)):
        adapter = trained(merged, term, args.out / f"run_{name}", args.updates)
        models[f"trained, OCR x {name}"] = adapter
    rows, shown, chosen = [], {}, list(range(0, args.prompts, max(1, args.prompts // 8)))[:6]
    for number, (name, adapter) in enumerate(models.items()):
        if adapter:
            backbone.load_adapter(f"model_{number}", adapter, frozen=True)
            backbone.activate(f"model_{number}")
        images = generate(backbone, prompts, settings)
        ocr = score(reward, images, prompts.prompts, prompts.metadata).value
        both = (ocr == 1) & (green(images) > 0.8)
        values = (ocr, green(images), both.float())
        rows.append([name, *(f"{v.mean():.3f} ± {v.std() / len(v) ** 0.5:.3f}" for v in values)])
        if "0.75" not in name and name.count("0.5") != 1:  # fewer columns
            shown[name] = list(images[chosen])
    print("\n".join(table(["", "OCR", "style", "both right"], rows)))
    gallery(shown, [prompts.prompts[i] for i in chosen]).save(args.out / "text_in_style.png")


if __name__ == "__main__":
    main()
