"""Seconds an update, predicted by `flowalign doctor` and measured: `python benchmarks/pace.py`.

For every stage of the tiny world, and for a Stable Diffusion 3.5 of random weights at a sixth of
its width (62 million weights in the transformer). In each round the doctor's small run comes first,
and then the real one, without evaluations. `--cpu-time` counts seconds of CPU instead of wall time,
for a machine that other jobs share; `--rounds 2` says how much it varies.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import medium
import memory
from accelerate.state import AcceleratorState

from flowalign.commands import build
from flowalign.commands.doctor import live
from flowalign.commands.doctor.count import predict
from flowalign.commands.doctor.pace import times
from flowalign.config import TrainingStage, load, parse
from flowalign.training import metrics
from flowalign.training.report.progress import quiet

ROOT = Path(__file__).resolve().parent.parent
TINY = ("teacher_geneval", "teacher_ocr", "teacher_preference", "teacher_ocr_nft",
        "teacher_geneval_nft", "teacher_preference_awm", "grpo_mix", "sft",
        "student_flow_opd", "student_diffusion_opd", "student_dance_opd")  # fmt: skip
RANDOM = "random, 1/6 width"


def predicted(config: TrainingStage) -> float:
    """Seconds an update, as the doctor says it on this machine."""
    AcceleratorState._reset_state(reset_partial_state=True)
    findings, pace = live.examine(config)
    assert pace, [f.text for f in findings]
    return times(predict(config, device_type="cpu"), pace).update


def measured(config: TrainingStage, updates: int) -> float:
    """Mean seconds of the updates of a run but the first, which warms up."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"output={json.dumps(folder)}", f"train.updates={updates + 1}",
                   "train.trackers=[]"]  # fmt: skip
        run = parse(config.model_dump(mode="json") | {"evaluation": None}, changes)
        loop, *_ = build.wire(run)
        loop.log.on_update = lambda update, values: None
        loop.run()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    kinds = (metrics.SECONDS_ROLLOUT, metrics.SECONDS_SCORE, metrics.SECONDS_UPDATE)
    timed = [line for line in map(json.loads, lines) if metrics.SECONDS_UPDATE in line]
    return fmean(sum(line[kind] for kind in kinds) for line in timed[1:])


def configs(names: list[str], folder: Path) -> Iterator[tuple[str, TrainingStage]]:
    """The stages by name."""
    for name in names or [*TINY, RANDOM]:
        if name == RANDOM:
            model = medium.write(folder, 1 / 6)
            yield name, memory.settings(
                model, folder, "opd", "rollout.prompts=16", "rollout.copies=1", "rollout.steps=4",
                "rollout.guidance=1.0", "model.max_sequence_length=32", "teachers.a.guidance=1.0",
                "teachers.b.guidance=1.0", "anchor.guidance=1.0", "optimizer.micro_batch=4",
                "student.label_batch=4", size=128,
            )  # fmt: skip
        else:
            config = load(ROOT / "configs/tiny" / f"{name}.yaml")
            yield name, config.model_copy(update={"alarm": None})  # an update is predicted


def main() -> None:
    """Print a line for each stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join([*TINY, RANDOM])}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--updates", type=int, default=4, help="of the real run")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds of all threads")
    args = parser.parse_args()
    if args.cpu_time:  # the loop and the doctor ask this clock
        time.perf_counter = time.process_time
    quiet()
    logging.getLogger("flowalign").setLevel(logging.ERROR)
    print(f"{'stage':24} {'predicted s':>11} {'measured s':>11} {'error':>7}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs(args.names, Path(folder)):
            updates = min(3, args.updates) if name == RANDOM else args.updates
            for _ in range(args.rounds):
                began = time.perf_counter()
                expected, seen = predicted(config), measured(config, updates)
                print(f"{name:24} {expected:11.2f} {seen:11.2f} {expected / seen - 1:+7.0%}"
                      f"   ({time.perf_counter() - began:.0f} s)", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
