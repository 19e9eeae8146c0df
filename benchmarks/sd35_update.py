"""An update of Flow-OPD on a model of Stable Diffusion 3.5's exact structure, with random weights.

    python benchmarks/sd35_update.py                              # on a GPU: the whole model, 2.2B
    python benchmarks/sd35_update.py --width 0.125 --prompts 4    # on a CPU: an eighth of its heads

Rollout, labels of N LoRA teachers and of the anchor, forward and backward pass and optimizer step
of configs/sd35_medium/student_flow_opd_paper.yaml, with small text encoders of the right output
sizes; no evaluation, no reward. For each number of teachers, in a process of its own: seconds of
each part (the second update; the first warms up), images a second, the peak of memory, what
`flowalign doctor` predicts, and the share that the counted operations are of the device's measured
rate of matrix products. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flowalign import train
from flowalign.architectures import find, pipeline
from flowalign.backbone import DTYPES, Backbone
from flowalign.config import OpdConfig, load, parse
from flowalign.doctor.budget import matmul_rate
from flowalign.estimate import predict

CONFIG = "configs/sd35_medium/student_flow_opd_paper.yaml"
MIB = 2**20


def write_model(folder: Path, config: OpdConfig, width: float, teachers: int) -> None:
    """A pipeline of random weights, and LoRAs on it."""
    pipe = pipeline(find(config.model.id).scaled(width))
    pipe.to(DTYPES[config.model.dtype]).save_pretrained(folder / "model")
    model = config.model.model_copy(update={"id": str(folder / "model")})
    backbone, lora = Backbone.load(model), config.lora
    for index in range(teachers):
        backbone.add_adapter(
            name := f"t{index}", rank=lora.rank, alpha=lora.alpha, targets=lora.targets
        )
        for parameter in backbone.adapter_parameters(name):
            torch.nn.init.normal_(parameter, std=0.02)
        backbone.save_adapter(name, folder / name)


def config_of(folder: Path, teachers: int, overrides: list[str]) -> OpdConfig:
    """The preset with these teachers, each with a task of the tiny world's prompts."""
    config = load(
        CONFIG, [f"output={folder / 'run'}", "evaluation=null", *overrides], stage=OpdConfig
    )
    names = [f"t{index}" for index in range(teachers)]
    data = config.model_dump(mode="json")
    data["model"] |= {"id": str(folder / "model"), "text_cache": str(folder / "text")}
    guidance = config.guidance_of(next(iter(config.teachers.values())))
    data["teachers"] = {n: {"adapter": str(folder / n), "guidance": guidance} for n in names}
    data["tasks"] = [{"name": n, "prompts": "tiny/ocr_train"} for n in names]
    data["train"] |= {"trackers": [], "updates": 3, "sample_every": 10**6}
    return parse(data, stage=OpdConfig)


def measured(config: OpdConfig, device: str) -> dict[str, Any]:
    """Seconds of the parts of an update, the peak of memory, and what was predicted."""
    estimate = predict(config, device_type=device)
    loop, *_ = train.wire(config)
    settings = loop.algorithm.settings.model_copy(update={"diagnose_every": 10**9})  # pyright: ignore
    loop.algorithm.settings = settings  # pyright: ignore[reportAttributeAccessIssue]
    seconds: dict[str, float] = {}
    for update in (1, 2):  # 0 would take diagnostics
        loop.update = update
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for name, call in parts(loop):
            began = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "seconds": seconds,
        "images": config.rollout.prompts * config.rollout.copies,
        "peak": peak,
        "predicted": estimate.peak,
        "flops": {phase.name: phase.flops for phase in estimate.phases},
    }


def parts(loop: Any) -> list[tuple[str, Any]]:
    """The three parts of an update, in order."""
    found: dict[str, Any] = {}

    def rollout() -> None:
        found["rollout"] = loop.rollout(loop.update)

    def labels() -> None:
        found["prepared"] = loop.algorithm.prepare(found["rollout"], loop.update)

    def update() -> None:
        loop._learn(found["rollout"], found["prepared"].keep)

    return [("rollout", rollout), ("labels", labels), ("update", update)]


def row(teachers: int, found: Mapping[str, Any], rate: float) -> str:
    """A line of the table."""
    seconds, flops = found["seconds"], found["flops"]
    total = sum(seconds.values())
    share = sum(flops[name] for name in seconds) / total / rate
    peak = f"{found['peak'] / MIB:,.0f}" if found["peak"] else "-"
    cells = [str(teachers), *(f"{value:.2f}" for value in seconds.values()), f"{total:.2f}"]
    cells += [
        f"{found['images'] / total:.2f}",
        peak,
        f"{found['predicted'] / MIB:,.0f}",
        f"{share:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure each number of teachers in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=float, default=1.0, help="share of the attention heads")
    parser.add_argument("--teachers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    overrides = [f"rollout.prompts={args.prompts}", *args.overrides]
    if args.one:
        print(json.dumps(measured(config_of(args.one, args.teachers[0], overrides), device)))
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = load(CONFIG, args.overrides, stage=OpdConfig)
        write_model(folder, config, args.width, max(args.teachers))
        rate = matmul_rate(DTYPES[config.model.dtype], device)
        print(f"{device}: {rate / 1e12:.3g} TFLOP/s in matrix products ({config.model.dtype})\n")
        parts = ["rollout", "labels", "update", "all"]
        heads = [
            "teachers",
            *(f"{part} (s)" for part in parts),
            "images/s",
            "peak MiB",
            "predicted",
            "of that rate",
        ]
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
        for teachers in args.teachers:
            command = [sys.executable, __file__, "--one", name, "--teachers", str(teachers)]
            command += ["--prompts", str(args.prompts), *args.overrides]
            text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(row(teachers, json.loads(text.splitlines()[-1]), rate), flush=True)


if __name__ == "__main__":
    main()
