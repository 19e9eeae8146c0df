"""From operations to hours: how long a stage takes on a GPU of the table, or at measured rates.

The table is from the makers' data sheets: dense peaks (no sparsity), bfloat16 with float32
accumulation, and float32 without tensor cores, which is torch's default for products. What a run
sustains of them was measured on an H100 (docs/gpu.md), and is carried over to the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flowalign.commands.doctor.count import Estimate, evaluated_images
from flowalign.config import ModelConfig
from flowalign.rewards import declared, leaves

KINDS: tuple[str, ...] = ("sampling", "labels", "learning", "alarm")  # of phases
# Shares of an H100's peak that Stable Diffusion 3.5 Medium sustains at 512 pixels in bfloat16, by
# kind of phase: eager, compiled (docs/gpu.md); and its width
SHARES = {
    "sampling": (0.20, 0.38), "labels": (0.23, 0.44),
    "learning": (0.18, 0.24), "alarm": (0.20, 0.38),
}  # fmt: skip
WIDTH = 1536
PRODUCTS = 0.65  # of the peak, in matrix products and attention alone; the rest moves memory
REWARDS = 0.4  # of the float32 peak; not measured
# Times as many seconds in passes without and with gradients, as weights are unpacked in each; with
# batches of 2 and 4 (docs/gpu.md)
QUANTIZED = {None: (1.0, 1.0), "nf4": (1.5, 1.25), "fp8": (1.15, 1.15)}


@dataclass(frozen=True)
class Gpu:
    """memory in GiB; peaks in TFLOP/s; bandwidth of the memory in TB/s."""

    title: str
    memory: float
    bfloat16: float
    float32: float
    bandwidth: float

    def rate(self, model: ModelConfig, width: int, kind: str) -> float:
        """FLOP/s that a run of a transformer of a width sustains in a kind of phase.

        1 / rate = 1 / (PRODUCTS peak) + bytes per FLOP / bandwidth. The bytes are what the H100's
        measured share leaves: norms, modulations and casts, which compiling fuses. They grow with
        the width, and the operations of products with its square. A faster memory than the H100's
        does not count: an H200 gained nothing by it.
        """
        h100, share = GPUS["h100"], SHARES[kind][model.compile]
        moved = (1 / share - 1 / PRODUCTS) / h100.bfloat16 * h100.bandwidth * WIDTH / width
        peak = self.bfloat16
        if model.dtype == "float32":
            peak, moved = self.float32, 2 * moved
        bandwidth = min(self.bandwidth, h100.bandwidth)
        longer = QUANTIZED[model.quantization][kind == "learning"]
        return 1e12 / longer / (1 / (PRODUCTS * peak) + moved / bandwidth)


GPUS = {
    "4090": Gpu("GeForce RTX 4090", 24, 165, 82.6, 1.01),
    "a100-40gb": Gpu("A100 40GB", 40, 312, 19.5, 1.56),
    "a100": Gpu("A100 80GB", 80, 312, 19.5, 2.04),
    "l40s": Gpu("L40S", 48, 362, 91.6, 0.86),
    "h100": Gpu("H100 SXM", 80, 989, 67, 3.35),
    "h200": Gpu("H200", 141, 989, 67, 4.8),
    "b200": Gpu("B200", 180, 2250, 75, 8.0),
}
DEFAULT_GPU = "h100"  # where torch sees no GPU and none is named


def present_gpu() -> Gpu | None:
    """The table's GPU that torch sees first; None if it is not in the table."""
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
    def constant(cls, rate: float, source: str) -> Pace:
        """The same rate, in FLOP/s, in all phases."""
        return cls(dict.fromkeys([*KINDS, "rewards"], rate), source)

    @classmethod
    def of_gpu(cls, gpu: Gpu, estimate: Estimate) -> Pace:
        """What a GPU of the table sustains in a stage; rewards compute in float32."""
        model, width = estimate.config.model, estimate.width
        rates = {kind: gpu.rate(model, width, kind) for kind in KINDS}
        rates["rewards"] = gpu.float32 * 1e12 * REWARDS
        low, high = (f"{limit(rates[kind] for kind in KINDS) / 1e12:.3g}" for limit in (min, max))
        return cls(rates, f"{gpu.title}, {low} to {high} TFLOP/s sustained")


class Times(NamedTuple):
    """How long a process takes. unknown: rewards whose cost is not in it."""

    seconds: Mapping[str, float]  # of an update: {phase, or "rewards" (waiting for them): seconds}
    evaluation: float  # seconds of one evaluation, with its rewards
    hours: float  # of the stage, wall time
    unknown: tuple[str, ...]

    @property
    def update(self) -> float:
        """Seconds of an update."""
        return sum(self.seconds.values())


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
    total = config.updates * sum(seconds.values()) + config.evaluations * evaluation
    return Times(seconds, evaluation, total / 3600, tuple(unknown))
