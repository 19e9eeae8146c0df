"""The bank of teachers: frozen adapters on the student's own base, asked for labels by task.

Memory per further teacher is its LoRA; a batch of mixed tasks is labelled in one forward pass
(peft's per-sample adapter names), each row by the teacher that its task is routed to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowalign.backbone import BASE, Backbone
from flowalign.loop import TrainingError
from flowalign.types import Conditioning, Rollout, Source, TeacherLabel


class LabelError(TrainingError):
    """A teacher that gives no usable label: which, where, and what to do."""


@dataclass(frozen=True)
class Member:
    """One teacher: the folder of its adapter (None = the base itself) and its guidance scale."""

    adapter: str | Path | None
    guidance: float = 1.0


class Bank:
    """A `flowalign.types.Teacher`: every task has one teacher; the velocities are frozen.

    members: teachers by name. routing: task -> name of its teacher. batch_size: (image, step)
    pairs a forward. dtype: how labels are stored. Adapters may differ in rank, alpha and layers.
    Raises ValueError for a task routed to nobody, a teacher that no task is routed to, or an
    adapter that does not fit the base.
    """

    def __init__(
        self,
        backbone: Backbone,
        members: Mapping[str, Member],
        routing: Mapping[str, str],
        *,
        batch_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_routing(members, routing)
        self.backbone, self.members, self.routing = backbone, dict(members), dict(routing)
        self.batch_size, self.dtype = batch_size, dtype
        with backbone.keeping_active():
            for name, member in self.members.items():
                if member.adapter is not None:
                    _load(backbone, _adapter(name), member.adapter)

    def __call__(self, rollout: Rollout) -> TeacherLabel:
        """Labels of all trained states. Raises LabelError where a velocity is not finite."""
        names = self.route(rollout.batch.tasks)
        images, steps = rollout.states.shape[:2]
        sigmas = rollout.sigmas[rollout.steps].to(rollout.states.device)
        velocity = torch.empty_like(rollout.states, dtype=self.dtype)
        flat_x, flat_v = rollout.states.flatten(0, 1), velocity.flatten(0, 1)
        for start in range(0, images * steps, self.batch_size):
            pairs = torch.arange(start, min(start + self.batch_size, images * steps))
            rows, columns = pairs // steps, (pairs % steps).to(sigmas.device)
            chosen = [names[row] for row in rows.tolist()]
            label = self.velocity(flat_x[start : start + len(pairs)], sigmas[columns],
                                  rollout.conditioning.select(rows), chosen)  # fmt: skip
            _check_finite(label, chosen, sigmas[columns])
            flat_v[start : start + len(pairs)] = label.to(self.dtype)
        return TeacherLabel(velocity, names)

    def route(self, tasks: list[str]) -> list[str]:
        """The teacher of each image. Raises ValueError for a task that is routed to nobody."""
        if unknown := sorted(set(tasks) - self.routing.keys()):
            raise ValueError(
                f"task {unknown[0]!r} has no teacher; routed are {sorted(self.routing)}. "
                "Route it to a teacher, or leave its prompts out."
            )
        return [self.routing[task] for task in tasks]

    @torch.no_grad()
    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning, names: list[str]) -> Tensor:
        """v [B,C,h,w], float32: row i by the teacher names[i], at that teacher's guidance."""
        of = self._source(names)
        guidance = torch.tensor(of.guidance, device=x.device)
        return self.backbone.velocity(x, sigma, cond, guidance=guidance, adapters=of.adapters)

    def source(self, tasks: list[str]) -> Source:
        """Each task's teacher as the one who samples its prompts."""
        return self._source(self.route(tasks))

    def _source(self, names: list[str]) -> Source:
        return Source(
            adapters=[BASE if self.members[n].adapter is None else _adapter(n) for n in names],
            guidance=[self.members[name].guidance for name in names],
        )


def check_routing(members: Mapping[str, object], routing: Mapping[str, str]) -> None:
    """Raise ValueError unless every task has a teacher and every teacher a task."""
    if not routing:
        raise ValueError("no task is routed to a teacher; give `task: teacher` pairs.")
    for task, name in routing.items():
        if name not in members:
            raise ValueError(
                f"task {task!r} is routed to {name!r}, and there are only {sorted(members)}. "
                "Name one of these, or add that teacher."
            )
    if idle := sorted(members.keys() - set(routing.values())):
        raise ValueError(
            f"no task is routed to teacher {idle[0]!r}; routed are {dict(routing)}. "
            "Give it a task, or leave it out."
        )


def _adapter(name: str) -> str:
    """What a teacher's adapter is called on the base, beside the student's."""
    return f"teacher_{name}"


def _load(backbone: Backbone, name: str, folder: str | Path) -> None:
    try:
        backbone.load_adapter(name, folder)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the adapter in {folder} does not fit the base {backbone.name or 'model'}: "
            f"{str(error).splitlines()[0]}. Give an adapter that was trained on this base."
        ) from error
    for parameter in backbone.adapter_parameters(name):
        parameter.requires_grad_(False)


def _check_finite(label: Tensor, names: list[str], sigma: Tensor) -> None:
    finite = torch.isfinite(label).flatten(1).all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise LabelError(
            f"teacher {names[row]!r} gives a velocity that is not finite at sigma "
            f"{float(sigma[row]):.3f} ({int((~finite).sum())} of {len(names)} states). Its adapter "
            "may be broken, or fp16 too narrow for it: look at it alone, or use bf16."
        )
