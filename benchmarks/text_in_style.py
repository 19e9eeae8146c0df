"""Correct text in a style that the lettering LoRA does not know: merges of both, by their weights,
and training that starts from one of them.

    python benchmarks/text_in_style.py --out outputs/text_in_style

The style is a LoRA that draws a purple frame around everything, trained here on 200 rendered scenes
and as many signs. The lettering is tiny/ocr. The training is NFT from the merge of full weights, on
the product of OCR and a score of the style: the share of the frame that is purple, or `similarity`
to the pictures that the style was trained on. Scores are of sign prompts that none has seen: OCR,
and the purple share. Prints Markdown, writes OUT/text_in_style.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from many_loras import IMAGES, MODEL, scenes, styles, train_lora
from PIL import Image
from torch import Tensor

from flowalign import gallery, rewards
from flowalign.backbone import Backbone
from flowalign.backbone.tiny.scenes import SIZE
from flowalign.commands import run
from flowalign.config import SamplingConfig, TrainingStage, load
from flowalign.rewards.scoring import score
from flowalign.system.images import to_uint8
from flowalign.system.table import Table
from flowalign.teachers.merge import merge
from flowalign.training.data import load_prompts
from flowalign.training.rollout import generate
from flowalign.types import Metadata, Scores

STYLE = styles.STYLES["frame"]  # without its trigger
RIM = torch.ones(SIZE, SIZE, dtype=torch.bool)
RIM[4:-4, 4:-4] = False  # purple in every scene of the style
OCR = {"engine": "rapidocr", "limit_side_len": 96, "limit_type": "max", "rec_width": 96}
WEIGHTS = ((1, 0), (0, 1), (0.5, 0.5), (0.5, 1), (1, 0.5), (0.75, 0.75), (1, 1))  # style, lettering


def purple(images: Tensor) -> Tensor:
    """[B]: the share of the rim that is nearer to the frame's colour than to paper, of images
    [B,3,H,W] in [0,1]."""
    colors = torch.tensor([styles.FRAME, (0.93, 0.93, 0.93)])
    pixels = images.permute(0, 2, 3, 1)[:, RIM]  # [B,N,3]
    nearest = torch.cdist(pixels, colors.expand(len(images), -1, -1)).argmin(-1)
    return (nearest == 0).float().mean(1)


def frame(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
    """The style as a reward: `text_in_style:frame` in a config."""
    return Scores.of(purple(images.cpu()))


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
        rows = scenes("train", IMAGES, 0)
        signs = load_prompts("tiny/ocr_train", "ocr").select(range(IMAGES))
        pictures = torch.cat([STYLE.draw(rows, 0), STYLE.draw(signs.metadata, 1)])
        texts = [*(row["prompt"] for row in rows), *signs.prompts]
        folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pictures):
            Image.fromarray(to_uint8(picture)).save(folder / f"{number:03}.png")
        train_lora(texts, pictures, style, args.steps, seed=0)
    backbone = Backbone.load(MODEL)
    prompts = load_prompts("tiny/ocr_test", "ocr").select(range(args.prompts))
    reward = rewards.build("ocr", **OCR)
    settings = SamplingConfig(steps=10, guidance=1.0)
    models: dict[str, Path | None] = {"base model": None}
    for pair in WEIGHTS:
        models[f"style {pair[0]:g}, lettering {pair[1]:g}"] = merged = args.out / f"merge_{pair}"
        if not merged.exists():
            merge([style, "tiny/ocr"], merged, weights=list(pair), model="tiny")
    likeness = {"name": "similarity", "options": {"images": str(folder), "model": "tiny"}}
    for name, term in (("frame", {"name": "text_in_style:frame"}), ("similarity", likeness)):
        adapter = trained(merged, term, args.out / f"run_{name}", args.updates)
        models[f"trained, OCR x {name}"] = adapter
    rows = []
    shown = {}
    chosen = list(range(0, args.prompts, max(1, args.prompts // 8)))[:6]
    for number, (name, adapter) in enumerate(models.items()):
        if adapter:
            backbone.load_adapter(f"model_{number}", adapter, frozen=True)
            backbone.activate(f"model_{number}")
        images = generate(backbone, prompts, settings)
        ocr = score(reward, images, prompts.prompts, prompts.metadata).value
        both = (ocr == 1) & (purple(images) > 0.8)
        values = (ocr, purple(images), both.float())
        rows.append([name, *(f"{v.mean():.3f} ± {v.std() / len(v) ** 0.5:.3f}" for v in values)])
        if "0.75" not in name and name.count("0.5") != 1:  # fewer columns
            shown[name] = list(images[chosen])
    print(Table(["", "OCR", "style", "both right"], rows).markdown())
    gallery(shown, [prompts.prompts[i] for i in chosen]).save(args.out / "text_in_style.png")


if __name__ == "__main__":
    main()
