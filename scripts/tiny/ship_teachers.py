"""Turn trained teachers into the adapters that the package ships as tiny/NAME.

    python scripts/tiny/ship_teachers.py geneval=RUN ocr=RUN preference=RUN --rank 16

Each run's adapter is brought to the rank (the best approximation of its update, layer by layer),
stored in fp16, and given a card. What the shipped ones score is in the README's table: they are
measured as any adapter is.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import yaml

from flowalign.backbone.adapters import read_lora, write_lora
from flowalign.backbone.tiny import TEACHERS
from flowalign.teachers.merge import merge

CARD = """---
library_name: diffusers
license: apache-2.0
base_model: tiny
tags: [lora, tiny, flowalign]
---

# tiny/{name}

A teacher of flowalign's tiny model: a LoRA trained by DiffusionNFT on one reward, in the run below,
then brought from rank {old} to {rank} (relative error of a layer's update: at most {worst:.2f}) and
stored in fp16.

    flowalign train --config configs/tiny/teacher_{name}_nft.yaml seed={seed}

On the validation prompts the run's own adapter has {score:.3f}, the base {base:.3f}.
"""


def ship(name: str, run: Path, rank: int) -> Path:
    """Write one teacher's folder."""
    folder = TEACHERS / name
    shutil.rmtree(folder, ignore_errors=True)
    report = merge([run / "adapter"], folder, method="svd", rank=rank)
    lora = read_lora(folder)
    halves = {key: value.half() for key, value in lora.weights.items()}
    metadata = {**lora.metadata, "base_model_name_or_path": "tiny"}
    write_lora(folder, halves, metadata, text_length=lora.text_length)
    config = yaml.safe_load((run / "config.yaml").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval/headline"] for row in rows if "eval/headline" in row]
    card = CARD.format(
        name=name, old=config["lora"]["rank"], rank=rank, worst=report.worst,
        seed=config["seed"], score=max(scores), base=scores[0],
    )  # fmt: skip
    (folder / "README.md").write_text(card)
    return folder


def main() -> None:
    """Ship the teachers named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="output folders of training")
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    for text in args.runs:
        name, _, run = text.partition("=")
        print(ship(name, Path(run), args.rank))


if __name__ == "__main__":
    main()
