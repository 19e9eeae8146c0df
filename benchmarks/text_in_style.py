"""Correct text in a style that the lettering LoRA does not know: merges of both, by their weights.

    python benchmarks/text_in_style.py --out outputs/text_in_style

The style is a LoRA that draws a green floor below everything, trained here on 200 rendered shapes,
and with `--signs` on as many signs, too. The lettering is tiny/ocr. Scores are of sign prompts that
neither has seen: OCR, and the share of the floor that is green. Prints Markdown, writes
OUT/text_in_style.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from many_loras import IMAGES, MODEL, drawn, styles, train_lora
from torch import Tensor

from flowalign import gallery, rewards
from flowalign.backbone import Backbone
from flowalign.backbone.tiny.scenes import COLORS, render
from flowalign.config import SamplingConfig
from flowalign.rewards.scoring import score
from flowalign.system.escape import table
from flowalign.teachers.merge import merge
from flowalign.training.data import load_prompts
from flowalign.training.rollout import generate

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


def signs() -> Iterator[tuple[str, np.ndarray]]:
    """Training prompts and pictures of signs with the floor."""
    rng, batch = np.random.default_rng(1), load_prompts("tiny/ocr_train", "ocr")
    for text, metadata in zip(batch.prompts[:IMAGES], batch.metadata, strict=False):
        picture = render(metadata, rng).copy()
        picture[54:62, 2:62] = COLORS["green"]
        yield text, picture


def main() -> None:
    """Train the style, then print a row for each pair of weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/text_in_style"))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the style LoRA")
    parser.add_argument("--signs", action="store_true", help="train the style on signs, too")
    args = parser.parse_args()
    style = args.out / "style"
    if not style.exists():
        texts, pictures = drawn(STYLE, 0)
        for text, picture in signs() if args.signs else ():
            texts.append(text)
            pictures.append(picture)
        train_lora(texts, pictures, style, args.steps, seed=0)
    backbone = Backbone.load(MODEL)
    prompts = load_prompts("tiny/ocr_test", "ocr").select(range(args.prompts))
    reward, settings = rewards.build("ocr", **OCR), SamplingConfig(steps=10, guidance=1.0)
    rows, shown = [], {}
    for pair in [None, *WEIGHTS]:
        name = "base model"
        if pair is not None:
            name = f"style {pair[0]:g}, lettering {pair[1]:g}"
            folder = args.out / name.replace(", ", "_").replace(" ", "_")
            merge([style, "tiny/ocr"], folder, weights=list(pair), model="tiny")
            backbone.load_adapter(folder.name.replace(".", "_"), folder, frozen=True)
            backbone.activate(folder.name.replace(".", "_"))
        images = generate(backbone, prompts, settings)
        ocr, floor = score(reward, images, prompts.prompts, prompts.metadata).value, green(images)
        spread = [f"{v.mean():.3f} ± {v.std() / len(v) ** 0.5:.3f}" for v in (ocr, floor)]
        rows.append([name, *spread, f"{((ocr == 1) & (floor > 0.8)).float().mean():.2f}"])
        shown[name] = list(images[:: max(1, args.prompts // 8)][:8])
    print("\n".join(table(["", "OCR", "style", "both right"], rows)))
    captions = [prompts.prompts[i] for i in range(0, args.prompts, max(1, args.prompts // 8))][:8]
    gallery(shown, captions).save(args.out / "text_in_style.png")


if __name__ == "__main__":
    main()
