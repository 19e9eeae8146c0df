"""Flow-OPD's student (2605.08063): the loop with labels of routed teachers, and an anchor.

The student samples its own trajectories. At each trained state it matches the velocity of the
teacher for that prompt's task. Flow-OPD, DiffusionOPD and DanceOPD are settings of it
(configs/tiny/student_{flow,diffusion,dance}_opd.yaml).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from flowalign import sde
from flowalign.config import OpdStage, StatesConfig
from flowalign.training import metrics
from flowalign.training.algorithm import Algorithm, Keeps, Pairs, Parts, Prepared
from flowalign.training.losses import policy_loss, published_loss, step_weights, velocity_error
from flowalign.training.rollout import Stream, schedule_of, window_of
from flowalign.training.student.fixed import FIXED_STATES, Fixed, distances, fixed_states
from flowalign.types import Rollout, Schedule, StepLoss

BETA = {"low_noise": (5.0, 2.0), "high_noise": (2.0, 5.0)}  # over the window, 0..1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels(Prepared):
    """A rollout with the labels of its states."""

    velocity: Tensor  # [B,S,C,h,w] of the teachers
    weights: Tensor  # [T] weights of the distances
    kl_weights: Tensor  # [T] weights that make them a KL, for the log
    anchor: Tensor | None = None  # [B,S,C,h,w] velocity of the anchor
    advantage: Tensor | None = None  # [B,S] log-ratios of gradient "policy"


class Opd(Algorithm[Labels]):
    """The algorithm. The teachers label by task; the anchor labels every task (MAR).

    Which steps an update trains is a function of (seed, update): its window's, or a draw
    among them by student.noise_levels.
    """

    needs_groups = False

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.settings = self.config.student
        self.anchor = parts.anchor
        self.anchor_weight = self.config.anchor.weight if self.config.anchor else 0.0
        self.held_out_prompts = parts.held_out
        self.fixed: list[Fixed] | None = None  # made at the first evaluation

    @classmethod
    def keeps(cls, config: OpdStage, updates: Sequence[int] | None = None) -> Keeps:
        held_out = sum(task.validation is not None for task in config.tasks)
        return Keeps(
            actions=config.needs_actions,
            targets=[config.student.label_dtype] * (2 if config.anchor else 1),
            labels=config.student.substeps,
            fixed_states=held_out * config.student.fixed_prompts * FIXED_STATES,
        )

    @classmethod
    def trained_steps(cls, config: OpdStage, update: int) -> tuple[int, ...]:
        """The trained steps of an update: its window, or a draw from it. A function of (seed,
        update)."""
        window = list(range(*window_of(config.rollout, update)))
        return chosen(config.student.noise_levels, window, (config.seed, update))

    # What the loop asks ------------------------------------------------------------------------

    def plan(self, update: int) -> Schedule:
        schedule = schedule_of(self.config, self.backbone, update)
        return dataclasses.replace(schedule, chosen=self.trained_steps(self.config, update))

    def prepare(self, rollout: Rollout, update: int) -> Labels:
        """Label the trained states, once: the labels do not depend on the student's weights."""
        assert self.teachers
        label = self.teachers(rollout)
        policy = self.settings.gradient == "policy"
        measured = {}
        weights = weights_of(rollout.schedule, self.settings.weighting)
        for step in rollout.steps:
            measured[metrics.STEP_WEIGHT + metrics.step_label(step)] = float(weights[step])
        return Labels(
            rollout=rollout,
            keep=torch.ones(len(rollout), dtype=torch.bool),
            metrics=measured,
            notes=list(label.teacher),
            velocity=label.velocity,
            weights=weights,
            kl_weights=weights_of(rollout.schedule, "kl"),
            anchor=self.anchor(rollout).velocity if self.anchor else None,
            advantage=self._log_ratios(rollout, label.velocity) if policy else None,
        )

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Labels) -> StepLoss:
        """Distillation + anchor_weight * anchor, means over b pairs."""
        error = velocity_error(velocity, prepared.velocity[pairs.rows, pairs.columns])
        weight = prepared.weights.to(error.device)[pairs.steps]
        total = distill = self._distillation(pairs, velocity, weight * error, prepared).mean()
        measured, counts = self._errors(pairs, error.detach(), prepared)
        measured[metrics.DISTILL] = float(distill.detach())
        if prepared.anchor is not None:
            away = velocity_error(velocity, prepared.anchor[pairs.rows, pairs.columns])
            anchor = (weight * away).mean()
            total = total + self.anchor_weight * anchor
            measured[metrics.ANCHOR] = float(anchor.detach())
        return StepLoss(total, measured, counts)

    def held_out(self) -> Mapping[str, float]:
        """The distance to the targets at fixed states; 1 is the base's, 0 the target."""
        if not self.settings.fixed_prompts:
            return {}
        if self.fixed is None:
            assert self.teachers
            prompts = self.held_out_prompts
            self.fixed = fixed_states(
                self.config, self.backbone, self.teachers, prompts, self.guidance
            )
        size = self.config.optimizer.micro_batch
        return distances(self.fixed, self.backbone, self.guidance, size)

    # The three gradients -----------------------------------------------------------------------

    def _distillation(
        self, pairs: Pairs, velocity: Tensor, distance: Tensor, labels: Labels
    ) -> Tensor:
        """The loss [b] of student.gradient; distance [b] is the weighted velocity distance."""
        s = self.settings
        if s.gradient == "pathwise":
            return distance
        x_next, old = pairs.action()
        schedule = labels.rollout.schedule
        new = sde.scheduled_transition(schedule, pairs.x, velocity, pairs.steps)
        log_prob = sde.log_prob(new, x_next)
        if labels.advantage is not None:  # policy
            advantage = labels.advantage[pairs.rows, pairs.columns]
            return policy_loss(log_prob, old, advantage, clip_range=s.clip_range)[0]
        return published_loss(
            distance, log_prob, old, clip_range=s.clip_range, advantage_clip=s.advantage_clip
        )[0]

    def _log_ratios(self, rollout: Rollout, labels: Tensor) -> Tensor:
        """log pi_teacher(a|s) - log pi_old(a|s) [B,S], from labels [B,S,C,h,w]."""
        assert rollout.next_states is not None and rollout.log_probs is not None
        columns = []
        for column, step in enumerate(rollout.steps):
            x = rollout.states[:, column]
            label = labels[:, column].float()
            steps = torch.full((len(x),), step, device=x.device)
            teacher = sde.scheduled_transition(rollout.schedule, x, label, steps)
            columns.append(sde.log_prob(teacher, rollout.next_states[:, column]))
        ratio = torch.stack(columns, 1) - rollout.log_probs
        return ratio.clamp(-self.settings.advantage_clip, self.settings.advantage_clip)

    # Diagnostics -------------------------------------------------------------------------------

    def _errors(
        self, pairs: Pairs, error: Tensor, labels: Labels
    ) -> tuple[dict[str, float], dict[str, int]]:
        """KL to the teacher (ode: velocity error) by task and by step, and the pairs of each."""
        rollout = labels.rollout
        kind = metrics.TEACHER_KL if rollout.schedule.noisy else metrics.TEACHER_ERROR
        values = (error * labels.kl_weights.to(error.device)[pairs.steps]).tolist()
        names = [rollout.batch.tasks[row] for row in pairs.rows.tolist()]
        steps = [metrics.step_label(step) for step in pairs.steps.tolist()]
        by_name: dict[str, list[float]] = {}
        for label, value in zip([*names, *steps], [*values, *values], strict=True):
            by_name.setdefault(kind + label, []).append(value)
        means = {name: sum(some) / len(some) for name, some in by_name.items()}
        return means, {name: len(some) for name, some in by_name.items()}


def weights_of(schedule: Schedule, weighting: str) -> Tensor:
    """`losses.step_weights` of a schedule [T]; 0 for steps outside its window, which are never
    trained. An ode has no KL: there the weight "kl" is 1, so that plain errors are logged."""
    if schedule.kind == "ode" and weighting == "kl":
        weighting = "velocity"
    every = step_weights(
        schedule.sigmas, weighting=weighting, kind=schedule.kind, noise_level=schedule.noise_level
    )
    inside = torch.zeros(len(every), dtype=torch.bool)
    inside[list(range(*(schedule.window or (0, 0))))] = True
    return torch.where(inside, every, 0.0)


def chosen(states: StatesConfig, window: list[int], key: tuple[int, ...]) -> tuple[int, ...]:
    """The steps of the window that an update trains, in order; key seeds the draw.

    One draw serves all images of an update, so that the rollout can stop early. (DanceOPD draws for
    each image; then every rollout is as long as the longest.)
    """
    if states.select == "all":
        return tuple(window)
    rng = np.random.default_rng([*key, Stream.STATES])
    if states.select == "random":
        return tuple(sorted(rng.permutation(window)[: states.count].tolist()))
    places: set[int] = set()
    while len(places) < states.count:
        # the place of a draw u of the Beta among n steps is floor(u n), and n - 1 for u = 1
        places.add(min(math.floor(rng.beta(*BETA[states.select]) * len(window)), len(window) - 1))
    return tuple(sorted(window[i] for i in places))
