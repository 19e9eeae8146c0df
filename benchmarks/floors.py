"""Rollout, labels and update of a student, each as a multiple of its floor.

    python benchmarks/floors.py tiny medium

The floor of a part is the same number of rows through the bare transformer with the student's
adapter active (for the update: forward and backward pass), at the batch size where a row is
cheapest; the run has these batch sizes, too. Everything takes turns in one process, and medians of
the repeats are shown, so that a load on the machine meets all alike; on a busy one take `--clock
cpu`. `medium` is Stable Diffusion 3.5's structure at a sixth of its width, 70 million weights.

An update trains two states of every image; text is encoded, no images are decoded, and nothing is
scored. With several numbers after `--teachers` the prompts are spread evenly over so many. Wanted:
1.15 each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.state import AcceleratorState

sys.path.insert(0, str(Path(__file__).parent))
import medium  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SIZES = {  # how large an update is, so that it takes seconds
    "tiny": {"size": 64, "prompts": 128, "batches": (8, 16, 32, 64, 128)},
    "medium": {"size": 256, "prompts": 8, "batches": (1, 2, 4, 8)},
}
WINDOW = (6, 8)  # of ten steps: seven forward passes, and two states are trained
PARTS = ("rollout", "labels", "update")


def config_of(
    folder: Path,
    model: str,
    size: int,
    teachers: int,
    guidance: float,
    dtype: str,
    **batches: int,
) -> Any:
    """A student with so many teachers and an anchor. batches: rows of a forward pass."""
    from flowalign import config

    names, double = [f"t{index}" for index in range(teachers)], 1 if guidance == 1 else 2
    forward, learn = (max(1, batches[key] // double) for key in ("forward", "learn"))
    data = {
        "stage": "opd",
        "output": str(folder / "run"),
        "model": {"id": model, "dtype": dtype, "height": size, "width": size,
                  "max_sequence_length": 14},
        "tasks": [{"name": name, "prompts": "tiny/ocr_train"} for name in names],
        "teachers": {n: {"adapter": str(folder / n), "guidance": guidance} for n in names},
        "anchor": {"adapter": None, "guidance": guidance},
        "student": {"states": {"select": "all"}, "label_batch": forward},
        "rollout": {"steps": 10, "window": list(WINDOW), "guidance": guidance, "copies": 1,
                    "prompts": batches["prompts"], "batch_size": forward},
        "optimizer": {"micro_batch": learn},
        "train": {"updates": 10**6, "trackers": []},
        "evaluation": None,
    }  # fmt: skip
    return config.parse(data, [])


def wired(config: Any) -> Any:
    """The run of a config."""
    from flowalign.commands import build

    AcceleratorState._reset_state(reset_partial_state=True)
    loop, *_ = build.wire(config)
    loop.update = 1  # the same prompts and noise at each repeat; 0 would take diagnostics
    return loop


def bare(loop: Any, rows: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A forward pass of the transformer alone, and one with its backward pass."""
    backbone = loop.backbone
    core = backbone.core
    cond = backbone.encode(["a red car"] * rows)
    latents = torch.randn(rows, *backbone.latent_shape, dtype=backbone.dtype)
    text = {name: part[cond.index] for name, part in cond.text.items()}
    given = backbone.family.inputs(latents, torch.full((rows,), 0.5), text, 1.0)

    def forward() -> None:
        with torch.no_grad():
            core(**given, return_dict=False)

    def learn() -> None:
        core(**given, return_dict=False)[0].float().sum().backward()
        for parameter in loop.parameters:
            parameter.grad = None

    return forward, learn


def best(loop: Any, batches: tuple[int, ...], clock: Callable[[], float]) -> dict[str, int]:
    """The batch size at which a row is cheapest, of a forward pass and of one with backward."""
    found: dict[str, dict[int, float]] = {"forward": {}, "learn": {}}
    for rows in batches:
        for name, call in zip(found, bare(loop, rows), strict=True):
            call()
            found[name][rows] = min(timed(call, clock) for _ in range(3)) / rows
    return {name: min(each, key=lambda rows: each[rows]) for name, each in found.items()}


def timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of a call."""
    began = clock()
    call()
    return clock() - began


def measured(
    loop: Any, batches: dict[str, int], guidance: float, repeats: int, clock: Callable[[], float]
) -> dict[str, tuple[int, list[float], list[float]]]:
    """Rows of each part, seconds of its floor and of itself, repeat by repeat."""
    forward, _ = bare(loop, batches["forward"])
    _, learn = bare(loop, batches["learn"])
    images, states = loop.config.rollout.prompts, WINDOW[1] - WINDOW[0]
    double = 1 if guidance == 1 else 2
    rows = {
        "rollout": images * (WINDOW[1] - 1) * double,
        "labels": images * states * 2 * double,  # of the teacher and of the anchor
        "update": images * states * double,
    }
    found: dict[str, tuple[int, list[float], list[float]]] = {p: (rows[p], [], []) for p in PARTS}
    for repeat in range(repeats + 1):
        for name, call in medium.parts(loop):
            floor, size = (learn, batches["learn"]) if name == "update" else (
                forward, batches["forward"])  # fmt: skip
            count = max(1, rows[name] // size)
            seconds = timed(lambda f=floor, n=count: [f() for _ in range(n)], clock)
            took = timed(call, clock)
            if repeat:  # the first warms up
                found[name][1].append(seconds * rows[name] / (count * size))
                found[name][2].append(took)
    return found


def main() -> None:
    """Print a table for each model and number of teachers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(SIZES), metavar="tiny|medium")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--teachers", type=int, nargs="+", default=[3])
    parser.add_argument("--guidance", type=float, default=1.0, help="1 = no unconditional pass")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--width", type=float, default=1 / 6, help="of medium")
    parser.add_argument("--prompts", type=int, help="images of an update")
    args = parser.parse_args()
    from flowalign.config import ModelConfig
    from flowalign.training.report.progress import quiet

    quiet()
    clock = CLOCKS[args.clock]
    print("| model | teachers | part | rows | batch | floor (s) | took (s) | ratio | each repeat |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in args.models:
        given: dict[str, Any] = SIZES[name]
        prompts = args.prompts or given["prompts"]
        with TemporaryDirectory() as text:
            folder, names = Path(text), [f"t{index}" for index in range(max(args.teachers))]
            if name == "tiny":
                model = ModelConfig.model_validate({"id": "tiny", "height": 96, "width": 96})
                medium.write_adapters(folder, model, names, rank=32, alpha=64)
                path = "tiny"
            else:
                path = medium.write(folder, args.width, adapters=names)
            for teachers in args.teachers:
                shape = (folder, path, given["size"], teachers, args.guidance, args.dtype)
                start = config_of(*shape, prompts=prompts, forward=8, learn=8)
                batches = best(wired(start), given["batches"], clock)
                loop = wired(config_of(*shape, prompts=prompts, **batches))
                found = measured(loop, batches, args.guidance, args.repeats, clock)
                for part, (rows, floor, took) in found.items():
                    ratios = [t / f for t, f in zip(took, floor, strict=True)]
                    size = batches["learn" if part == "update" else "forward"]
                    middle = [statistics.median(values) for values in (floor, took, ratios)]
                    cells = [name, teachers, part, rows, size, *(f"{v:.3f}" for v in middle)]
                    cells.append(" ".join(f"{ratio:.2f}" for ratio in sorted(ratios)))
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
