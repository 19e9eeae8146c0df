"""What labels and further teachers cost an update of the student.

    python benchmarks/label_cost.py --repeats 5

The same update (rollout, labels, gradient step; no evaluation) of
configs/tiny/student_flow_opd.yaml without MAR, with 1, 2, 4 and 8 distinct teachers, the prompts
spread evenly over them, and
without any label (the student is pulled towards zeros). The variants take turns within a repeat,
so that a change in the machine's speed meets all of them; medians of the repeats are compared.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flowalign import train
from flowalign.backbone import Backbone
from flowalign.config import OpdConfig, load, parse
from flowalign.loop import Loop
from flowalign.types import Rollout, TeacherLabel

PRESET = "configs/tiny/student_flow_opd.yaml"
COUNTS = (1, 2, 4, 8)


def teachers(folder: Path, count: int, rank: int) -> dict[str, str]:
    """Adapters with random weights: what they say does not matter here."""
    config = load(PRESET, stage=OpdConfig)
    backbone = Backbone.load(config.model)
    found = {}
    for index in range(count):
        name = f"t{index}"
        backbone.add_adapter(name, rank=rank, alpha=2.0 * rank, targets=config.lora.targets)
        for parameter in backbone.adapter_parameters(name):
            torch.nn.init.normal_(parameter, std=0.02)
        found[name] = str(folder / name)
        backbone.save_adapter(name, found[name])
    return found


def loop_of(paths: dict[str, str], count: int, folder: Path, overrides: list[str]) -> Loop:
    """A run with `count` teachers; 0 labels with zeros, at no forward pass."""
    config = load(PRESET, [f"output={folder}", "anchor=null", *overrides], stage=OpdConfig)
    names = list(paths)[: max(count, 1)]
    data = config.model_dump(mode="json")
    prompts = [task.prompts for task in config.tasks]
    data["teachers"] = {name: {"adapter": paths[name]} for name in names}
    data["tasks"] = [
        {"name": name, "prompts": prompts[i % len(prompts)]} for i, name in enumerate(names)
    ]
    data |= {"evaluation": None, "train": {**data["train"], "trackers": [], "updates": 10**6}}
    loop, *_ = train.wire(parse(data, stage=OpdConfig))
    if count == 0:

        def nothing(rollout: Rollout) -> TeacherLabel:
            zeros = torch.zeros_like(rollout.states, dtype=torch.bfloat16)
            return TeacherLabel(zeros, rollout.batch.tasks)

        loop.algorithm.teachers = nothing  # pyright: ignore[reportAttributeAccessIssue]
    loop.algorithm.settings = loop.algorithm.settings.model_copy(  # pyright: ignore
        update={"diagnose_every": 10**9}
    )
    return loop


def main() -> None:
    """Measure, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    from flowalign.progress import quiet

    quiet()
    with TemporaryDirectory() as folder:
        paths = teachers(Path(folder), max(COUNTS), args.rank)
        loops = {
            count: loop_of(paths, count, Path(folder) / f"run{count}", args.overrides)
            for count in (0, *COUNTS)
        }
        seconds: dict[int, list[float]] = {count: [] for count in loops}
        for repeat in range(args.repeats + 1):
            for count, loop in loops.items():
                loop.update = repeat + 1  # the same prompts and states for all; 0 would diagnose
                began = time.perf_counter()
                loop._one_update()
                seconds[count] += [time.perf_counter() - began] if repeat else []
    size = sum(
        p.numel() * p.element_size() for p in loops[1].backbone.adapter_parameters("teacher_t0")
    )
    median = {count: statistics.median(values) for count, values in seconds.items()}
    print("| teachers | seconds an update | to no labels | to one teacher |\n|---|---|---|---|")
    for count, value in median.items():
        print(f"| {count} | {value:.2f} | x {value / median[0]:.3f} | x {value / median[1]:.3f} |")
    print(f"\nA further teacher of rank {args.rank} is {size / 2**20:.2f} MiB of weights.")


if __name__ == "__main__":
    main()
