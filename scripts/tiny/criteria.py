"""What a base of the tiny world should be: able, and often wrong.

    python scripts/tiny/criteria.py FOLDER [--lora FOLDER] [--guidance 1 2.5] [--images 16]

For each task of the test prompts: the score of one image (mean over all), of the best of 2, 4, 8
and 16 images of a prompt, and for objects the score by tag and relation, and the share of images
with a malformed region (one that the detector is less sure of than GenEval's counting threshold).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import parts
import torch
from diffusers import StableDiffusion3Pipeline

from flowalign.backbone.tiny import PROMPTS
from flowalign.eval.geneval import judge
from flowalign.rewards import build
from flowalign.rewards.geneval import GenEval

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
    parser.add_argument("--normalizer", type=float, default=28.0, help="of the preference score")
    args = parser.parse_args()
    parts.quiet()
    pipe = StableDiffusion3Pipeline.from_pretrained(args.folder)
    pipe.set_progress_bar_config(disable=True)
    if args.lora:
        pipe.load_lora_weights(args.lora, weight_name="pytorch_lora_weights.safetensors")
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


if __name__ == "__main__":
    main()
