"""One more task for a student of three: a teacher for it and ten rollouts of distillation, against
NFT.

    python benchmarks/one_more.py outputs/tiny/seed_{0,1,2}

Every folder holds a run of benchmarks/seeds.yaml. The fourth task asks for Noto's style with bare
prompts ("two dogs"); the base draws a quarter of them so. The student of the folder gets it in
three ways, each with as many forward passes: a teacher by NFT, then distillation from all four
teachers; NFT on the new task alone; NFT on all four tasks. Two more distil for longer: 40 rollouts,
and 100 of them at four times the learning rate and random noise levels. Writes FOLDER/one_more/, of
which `flowalign eval table` makes one table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import flowalign
from flowalign.backbone.tiny import PROMPTS
from flowalign.backbone.tiny.detector import TinyDetector
from flowalign.config import read
from flowalign.system.images import to_uint8
from flowalign.types import Metadata, Scores

CONFIGS = Path(__file__).parents[1] / "configs" / "tiny"
TASKS = ("geneval", "ocr", "preference")


def noto(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
    """The share of an image's drawings that are whole and in Noto's style."""
    detector = TinyDetector()
    drawings = [detector.describe(to_uint8(image)) for image in images]
    right = [[drawing.score > 0.5 and drawing.style == "noto" for drawing in d] for d in drawings]
    return Scores.of([sum(some) / max(1, len(some)) for some in right])


def write_prompts(folder: Path) -> dict[str, str]:
    """The objects of GenEval's task in bare words, by split."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split in ("train", "test"):
        lines = (PROMPTS / f"geneval_{split}.jsonl").read_text().splitlines()
        texts = [json.loads(line)["prompt"].removeprefix("a photo of ") for line in lines]
        file = folder / f"noto_{split}.txt"
        file.write_text("\n".join(texts) + "\n")
        files[split] = str(file)
    return files


def recipe(run: Path, seed: int, updates: int | None, limit: int) -> dict[str, Any]:
    """The config of all three ways, from the models of a seed. updates: None = those above."""
    reward = {"name": "one_more:noto"}
    files = write_prompts(run / "one_more" / "prompts")
    task = {"name": "noto", "prompts": files["train"], "reward": reward}
    old, judges = read(CONFIGS / "nft_mix.yaml")["tasks"], read(CONFIGS / "eval.yaml")["benchmarks"]
    teachers = {name: str(run / f"teacher_{name}" / "adapter") for name in TASKS}
    student = str(run / "student" / "adapter")
    nft = {"use": str(CONFIGS / "nft_mix.yaml"), "lora": {"init": student}, "evaluation": None}

    def train(usual: int) -> dict[str, Any]:
        return {"updates": updates or usual, "checkpoint_every": 25, "sample_every": 25}

    distilled = {
        "use": str(CONFIGS / "student_flow_opd.yaml"),
        "lora": {"init": student},
        "teachers": {
            name: {"adapter": adapter, "guidance": 1.0}
            for name, adapter in (teachers | {"noto": "stage:teacher_noto"}).items()
        },
        "tasks": [*old, task],
        "evaluation": None,
        "train": train(10),
    }
    faster = {
        "train": train(100),
        "optimizer": {"lr": 2e-3},
        "student": {"noise_levels": {"select": "random", "count": 1}},  # a style shows at low noise
    }
    benchmarks = [*judges, {"name": "noto", "prompts": files["test"], "reward": reward}]
    ways = ("teacher_noto", "nft_new", "nft_all", "distilled", "distilled_40", "distilled_100")
    models = {way: f"stage:{way}" for way in ways}
    size = {"height": 96, "width": 96, "max_sequence_length": 14}
    return {
        "stage": "recipe",
        "output": str(run / "one_more"),
        "seed": seed,
        "model": {"id": "tiny", "compile": True, **size},
        "stages": {
            "teacher_noto": {
                **nft,
                "lora": {"init": "tiny/guided"},
                "tasks": [task],
                "train": train(20),
            },
            "distilled": distilled,
            "distilled_40": distilled | {"train": train(40)},
            "distilled_100": distilled | faster,
            "nft_new": nft | {"tasks": [task], "train": train(25)},
            "nft_all": nft | {"tasks": [*old, task], "train": train(25)},
            "table": {
                "use": str(CONFIGS / "eval.yaml"),
                "benchmarks": [judge | {"limit": limit} for judge in benchmarks],
                "models": {"base": None, **models, "student": student},
                "compare": {"distilled": ["student", "nft_new", "nft_all"]},
                "fidelity": None,
                "alarm": None,
                "matrix": False,
            },
        },
    }


def main() -> None:
    """Run the recipe of every seed; what is there already is not made again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="outputs of benchmarks/seeds.yaml")
    parser.add_argument("--updates", type=int, help="of every stage, to try the script")
    parser.add_argument("--limit", type=int, default=200, help="test prompts of a task")
    args = parser.parse_args()
    for seed, run in enumerate(args.runs):
        flowalign.train(recipe(run.resolve(), seed, args.updates, args.limit))


if __name__ == "__main__":
    main()
