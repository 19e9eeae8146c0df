"""Turn trained adapters into those that the package ships as tiny/NAME.

    python scripts/tiny/ship_teachers.py guided=RUN --rank 32
    python scripts/tiny/ship_teachers.py geneval=RUN ocr=RUN preference=RUN --rank 24

Each run's adapter is brought to the rank (the best approximation of its update, layer by layer),
stored in fp16, and given a card. What the shipped ones score is in the README's table: they are
measured as any adapter is.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import yaml

from flowalign.backbone.adapters import read_lora, write_lora
from flowalign.backbone.tiny import TEACHERS
from flowalign.teachers.merge import merge
from flowalign.training.report.results import evaluations, kept

CARD = """---
library_name: diffusers
license: apache-2.0
base_model: tiny
tags: [lora, tiny, flowalign]
---

# tiny/{name}

{what}

    flowalign train --config configs/tiny/{config}.yaml seed={seed}

Its run had rank {old}. It is stored in fp16 with rank {rank} (relative error of a layer's update:
at most {worst:.2f}).{scores}
"""
GUIDED = """A LoRA on flowalign's tiny model that has absorbed its classifier-free guidance. It was
trained by Flow-OPD with the base at CFG scale 2 as the only teacher:"""
TEACHER = """A teacher of flowalign's tiny model: a LoRA trained by DiffusionNFT on one reward. It
started from tiny/guided:"""


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
    scores = [row["eval/headline"] for row in evaluations(run)]
    own = chosen.row["eval/headline"] if (chosen := kept(run)) else float("nan")
    said = f" Held-out score: {own:.3f}, of tiny/guided {scores[0]:.3f}." if scores else ""
    card = CARD.format(
        name=name,
        what=TEACHER if scores else GUIDED,
        config=f"teacher_{name}_nft" if scores else name,
        seed=config["seed"],
        old=max(read_lora(run / "adapter").ranks.values()),
        rank=rank,
        worst=report.worst,
        scores=said,
    )
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
