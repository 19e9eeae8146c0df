"""The distance to the targets at states that stay the same through a run.

On the student's own path the states change with the student, so that its distance there may fall
while the student learns nothing, or rise while it learns. Here the states are on the
teachers' trajectories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import OpdStage
from flowalign.training import metrics
from flowalign.training.algorithm import pairs_of
from flowalign.training.losses import velocity_error
from flowalign.training.rollout import Noise, Stream, sample, schedule_of
from flowalign.types import PromptBatch, Rollout, Teacher

FIXED_STATES = 4  # of each trajectory


@dataclass(frozen=True)
class Fixed:
    """States of one task and the targets there. name: the metric. unit: the base model's distance,
    by which distances are divided."""

    name: str
    states: Rollout
    target: Tensor  # [B,S,C,h,w]
    unit: float = 1.0


def fixed_states(
    config: OpdStage,
    backbone: Backbone,
    teachers: Teacher,
    prompts: Mapping[str, PromptBatch],
    guidance: float,
) -> list[Fixed]:
    """Fixed states for the first prompts of each task, a function of the seed and of the teachers.
    prompts: by task. All processes compute the same states."""
    states = []
    for task, batch in prompts.items():
        batch = batch.select(range(min(config.student.fixed_prompts, len(batch))))
        schedule = schedule_of(config, backbone)
        spread = np.linspace(0, len(schedule.trained) - 1, FIXED_STATES).round().astype(int)
        steps = tuple(schedule.trained[i] for i in sorted({*spread.tolist()}))
        path = sample(
            backbone,
            batch,
            dataclasses.replace(schedule, chosen=steps, actions=False),
            guidance=config.rollout.guidance,
            noise=Noise((config.seed, 0, Stream.FIXED)),
            places=[(row, 0) for row in range(len(batch))],
            batch_size=config.rollout.batch_size,
            decode=False,
            finish=False,
            sources=teachers.sources(batch.tasks),
        )
        states.append(Fixed(metrics.FIXED_PATH + task, path, teachers(path).velocity))
    with backbone.base():
        size = config.optimizer.micro_batch
        far = [held_out_distance(fixed, backbone, guidance, size) for fixed in states]
    mean = sum(far) / len(far) or 1.0  # in place of 0, where a teacher is the base itself
    units = [base or mean for base in far]
    return [
        dataclasses.replace(fixed, unit=unit) for fixed, unit in zip(states, units, strict=True)
    ]


@torch.no_grad()
def held_out_distance(fixed: Fixed, backbone: Backbone, guidance: float, batch_size: int) -> float:
    """Mean |v - v_target|^2 of the active adapter."""
    every = torch.ones(len(fixed.states), dtype=torch.bool)
    errors = [
        velocity_error(pairs.velocity(backbone, guidance), fixed.target[pairs.rows, pairs.columns])
        for pairs in pairs_of(fixed.states, every, batch_size)
    ]
    return float(torch.cat(errors).mean())


def distances(
    states: list[Fixed], backbone: Backbone, guidance: float, batch_size: int
) -> dict[str, float]:
    """Distances of the active adapter divided by the base model's (0: the target, 1: the base), by
    metric. FIXED_MEAN is the sum of distances over the sum of the base's, so a teacher near the
    base has little weight."""
    far = [held_out_distance(fixed, backbone, guidance, batch_size) for fixed in states]
    shares = {fixed.name: d / fixed.unit for fixed, d in zip(states, far, strict=True)}
    return shares | {metrics.FIXED_MEAN: sum(far) / sum(fixed.unit for fixed in states)}
