"""From operations to hours: how long a stage takes on a GPU of the table, or at measured rates.

Memory and peaks of the table are from the makers' data sheets: dense (no sparsity), bfloat16 with
float32 accumulation, and float32 without tensor cores, which is torch's default for products. No
stage of flowalign has been measured on any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flowalign.commands.doctor.estimate import Estimate, evaluated_images
from flowalign.rewards import declared, leaves

KINDS: tuple[str, ...] = ("sampling", "labels", "learning", "alarm")  # of phases
# Of the peak that a run sustains. Llama 3's training reports 38 to 43 % on H100 (arXiv 2407.21783,
# table 4). A small transformer in eager mode may reach less: measure with `benchmarks/gpu.py`.
EFFICIENCY = 0.4


@dataclass(frozen=True)
class Gpu:
    """memory in GiB; peaks in TFLOP/s."""

    title: str
    memory: float
    bfloat16: float
    float32: float

    def rate(self, dtype: str) -> float:
        """FLOP/s that a run sustains in a dtype of the config."""
        peak = self.float32 if dtype == "float32" else self.bfloat16
        return peak * 1e12 * EFFICIENCY


GPUS = {
    "4090": Gpu("GeForce RTX 4090", 24, 165, 82.6),
    "a100-40gb": Gpu("A100 40GB", 40, 312, 19.5),
    "a100": Gpu("A100 80GB", 80, 312, 19.5),
    "l40s": Gpu("L40S", 48, 362, 91.6),
    "h100": Gpu("H100 SXM", 80, 989, 67),
    "h200": Gpu("H200", 141, 989, 67),
    "b200": Gpu("B200", 180, 2250, 75),
}
DEFAULT_GPU = "h100"  # where torch sees no GPU and none is named


def present_gpu() -> Gpu | None:
    """The table's GPU that torch sees first; None if it sees none, or one that is not there."""
    if not torch.cuda.is_available():
        return None
    title, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    if "A100" in title:
        return GPUS["a100" if memory > 50 * 2**30 else "a100-40gb"]
    return next((gpu for name, gpu in GPUS.items() if name.upper() in title), None)


@dataclass(frozen=True)
class Pace:
    """FLOP/s of a process by kind of phase, and of rewards; and where they are from.

    waiting, judging: measured seconds an image, of waiting for the scores of a rollout, and of the
    reward of each task; None and {} = they are computed from the costs that the rewards state.
    """

    rates: Mapping[str, float]  # {kind of phase, or "rewards": FLOP/s}
    source: str
    waiting: float | None = None
    judging: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def constant(cls, rate: float, source: str, **measured: Any) -> Pace:
        """The same rate, in FLOP/s, in all phases."""
        return cls(dict.fromkeys([*KINDS, "rewards"], rate), source, **measured)

    @classmethod
    def of_gpu(cls, gpu: Gpu, dtype: str) -> Pace:
        """What a GPU of the table sustains in a dtype of the config; rewards compute in float32."""
        rate = gpu.rate(dtype)
        rates = dict.fromkeys(KINDS, rate) | {"rewards": gpu.rate("float32")}
        return cls(rates, f"{gpu.title}, {rate / 1e12:.3g} TFLOP/s sustained")


@dataclass(frozen=True)
class Times:
    """Seconds of one process, and counts. unknown: rewards whose cost is not in them."""

    seconds: Mapping[str, float]  # of an update: {phase, or "rewards" (waiting for them): seconds}
    evaluation: float  # of one evaluation, with its rewards
    updates: int
    evaluations: int
    processes: int
    unknown: tuple[str, ...]

    @property
    def update(self) -> float:
        """Seconds of an update."""
        return sum(self.seconds.values())

    @property
    def hours(self) -> float:
        """Of the stage, wall time."""
        return (self.updates * self.update + self.evaluations * self.evaluation) / 3600

    @property
    def gpu_hours(self) -> float:
        """Of all processes together."""
        return self.hours * self.processes


def times(estimate: Estimate, pace: Pace) -> Times:
    """How long a stage takes at a pace, with rewards and evaluations."""
    config = estimate.config
    seconds = {phase.name: phase.flops / pace.rates[phase.kind] for phase in estimate.phases}
    unknown: dict[str, None] = {}
    given = {judged.name: judged.rewards.values() for judged in config.judged}

    def waiting(images: Mapping[str, float], sampling: float, batch: int) -> float:
        """Seconds that the rewards of these images of all processes add to those of sampling them.

        What they compute on the device comes on top. What they compute on the CPU runs while the
        next batch is sampled, so that the last batch's counts, and what is slower than sampling.
        """
        device = cpu = 0.0
        for name, share in images.items():
            count = share / estimate.processes
            if name in pace.judging:
                cpu += pace.judging[name] * count
                continue
            for reward in given[name]:
                for part, options in leaves(reward.name, reward.options, imports=False):
                    cost = declared(part, imports=False).image_cost(**options)
                    if cost is None:
                        unknown[part] = None
                    else:
                        device += cost.flops / pace.rates["rewards"] * count
                        cpu += cost.seconds * count
        total = round(sum(images.values()) / estimate.processes, 6)  # of rounded shares of tasks
        batches = max(1, math.ceil(total / batch))
        return device + max(cpu / batches, cpu - sampling * (batches - 1) / batches)

    evaluation = 0.0
    if pace.waiting is not None:
        seconds["rewards"] = pace.waiting * sum(config.rewarded.values()) / estimate.processes
    elif config.rewarded:
        sampling = sum(seconds[p.name] for p in estimate.phases if p.kind == "sampling")
        batch = config.batch_sizes["rollout.batch_size"]
        seconds["rewards"] = waiting(config.rewarded, sampling, batch)
    if estimate.evaluation:
        sampling = estimate.evaluation.flops / pace.rates["sampling"]
        batch = config.evaluation_sampling.batch_size
        evaluation = sampling + waiting(evaluated_images(config), sampling, batch)
    return Times(
        seconds, evaluation, config.updates, config.evaluations, estimate.processes, tuple(unknown)
    )
