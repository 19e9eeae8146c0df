"""What a base of the tiny world should be: able, and often wrong.

    python scripts/tiny/criteria.py FOLDER [--lora FOLDER] [--guidance 1 2.5] [--images 16]
    python scripts/tiny/criteria.py FOLDER --detector

For each task of the test prompts: the score of one image (mean over all), of the best of 2, 4, 8
and 16 images of a prompt, and for objects the score by tag and relation, and the share of images
with a malformed region (one that the detector is less sure of than GenEval's counting threshold).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import parts
import torch
from diffusers import StableDiffusion3Pipeline

from flowalign.backbone.tiny import PROMPTS, scenes
from flowalign.backbone.tiny.detector import TinyDetector
from flowalign.eval.geneval import judge
from flowalign.rewards import build
from flowalign.rewards.geneval import GenEval
from flowalign.system.images import to_uint8

CERTAIN = 0.9  # GenEval's threshold for counting
OCR = {"engine": "rapidocr", "limit_type": "max", "rec_width": 96}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", help="folder of an adapter")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tasks", nargs="+", default=["geneval", "ocr", "preference"])
    parser.add_argument("--split", default="test")
    parser.add_argument("--detector", action="store_true", help="judge the detector, not the model")
    parser.add_argument("--normalizer", type=float, default=28.0, help="of the preference score")
    args = parser.parse_args()
    parts.quiet()
    pipe = StableDiffusion3Pipeline.from_pretrained(args.folder)
    pipe.set_progress_bar_config(disable=True)
    if args.lora:
        pipe.load_lora_weights(args.lora, weight_name="pytorch_lora_weights.safetensors")
    if args.detector:
        return confusions(pipe.vae, args.split)
    best = [k for k in (1, 2, 4, 8, 16, 32) if k <= args.images]
    print(f"| task | guidance | {' | '.join(f'best of {k}' for k in best)} | besides |")
    print("|---" * (len(best) + 3) + "|")
    for task in args.tasks:
        lines = (PROMPTS / f"{task}_{args.split}.jsonl").read_text().splitlines()[: args.prompts]
        rows = [json.loads(line) for line in lines for _ in range(args.images)]
        texts = [row["prompt"] for row in rows]
        for guidance in args.guidance:
            images = parts.sample(pipe, texts, guidance, 1)
            besides = ""
            if task == "geneval":
                seen = GenEval("tiny").detector(images)
                pairs = zip(rows, seen, strict=True)
                scores = [float(judge(r, s.boxes, s.colors).correct) for r, s in pairs]
                torn = [
                    any(box[4] < CERTAIN for boxes in s.boxes.values() for box in boxes)
                    for s in seen
                ]
                besides = f"malformed {sum(torn) / len(torn):.3f}"
                kinds: dict[str, list[float]] = {}
                for row, score in zip(rows, scores, strict=True):
                    relation = row["include"][-1].get("position", [""])[0]
                    for kind in {row["tag"], relation or row["tag"]}:
                        kinds.setdefault(kind, []).append(score)
                besides += "".join(f", {k} {sum(v) / len(v):.2f}" for k, v in sorted(kinds.items()))
            elif task == "ocr":
                found = build("ocr", **OCR, limit_side_len=images.shape[-1])(images, texts, rows)
                scores = found.value.tolist()
                besides = f"exact {float(found.parts['exact'].mean()):.3f}"
            else:
                reward = build("pickscore", model="tiny", normalizer=args.normalizer)
                scores = reward(images, texts, rows).value.tolist()
            each = torch.tensor(scores).view(-1, args.images)
            cells = [f"{float(each.unfold(1, k, k).amax(-1).mean()):.3f}" for k in best]
            print(f"| {task} | {guidance:g} | {' | '.join(cells)} | {besides} |", flush=True)


@torch.no_grad()
def confusions(vae: Any, split: str) -> None:
    """Print what the detector makes of scenes with known drawings, five of each prompt."""
    lines = (PROMPTS / f"geneval_{split}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    keys = {number: key for key, number in scenes.drawings()[1].items()}
    clean = scenes.rendered(rows, seed=0, each=5)
    latents = [vae.encode(part * 2 - 1).latent_dist.mode() for part in clean.split(64)]
    decoded = torch.cat([vae.decode(part).sample for part in latents]) / 2 + 0.5
    print(
        "| scenes | drawings | class | colour | style | score above .9 | more regions | confused |"
    )
    print("|---" * 8 + "|")
    for kind, images in (("rendered", clean), ("decoded", decoded.clamp(0, 1))):
        right = torch.zeros(4)
        wrong = Counter[str]()
        extra = 0
        for number, image in enumerate(images):
            rng = np.random.default_rng([0, number // 5, number % 5])
            layers = [layer for layer in scenes.compose(rows[number // 5], rng) if layer[0]]
            found = TinyDetector().describe(to_uint8(image))
            extra += max(0, len(found) - len(layers))
            for sprite, left, top in layers:
                name, style, color = keys[sprite]
                near = min(found, key=lambda f: abs(f.box[0] - left) + abs(f.box[1] - top))
                same = near.name == name, color in (None, near.color), near.style == style
                right += torch.tensor([*same, near.score > CERTAIN])
                wrong[f"{name} as {near.name}"] += not same[0]
                wrong["drawings"] += 1
        total = wrong.pop("drawings")
        shares = " | ".join(f"{share:.4f}" for share in right / total)
        said = ", ".join(f"{text} {count}" for text, count in wrong.most_common() if count)
        print(f"| {kind} | {total} | {shares} | {extra} | {said or 'none'} |", flush=True)


if __name__ == "__main__":
    main()
