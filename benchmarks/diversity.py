"""How many ways does a model draw a prompt? `python benchmarks/diversity.py NAME=ADAPTER ...`.

Draws eight images of 96 test prompts of each task on the tiny world. Prints for each model the
distance between the images of a prompt (1 - mean cosine of the tiny encoder's features, by task),
and of GenEval's prompts the share of pairs of right images whose layouts differ. A layout is where
the objects are: the third of the image, across and down, of each. Wrong images do not count there,
since a model that errs more would have more layouts. `NAME=` is the base; `NAME=ADAPTER@2` is
sampled at CFG 2. A finished evaluation is not made again. --picture FILE draws the images of each
task's first prompt.
"""

from __future__ import annotations

import argparse
import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flowalign
from flowalign.backbone.tiny.detector import TinyDetector
from flowalign.config import read
from flowalign.report.pictures import Block, Row, comparison
from flowalign.rewards.geneval import GenEval
from flowalign.system.images import pixels_of
from flowalign.types import Metadata, Scores

COPIES = 8
SIZE, CELLS = 96, 3  # pixels of an image, cells of its side


def layouts(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
    """Value: 1 for a right image. Part "layout": a number that is the same for equal layouts."""
    numbers = []
    for found in TinyDetector()(images):
        objects = sorted(
            (name, *(int(CELLS * (box[i] + box[i + 2]) / 2 / SIZE) for i in (0, 1)))
            for name, boxes in found.boxes.items()
            for box in boxes
        )
        numbers.append(zlib.crc32(str(objects).encode()) % 2**24)  # exact in float32
    right = GenEval("tiny", "official")(images, prompts, metadata).value
    return Scores.of(right, layout=torch.tensor(numbers))


def config(args: argparse.Namespace) -> dict[str, Any]:
    """The evaluation of the models."""
    models: dict[str, str | None] = {}
    guidance: dict[str, float] = {}
    for text in args.models:
        name, _, rest = text.partition("=")
        adapter, _, scale = rest.partition("@")
        models[name] = adapter or None
        if scale:
            guidance[name] = float(scale)
    data = read("configs/tiny/eval.yaml")
    benchmarks = []
    for benchmark in data["benchmarks"]:
        judges: dict[str, Any] = {"diversity": {"name": "diversity", "options": {"model": "tiny"}}}
        if benchmark["name"] == "geneval":
            judges["layouts"] = {"name": "diversity:layouts"}
        shared = {"name": benchmark["name"], "prompts": benchmark["prompts"]}
        benchmarks.append({**shared, "limit": args.prompts, "images": COPIES, "rewards": judges})
    changes = {
        "output": str(args.out),
        "models": models,
        "guidance": guidance,
        "benchmarks": benchmarks,
    }
    return data | changes | {"matrix": False, "fidelity": None, "alarm": None}


def mean(values: Iterable[float]) -> str:
    """Mean and standard error of one number a prompt."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return "-"
    return f"{statistics.fmean(known):.3f} ± {statistics.stdev(known) / len(known) ** 0.5:.3f}"


def by_prompt(rows: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    return [rows[start : start + COPIES] for start in range(0, len(rows), COPIES)]


def differing(images: Sequence[dict[str, Any]]) -> float:
    """The share of pairs of a prompt's right images whose layouts differ; NaN without a pair."""
    found = [image["layout"] for image in images if image["value"] == 1]
    pairs = [*combinations(found, 2)]
    return statistics.fmean(a != b for a, b in pairs) if pairs else math.nan


def block(folder: Path, task: str, models: Mapping[str, Any]) -> Block:
    """The images of a task's first prompt, a row for each model."""
    rows = []
    for name, model in models.items():
        first = model["images"][f"{task}_diversity"][0]
        files = sorted((folder / "images" / name / task).glob("*.png"))[:COPIES]
        images = [pixels_of(path.read_bytes()) for path in files]
        rows.append(Row(images, [""] * COPIES, name.replace("_", " ")))
    return Block(f"{task}: {first['prompt']}", [""] * COPIES, rows)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="NAME=ADAPTER[@CFG]")
    parser.add_argument("--prompts", type=int, default=96, help="of each task")
    parser.add_argument("--out", type=Path, default=Path("outputs/diversity"))
    parser.add_argument("--picture", type=Path, help="a PNG")
    args = parser.parse_args()
    found = flowalign.train(config(args)).results["models"]
    print("| model | GenEval | OCR | preference | layouts of right images that differ |")
    print("|---|---|---|---|---|")
    for name, model in found.items():
        images = model["images"]
        distances = (
            mean(statistics.fmean(i["value"] for i in rows) for rows in by_prompt(images[key]))
            for key in ("geneval_diversity", "ocr_diversity", "preference_diversity")
        )
        layout = mean(map(differing, by_prompt(images["geneval_layouts"])))
        print(f"| {name} | {' | '.join(distances)} | {layout} |")
    if args.picture:
        tasks = ("geneval", "ocr", "preference")
        comparison(args.picture, [block(args.out, task, found) for task in tasks])


if __name__ == "__main__":
    main()
