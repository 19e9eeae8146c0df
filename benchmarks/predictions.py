"""What `flowalign doctor` predicts, beside what is measured: the peak of memory, and seconds.

    python benchmarks/predictions.py memory --width 0.125
    python benchmarks/predictions.py pace --cpu-time

memory: a Stable Diffusion 3.5 Medium of random weights at a share of its width runs one update of
each kind; on a GPU the peak is torch's own count, on a CPU that of every allocation in a profile.
`--width 1` is the real size (14 GB of disk for the random weights).

pace: every stage of the tiny world, and a Medium of random weights at a sixth of its width (62
million in the transformer). In each round the doctor's small run comes first, and then the real
one, without evaluations. `--cpu-time` counts seconds of CPU instead of wall time, for a machine
that other jobs share; `--rounds 2` says how much it varies.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import gpu
import torch
from accelerate.state import AcceleratorState

from flowalign import config
from flowalign.commands import build
from flowalign.commands.doctor import live
from flowalign.commands.doctor.count import predict
from flowalign.commands.doctor.meter import size_of
from flowalign.commands.doctor.pace import times
from flowalign.report.progress import quiet
from flowalign.training import metrics
from flowalign.training.loop import Loop

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PROMPTS = "tiny/geneval_train"
CASES = {
    "opd": [],
    "opd, checkpointing": ["model.gradient_checkpointing=true"],
    "opd, micro-batch 4": ["optimizer.micro_batch=4"],
    "opd, beyond its teachers": [f"teachers.{name}.extrapolate=1.5" for name in "ab"],
    "grpo": [],
    "grpo, checkpointing": ["model.gradient_checkpointing=true"],
    "grpo, batches of 2": ["rollout.batch_size=2", "optimizer.micro_batch=1"],
    "nft": [],
    "nft, old policy and KL": ["nft.old.decay=0.5", "nft.old.rise=0.5", "nft.kl_weight=1e-4"],
    "nft, many noise levels": [
        "nft.noise_levels=24",
        "optimizer.micro_batch=1",
        "rollout.solver=dpm2",
    ],
    "awm": [],
    "awm, average and KL": [
        "awm.ema_kl_weight=1.0",
        "awm.kl_weight=1e-4",
        "optimizer.updates_per_rollout=2",
    ],
    "gradient": ["gradient.batch=2"],
    "gradient, checkpointing": ["gradient.batch=2", "model.gradient_checkpointing=true"],
}
TINY = ("teacher_geneval", "teacher_ocr", "teacher_preference", "teacher_ocr_nft",
        "teacher_geneval_nft", "teacher_preference_awm", "grpo_mix", "sft",
        "student_flow_opd", "student_diffusion_opd", "student_dance_opd")  # fmt: skip
RANDOM = "random, 1/6 width"


def settings(
    model: str, folder: Path, kind: str, *changes: str, size: int = 512, prompts: str = PROMPTS
) -> Any:
    """An update of 4 images with guidance: two LoRA teachers and an anchor, or a reward."""
    task = {"name": "a", "prompts": prompts, "reward": {"name": "geneval", "options": {}}}
    data: dict[str, Any] = {
        "stage": kind,
        "output": str(folder / "run"),
        "model": {"id": model, "height": size, "width": size, "max_sequence_length": 128},
        "tasks": [task],
        "rollout": {"steps": 3, "guidance": 4.5, "prompts": 2, "group_size": 2, "batch_size": 4},
        "optimizer": {"micro_batch": 2},
        "train": {"updates": 2, "trackers": []},
        "evaluation": None,
    }
    if kind == "opd":
        data["tasks"] = [task, {**task, "name": "b"}]
        data["teachers"] = {n: {"adapter": str(folder / n), "guidance": 4.5} for n in "ab"}
        data["anchor"] = {"adapter": None, "guidance": 4.5}
        student = {"weighting": "kl", "noise_levels": {"select": "all"}}  # the most there is
        data["student"] = student
    if kind in ("nft", "awm", "gradient"):
        data["rollout"]["kind"] = "ode"
    if kind == "gradient":
        task["reward"] = {"name": "pickscore", "options": {"model": "tiny"}}
    return config.parse(data, changes)


def footprint(found: config.TrainingStage) -> dict[str, int]:
    """Bytes: what lies there all the time, and the peak of the phases of a second update."""
    AcceleratorState._reset_state(reset_partial_state=True)
    loop, *_ = build.wire(found)
    once(loop)  # Adam's moments come into being
    of_adam = [t for state in loop.step.optimizer.state.values() for t in state.values()]
    moments = [tensor for tensor in of_adam if tensor.numel() > 1]
    average = loop.step.ema.shadow_params if loop.step.ema else []
    pipe = loop.backbone.pipe
    resident = size_of(loop.backbone.core, pipe.vae, *loop.backbone.family.encoders)
    resident += sum(t.numel() * t.element_size() for t in [*moments, *average])
    # the policies of nft and awm are adapters of the transformer, which is in the sum above
    return {"resident": resident, **dict(phases(loop))}


def compared(found: config.TrainingStage, device_type: str) -> dict[str, tuple[int, int]]:
    """(measured, predicted) bytes: what lies there, the phases' own, and the peak of all."""
    seen = footprint(found)
    expected = predict(found, device_type=device_type)
    each = {phase.name: phase.bytes for phase in expected.phases}
    sampling = max(each.pop(n, 0) for n in ("text", "rollout", "VAE decode"))
    each["labels"] = max(each.pop(name, 0) for name in ("labels", "noising", "reward gradient"))
    foreseen = {"resident": expected.resident, "rollout": sampling, **each}
    peak = seen["resident"] + max(v for k, v in seen.items() if k != "resident")
    pairs = {k: (v, foreseen[k]) for k, v in seen.items() if foreseen.get(k)}
    return pairs | {"PEAK": (peak, expected.peak)}


def once(loop: Loop) -> None:
    """An update of the loop."""
    rollout = loop.rollout(0)
    loop.learn(loop.algorithm.prepare(rollout, 0))


def phases(loop: Loop) -> Iterator[tuple[str, int]]:
    """The peak of each phase of an update, over what is there all the time."""
    rollout, held = peak(loop.backbone.device, lambda: loop.rollout(1))
    yield "rollout", held
    kept = held_by(rollout, rollout.conditioning)
    prepared, held = peak(loop.backbone.device, lambda: loop.algorithm.prepare(rollout, 1))
    yield "labels", kept + held
    kept = held_by(rollout, rollout.conditioning, prepared, prepared.rollout)
    _, held = peak(loop.backbone.device, lambda: loop.learn(prepared))
    yield "update", kept + held


def held_by(*objects: Any) -> int:
    """Bytes of the tensors that are attributes of some objects, or in a mapping that is one;
    shared ones count once."""
    values = [v for o in objects for v in vars(o).values()]
    mappings = [value for value in values if isinstance(value, Mapping)]
    inside = [value for mapping in mappings for value in mapping.values()]
    each = [v for v in (*values, *inside) if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in {t.data_ptr(): t for t in each}.values())


def peak(device: torch.device, call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call gives, and the bytes that it held at most beyond those of before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = call()
        return found, torch.cuda.max_memory_allocated() - before
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        found = call()
    assert profile.profiler and profile.profiler.kineto_results
    now = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        most = max(most, now)
    return found, most


def predicted(stage: config.TrainingStage) -> float:
    """Seconds an update, as the doctor says it on this machine."""
    AcceleratorState._reset_state(reset_partial_state=True)
    findings, pace = live.examine_stage(stage)
    assert pace, findings
    return times(predict(stage, device_type="cpu"), pace).update


def measured(stage: config.TrainingStage, updates: int) -> float:
    """Mean seconds of the updates of a run but the first, which warms up."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"output={json.dumps(folder)}", f"train.updates={updates + 1}",
                   "train.trackers=[]"]  # fmt: skip
        run = config.parse(stage.model_dump(mode="json") | {"evaluation": None}, changes)
        loop, progress = build.wire(run)
        progress.main = False  # silent
        loop.run()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    kinds = (metrics.SECONDS_ROLLOUT, metrics.SECONDS_SCORE, metrics.SECONDS_UPDATE)
    timed = [line for line in map(json.loads, lines) if metrics.SECONDS_UPDATE in line]
    return fmean(sum(line[kind] for kind in kinds) for line in timed[1:])


def stages(names: list[str], folder: Path) -> Iterator[tuple[str, config.TrainingStage]]:
    """The stages by name."""
    for name in names or [*TINY, RANDOM]:
        if name == RANDOM:
            model = gpu.write(folder, 1 / 6)
            yield name, settings(
                model, folder, "opd", "rollout.prompts=16", "rollout.group_size=1",
                "rollout.steps=4", "rollout.guidance=1.0", "model.max_sequence_length=32",
                "teachers.a.guidance=1.0", "teachers.b.guidance=1.0", "anchor.guidance=1.0",
                "optimizer.micro_batch=4", "student.label_batch=4", size=128,
            )  # fmt: skip
        else:
            stage = config.load(CONFIGS / "tiny" / f"{name}.yaml", stage=config.TrainingStage)
            yield name, stage.model_copy(update={"alarm": None})  # an update is predicted


def show_memory(args: argparse.Namespace) -> None:
    """Print a row for each phase of each case."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{'MiB':24}{'phase':12}{'measured':>10}{'predicted':>10}{'error':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = gpu.write(Path(folder), args.width, args.layers)
        for case in args.cases:
            kind = case.split(",")[0]
            found = settings(model, Path(folder), kind, *CASES[case], size=args.size)
            for name, (seen, foreseen) in compared(found, device).items():
                row = f"{seen / 2**20:10.1f}{foreseen / 2**20:10.1f}{foreseen / seen - 1:+8.1%}"
                print(f"{case:24}{name:12}{row}", flush=True)


def show_pace(args: argparse.Namespace) -> None:
    """Print a line for each round of each stage."""
    if args.cpu_time:  # the loop and the doctor ask this clock
        time.perf_counter = time.process_time
    print(f"{'stage':24} {'predicted s':>11} {'measured s':>11} {'error':>7}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, stage in stages(args.names, Path(folder)):
            updates = min(3, args.updates) if name == RANDOM else args.updates
            for _ in range(args.rounds):
                expected = predicted(stage)
                seen = measured(stage, updates)
                print(f"{name:24} {expected:11.2f} {seen:11.2f} {expected / seen - 1:+7.0%}",
                      flush=True)  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    memory = commands.add_parser("memory")
    memory.set_defaults(show=show_memory)
    memory.add_argument("--width", type=float, default=0.125)
    memory.add_argument("--layers", type=int)
    memory.add_argument("--size", type=int, default=512, help="pixels")
    memory.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    pace = commands.add_parser("pace")
    pace.set_defaults(show=show_pace)
    pace.add_argument("names", nargs="*", help=f"of {', '.join([*TINY, RANDOM])}")
    pace.add_argument("--rounds", type=int, default=1)
    pace.add_argument("--updates", type=int, default=4, help="of the real run")
    pace.add_argument("--cpu-time", action="store_true", help="count CPU seconds of all threads")
    args = parser.parse_args()
    quiet()
    logging.getLogger("flowalign").setLevel(logging.ERROR)
    args.show(args)


if __name__ == "__main__":
    main()
