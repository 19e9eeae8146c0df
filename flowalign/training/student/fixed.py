"""The distance to the targets at states that stay the same through a run.

On the student's own path the states change with the student, so that its distance there may fall
while the student learns nothing, or rise while it learns. Here the states are the teachers': those
of their own trajectories, and their images with noise added.
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
from flowalign.training.noising import noised, stratified
from flowalign.training.rollout import Noise, Stream, sample, schedule_of
from flowalign.types import PromptBatch, Rollout, Teacher

STATES = 4  # of each trajectory, and noise levels of each image


@dataclass(frozen=True)
class Fixed:
    """States of one task and the targets there. name: the metric of the distance."""

    name: str
    states: Rollout
    target: Tensor  # [B,S,C,h,w]


def fixed_states(
    config: OpdStage, backbone: Backbone, teachers: Teacher, prompts: Mapping[str, PromptBatch]
) -> list[Fixed]:
    """Both kinds of states of each task, of its first prompts: a function of the seed and of the
    teachers. With substeps those of their own trajectories alone. prompts: by task. All processes
    make the same."""
    found = []
    for task, batch in prompts.items():
        batch = batch.select(range(min(config.student.fixed_prompts, len(batch))))
        key = (config.seed, 0, Stream.FIXED)
        schedule = schedule_of(config, backbone)
        spread = np.linspace(0, len(schedule.trained) - 1, STATES).round().astype(int)
        steps = tuple(schedule.trained[i] for i in sorted({*spread.tolist()}))
        path = sample(
            backbone,
            batch,
            dataclasses.replace(schedule, chosen=steps, actions=False),
            guidance=config.rollout.guidance,
            noise=Noise(key),
            places=[(row, 0) for row in range(len(batch))],
            batch_size=config.rollout.batch_size,
            decode=False,
            finish=True,
            sources=teachers.sources(batch.tasks),
        )
        found.append(Fixed(metrics.FIXED_PATH + task, path, teachers(path).velocity))
        if config.student.substeps > 1:  # it learns steps between the schedule's noise levels alone
            continue
        levels = stratified(backbone.shift(config.rollout.steps), STATES, key)
        images, _ = noised(path, levels, key)
        found.append(Fixed(metrics.FIXED_NOISED + task, images, teachers(images).velocity))
    return found


@torch.no_grad()
def distances(
    states: list[Fixed], backbone: Backbone, guidance: float, batch_size: int
) -> dict[str, float]:
    """Mean |v - v_target|^2 of the active adapter, by metric."""
    found = {}
    for fixed in states:
        every = torch.ones(len(fixed.states), dtype=torch.bool)
        errors = [
            velocity_error(
                pairs.velocity(backbone, guidance), fixed.target[pairs.rows, pairs.columns]
            )
            for pairs in pairs_of(fixed.states, every, batch_size)
        ]
        found[fixed.name] = float(torch.cat(errors).mean())
    return found
