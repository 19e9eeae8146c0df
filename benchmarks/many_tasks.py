"""Three, six and twelve tasks that oppose each other: distilling against training on all rewards.

    python benchmarks/many_tasks.py outputs/tiny/seed_{0,1,2}

A folder holds what is made for one seed. All starts from tiny/guided. A task is a letter before
the prompt of two objects ("R a dog and a bus"), and wants one of three styles, one of two layouts
and one of two orders; twelve in all. The base hardly heeds the letter. Every task has a teacher by
NFT; for 3, 6 and 12 tasks a student is distilled from the average of its teachers, and NFT trains
on all rewards, for as many function evaluations, teachers included. Writes FOLDER/many_tasks/, of
which `flowalign eval table` makes one table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

from torch import Tensor

import flowalign
from flowalign.backbone.tiny.detector import Region, TinyDetector
from flowalign.backbone.tiny.drawings import CLASSES, STYLES
from flowalign.config import read
from flowalign.system.images import to_uint8
from flowalign.types import Metadata, Scores

CONFIGS = Path(__file__).parents[1] / "configs" / "tiny"
UPDATES = 24  # of a teacher: 64 images, 10 steps, 4 noise levels
DISTILLED = 8  # updates of a student for each of its tasks: 128 images, 10 steps, one noise level
# what holds NFT on all rewards of the tiny world (docs/results.md); it costs a pass of its own
LAGGING = {"old": {"decay": 0.9, "rise": 0.03}}
# function evaluations of an update, by 64 images: NFT, NFT that lags, a student (at most)
ALONE = 10 + 4 * 3
JOINT = 10 + 4 * 4
STUDENT = 2 * (10 + 1 + 1 + 2)
LETTERS = "ACDEILOPRSTN"
# the first three differ in style, the first six in style and layout
WANTED = {
    letter: {"style": style, "across": across, "swapped": swapped}
    for letter, (swapped, across, style) in zip(
        LETTERS, product((False, True), (True, False), STYLES), strict=True
    )
}


def wanted(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
    """The mean of three: the share of the drawings in the style, the layout, the order. An image
    without both objects, whole and once, has 0."""
    detector = TinyDetector()
    values = []
    for image, row in zip(images, metadata, strict=True):
        found = [drawing for drawing in detector.describe(to_uint8(image)) if drawing.score > 0.5]
        if sorted(drawing.name for drawing in found) != sorted(row["objects"]):
            values.append(0.0)
            continue
        first, second = sorted(found, key=lambda drawing: row["objects"].index(drawing.name))
        values.append(fitting(first, second, row))
    return Scores.of(values)


def fitting(first: Region, second: Region, row: Mapping[str, Any]) -> float:
    """Of two drawings, in the prompt's order."""
    apart = [second.box[i] + second.box[i + 2] - first.box[i] - first.box[i + 2] for i in (0, 1)]
    across = abs(apart[0]) > abs(apart[1])
    swapped = (apart[0] if across else apart[1]) < 0
    style = sum(drawing.style == row["style"] for drawing in (first, second)) / 2
    return (style + (across == row["across"]) + (swapped == row["swapped"])) / 3


def write_prompts(folder: Path) -> None:
    """LETTER_{train,val,test}.jsonl: of seven pairs of objects one is for testing, one to choose
    the best adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = list(permutations(CLASSES, 2))
    for letter, want in WANTED.items():
        lines = [
            json.dumps({"prompt": f"{letter} {text(a)} and {text(b)}", "objects": (a, b), **want})
            for a, b in pairs
        ]
        splits = {"test": lines[::7], "val": lines[1::7]}
        splits["train"] = [line for i, line in enumerate(lines) if i % 7 > 1]
        for split, some in splits.items():
            (folder / f"{letter}_{split}.jsonl").write_text("\n".join(some) + "\n")


def text(name: str) -> str:
    """With its article."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def recipe(run: Path, seed: int, counts: Sequence[int], updates: int, limit: int) -> dict[str, Any]:
    """The config of a seed. counts: numbers of tasks. updates: of a teacher."""
    out = run / "many_tasks"
    every = LETTERS[: max(counts)]
    write_prompts(out / "prompts")
    reward = {"name": "many_tasks:wanted"}

    def prompts(letter: str, split: str) -> dict[str, Any]:
        return {
            "name": letter,
            "prompts": str(out / "prompts" / f"{letter}_{split}.jsonl"),
            "reward": reward,
        }

    def task(letter: str) -> dict[str, Any]:
        val = str(out / "prompts" / f"{letter}_val.jsonl")
        return prompts(letter, "train") | {"validation": val}

    def train(letters: str, updates: int) -> dict[str, Any]:
        quarter = max(1, updates // 4)
        return {
            "tasks": [task(letter) for letter in letters],
            "train": {"updates": updates, "checkpoint_every": quarter, "sample_every": updates},
            "evaluation": {"every": quarter, "prompts": 16} if len(letters) > 1 else None,
        }

    def nft(letters: str, updates: int, **more: Any) -> dict[str, Any]:
        return {
            "use": str(CONFIGS / "nft_mix.yaml"),
            "lora": {"init": "tiny/guided"},
            "nft": {"noise_levels": 4, **more},
            "optimizer": {"lr": 1e-3},
            **train(letters, updates),
        }

    # a config's `use` keeps the teachers of the other, so that a student's is read and changed
    usual = {
        key: value
        for key, value in read(CONFIGS / "student_flow_opd.yaml").items()
        if key not in ("output", "seed", "model")
    }
    stages: dict[str, Any] = {f"teacher_{x}": nft(x, updates) for x in every}
    for count in counts:
        letters = LETTERS[:count]
        teachers = {x: f"stage:teacher_{x}" for x in letters}
        distilled = max(1, DISTILLED * count * updates // UPDATES)
        stages[f"merge_{count}"] = {
            "stage": "merge",
            "adapters": list(teachers.values()),
            "weights": [1 / count] * count,
        }
        stages[f"student_{count}"] = usual | {
            "lora": {"init": f"stage:merge_{count}"},
            "teachers": {x: {"adapter": a, "guidance": 1.0} for x, a in teachers.items()},
            "anchor": None,
            "student": usual["student"] | {"noise_levels": {"select": "random", "count": 1}},
            "optimizer": usual["optimizer"] | {"lr": 2e-3},  # slower ones mix tasks (one_more.py)
            **train(letters, distilled),
        }
        as_many = (count * updates * ALONE + distilled * STUDENT) // JOINT
        stages[f"nft_{count}"] = nft(letters, as_many, **LAGGING)
    models = {name: f"stage:{name}" for name in stages}
    stages[f"table_{len(every)}"] = {
        "use": str(CONFIGS / "eval.yaml"),
        "benchmarks": [prompts(letter, "test") | {"limit": limit} for letter in every],
        "models": {"base": None, "guided": "tiny/guided", **models},
        "fidelity": None,
        "alarm": None,
        "matrix": False,
    }
    size = {"height": 96, "width": 96, "max_sequence_length": 14}
    return {
        "stage": "recipe",
        "output": str(out),
        "seed": seed,
        "model": {"id": "tiny", "compile": updates > 1, **size},
        "stages": stages,
    }


def main() -> None:
    """Run the recipe of every seed; what is there already is not made again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="a folder for each seed")
    parser.add_argument("--counts", type=int, nargs="+", default=[3, 6, 12], help="of tasks")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of a teacher")
    parser.add_argument("--limit", type=int, default=72, help="test prompts of a task")
    args = parser.parse_args()
    for seed, run in enumerate(args.runs):
        flowalign.train(recipe(run.resolve(), seed, args.counts, args.updates, args.limit))


if __name__ == "__main__":
    main()
