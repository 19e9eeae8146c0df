"""Flow-OPD's student (2605.08063): the loop with labels of routed teachers, and an anchor.

The student samples its own trajectories; at every state of them that is trained, its velocity is
pulled towards that of the one teacher that the prompt's task is routed to. Flow-OPD, DiffusionOPD
and DanceOPD are settings of it (configs/tiny/{flow,diffusion,dance}_opd.yaml).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign import parallel, sde
from flowalign.backbone import Backbone
from flowalign.config import StatesConfig
from flowalign.config import StudentConfig as Settings
from flowalign.loop import Algorithm, Pairs, Prepared, mean_over_processes, pairs_of
from flowalign.loop import velocity as velocity_of
from flowalign.losses import policy_loss, published_loss, step_weights, velocity_error
from flowalign.rollout import Schedule
from flowalign.types import Rollout, StepLoss, Teacher

BETA = {"low_noise": (5.0, 2.0), "high_noise": (2.0, 5.0)}  # over the place in the window, 0..1


class Student:
    """The algorithm. teachers label by task; anchor labels every task (MAR, times anchor_weight).

    schedule holds the window; which of its steps an update trains is drawn by `settings.states`
    from (seed, update). grpo, with settings.reward_weight, adds its loss on the tasks' rewards.
    parameters are the student's, for the cosines of its tasks' gradients.
    """

    def __init__(
        self,
        settings: Settings,
        teachers: Teacher,
        backbone: Backbone,
        schedule: Schedule,
        accelerator: Accelerator,
        *,
        guidance: float,
        seed: int,
        micro_batch: int,
        anchor: Teacher | None = None,
        anchor_weight: float = 0.0,
        grpo: Algorithm | None = None,
    ) -> None:
        self.settings, self.teachers, self.backbone = settings, teachers, backbone
        self.accelerator, self.guidance, self.seed = accelerator, guidance, seed
        self.micro_batch = micro_batch
        self.anchor, self.anchor_weight, self.grpo = anchor, anchor_weight, grpo
        acts = settings.gradient != "pathwise" or grpo is not None
        self.schedule = dataclasses.replace(schedule, actions=acts)
        self.weights = weights(self.schedule, settings.weighting)
        self.kl_weights = weights(self.schedule, "kl")
        self.needs_images = self.needs_latents = grpo is not None
        self.see = grpo.see if grpo else None
        self.tasks: list[str] = []
        self.labels = self.anchors = self.advantage = torch.empty(0)

    # What the loop asks ------------------------------------------------------------------------

    def plan(self, update: int) -> Schedule:
        """The states that this update trains: a function of (seed, update)."""
        steps = chosen(self.settings.states, self.schedule.trained, (self.seed, update))
        return dataclasses.replace(self.schedule, chosen=steps)

    def sources(self, tasks: list[str]) -> None:
        """The student samples: on-policy."""

    def prepare(self, rollout: Rollout, update: int) -> Prepared:
        """Label the trained states, once: the labels do not depend on the student's weights."""
        found = self.teachers(rollout)
        self.labels, self.tasks = found.velocity, rollout.batch.tasks
        self.anchors = self.anchor(rollout).velocity if self.anchor else self.labels
        prepared = self.grpo.prepare(rollout, update) if self.grpo else None
        if self.settings.gradient == "policy":
            self.advantage = self._log_ratios(rollout)
        metrics = dict(prepared.metrics) if prepared else {}
        metrics |= {f"weight/step_{i}": float(self.weights[i]) for i in rollout.steps}
        if update % self.settings.diagnose_every == 0:
            cosines = {name: [(value, 1)] for name, value in self._cosines(rollout).items()}
            metrics |= mean_over_processes(cosines)
        lines = zip(rollout.batch.prompts, found.teacher, strict=True)
        captions = prepared.captions if prepared else [f"{p}\n{name}" for p, name in lines]
        keep = torch.ones(len(rollout), dtype=torch.bool)  # an image without advantage is labelled
        return Prepared(keep=keep, metrics=metrics, captions=captions)

    def loss(self, pairs: Pairs, velocity: Tensor) -> StepLoss:
        """Distillation + anchor_weight * anchor + reward_weight * policy, means over b pairs."""
        error = velocity_error(velocity, self.labels[pairs.rows, pairs.columns])
        weight = self.weights.to(error.device)[pairs.steps]
        total = distill = self._distillation(pairs, velocity, weight * error).mean()
        anchor = policy = None
        metrics, counts = self._errors(pairs, error.detach())
        metrics["distill"] = float(distill.detach())
        if self.anchor:
            away = velocity_error(velocity, self.anchors[pairs.rows, pairs.columns])
            anchor = (weight * away).mean()
            total = total + self.anchor_weight * anchor
            metrics["anchor"] = float(anchor.detach())
        if self.grpo:
            rewarded = self.grpo.loss(pairs, velocity)
            policy, metrics = rewarded.total, {**metrics, **rewarded.metrics}
            total = total + self.settings.reward_weight * policy
        return StepLoss(total, policy, distill, anchor, metrics, counts)

    # The four gradients ------------------------------------------------------------------------

    def _distillation(self, pairs: Pairs, velocity: Tensor, distance: Tensor) -> Tensor:
        """The loss [b] of `settings.gradient`; distance [b] is the weighted velocity distance.

        Only pathwise and published carry the gradient of the distance. detached is the control:
        the distance does not depend on the sampled action, so E[grad log pi * distance] = 0.
        """
        s = self.settings
        if s.gradient == "pathwise":
            return distance
        x_next, old = pairs.action()
        log_prob = sde.log_prob(self.schedule.transition(pairs.x, velocity, pairs.steps), x_next)
        if s.gradient == "policy":
            advantage = self.advantage[pairs.rows, pairs.columns]
            return policy_loss(log_prob, old, advantage, clip_range=s.clip_range)[0]
        distance = distance if s.gradient == "published" else distance.detach()
        return published_loss(
            distance, log_prob, old, clip_range=s.clip_range, advantage_clip=s.advantage_clip
        )[0]

    def _log_ratios(self, rollout: Rollout) -> Tensor:
        """log pi_teacher(a|s) - log pi_old(a|s) [B,S], optionally summed over what comes after."""
        assert rollout.next_states is not None and rollout.log_probs is not None
        columns = []
        for column, step in enumerate(rollout.steps):
            x, label = rollout.states[:, column], self.labels[:, column].float()
            steps = torch.full((len(x),), step, device=x.device)
            teacher = self.schedule.transition(x, label, steps)
            columns.append(sde.log_prob(teacher, rollout.next_states[:, column]))
        ratio = torch.stack(columns, 1) - rollout.log_probs
        if self.settings.reward_to_go:
            ratio = ratio.flip(1).cumsum(1).flip(1)
        return ratio.clamp(-self.settings.advantage_clip, self.settings.advantage_clip)

    # Diagnostics -------------------------------------------------------------------------------

    def _errors(self, pairs: Pairs, error: Tensor) -> tuple[dict[str, float], dict[str, int]]:
        """KL to the teacher (under an ode: the velocity error) by task and by step, and of how
        many pairs each is the mean."""
        name = "kl" if self.schedule.noisy else "velocity_error"
        values = error * self.kl_weights.to(error.device)[pairs.steps]
        tasks = [self.tasks[row] for row in pairs.rows.tolist()]
        keys = [tasks, [f"step_{step}" for step in pairs.steps.tolist()]]
        found: dict[str, list[float]] = {}
        for labels in keys:
            for label, value in zip(labels, values.tolist(), strict=True):
                found.setdefault(f"{name}/{label}", []).append(value)
        means = {key: sum(each) / len(each) for key, each in found.items()}
        return means, {key: len(each) for key, each in found.items()}

    def _cosines(self, rollout: Rollout) -> dict[str, float]:
        """How far the tasks pull the same way: cosines of the gradients of their losses, each on
        one micro-batch of its own."""
        grads = dict(self._gradients(rollout))
        found = {}
        for a, b in itertools.combinations(sorted(grads), 2):
            cosine = torch.nn.functional.cosine_similarity(grads[a], grads[b], dim=0)
            found[f"gradient_cosine/{a}~{b}"] = float(cosine)
        return found

    def _gradients(self, rollout: Rollout) -> Iterator[tuple[str, Tensor]]:
        tasks = rollout.batch.tasks
        names = set(tasks)
        if self.backbone.sharded:  # every process takes part in each of these gradients
            names = set(gather_object(sorted(names)))
        active = [p for p in self.backbone.core.parameters() if p.requires_grad]
        for name in sorted(names) if len(names) > 1 else []:
            mine = torch.tensor([task == name for task in tasks])
            used = mine if mine.any() else torch.ones_like(mine)
            pairs = next(pairs_of(rollout, used, self.micro_batch))
            with parallel.of(self.accelerator).aside(self.backbone):
                total = self.loss(pairs, velocity_of(self.backbone, pairs, self.guidance)).total
                grads = torch.autograd.grad(total, active)
            if mine.any():
                yield name, torch.cat([grad.flatten() for grad in grads])


def weights(schedule: Schedule, weighting: str) -> Tensor:
    """`losses.step_weights` of a schedule [T]; steps outside its window, which are never trained,
    have 0; under an ode "kl" is 1: there is none, and errors are shown as they are."""
    if schedule.kind == "ode" and weighting == "kl":
        weighting = "velocity"
    found = step_weights(
        schedule.sigmas, weighting=weighting, kind=schedule.kind, noise_level=schedule.noise_level
    )
    inside = torch.zeros(len(found), dtype=torch.bool)
    inside[list(range(*(schedule.window or (0, 0))))] = True
    return torch.where(inside, found, 0.0)


def chosen(states: StatesConfig, window: list[int], key: tuple[int, ...]) -> tuple[int, ...]:
    """The steps of the window that an update trains, in order; key seeds the draw.

    One draw serves all images of an update, so that the rollout can stop early (DanceOPD draws
    for each image, which costs every rollout its full length as soon as one image asks for it).
    """
    if states.select == "all":
        return tuple(window)
    rng = np.random.default_rng([*key, 1])
    if states.select == "window":
        start = int(rng.integers(len(window) - states.count + 1))
        return tuple(window[start : start + states.count])
    if states.select == "random":
        return tuple(sorted(rng.permutation(window)[: states.count].tolist()))
    places: set[int] = set()
    while len(places) < states.count:
        places.add(min(math.floor(rng.beta(*BETA[states.select]) * len(window)), len(window) - 1))
    return tuple(sorted(window[i] for i in places))
