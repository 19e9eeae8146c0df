"""Convert operations to hours: how long a stage takes on a GPU of `gpus`, or at measured rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from flowalign.commands.doctor.count import Estimate, parts_of
from flowalign.commands.doctor.gpus import GPUS, QUANTIZED, Gpu

PHASES: tuple[str, ...] = ("sampling", "labels", "learning", "alarm")
REWARDS = 0.4  # of the float32 peak; not measured
DEFAULT_GPU = "h100"  # where torch sees no GPU and none is named


def present_gpu() -> Gpu | None:
    """The table's GPU that torch sees first; None if it is not in the table."""
    title = torch.cuda.get_device_name(0)
    memory = torch.cuda.get_device_properties(0).total_memory
    if "A100" in title:
        return GPUS["a100" if memory > 50 * 2**30 else "a100-40gb"]
    return next((gpu for name, gpu in GPUS.items() if name.upper() in title), None)


@dataclass(frozen=True)
class Pace:
    """FLOP/s of a process by kind of phase, and of rewards; and the source of these rates.

    waiting, judging: measured seconds an image, of waiting for the scores of a rollout, and of the
    reward of each task; None and {} = they are computed from the costs that the rewards state.
    """

    rates: Mapping[str, float]  # {kind of phase, or "rewards": FLOP/s}
    source: str
    waiting: float | None = None
    judging: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def constant(cls, rate: float, source: str) -> Pace:
        """A pace with one rate, in FLOP/s, for all phases."""
        return cls(dict.fromkeys([*PHASES, "rewards"], rate), source)

    @classmethod
    def of_gpu(cls, gpu: Gpu, estimate: Estimate) -> Pace:
        """The pace of a GPU of the table in a stage; rewards compute in float32."""
        model = estimate.config.model
        width = estimate.width
        rates = {kind: gpu.rate(model, width, kind, compiled=estimate.compiled) for kind in PHASES}
        rates["rewards"] = gpu.float32 * 1e12 * REWARDS
        low, high = (f"{limit(rates[kind] for kind in PHASES) / 1e12:.3g}" for limit in (min, max))
        return cls(rates, f"{gpu.title}, {low} to {high} TFLOP/s sustained")

    def stored(self, before: str | None, after: str | None) -> Pace:
        """The measured pace, converted to another quantization of the base."""
        rates = dict(self.rates)
        for kind in PHASES:
            learning = kind == "learning"
            rates[kind] *= QUANTIZED[before][learning] / QUANTIZED[after][learning]
        return replace(self, rates=rates)


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


def rewarded_images(config: Any) -> dict[str, float]:
    """{task: images of a rollout whose reward a stage learns from}."""
    if not config.learns_from_rewards:
        return {}
    images = config.rollout.images / sum(task.weight for task in config.tasks)
    return {task.name: images * task.weight for task in config.tasks if task.reward}


def times(estimate: Estimate, pace: Pace) -> Times:
    """How long a stage takes at a pace, with rewards and evaluations."""
    config: Any = estimate.config
    seconds = {phase.name: phase.flops / pace.rates[phase.kind] for phase in estimate.phases}
    unknown: dict[str, None] = {}
    parts = {judged.name: list(parts_of(judged)) for judged in config.judged}

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
            for part in parts[name]:
                cost = part.cost
                if cost is None:
                    unknown[part.name] = None
                else:
                    device += cost.flops / pace.rates["rewards"] * count
                    cpu += cost.seconds * count
        total = round(sum(images.values()) / estimate.processes, 6)  # of rounded shares of tasks
        batches = max(1, math.ceil(total / batch))
        return device + max(cpu / batches, cpu - sampling * (batches - 1) / batches)

    evaluation = 0.0
    rewarded = rewarded_images(config)
    if pace.waiting is not None:
        seconds["rewards"] = pace.waiting * sum(rewarded.values()) / estimate.processes
    elif rewarded:
        sampling = sum(seconds[p.name] for p in estimate.phases if p.kind == "sampling")
        seconds["rewards"] = waiting(rewarded, sampling, config.rollout.batch_size)
    if estimate.evaluation:
        sampling = estimate.evaluation.flops / pace.rates["sampling"]
        batch = config.evaluation_sampling.batch_size
        evaluation = sampling + waiting(estimate.evaluated, sampling, batch)
    total = estimate.updates * sum(seconds.values()) + estimate.evaluations * evaluation
    return Times(seconds, evaluation, total / 3600, tuple(unknown))
