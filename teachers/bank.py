"""The bank of teachers: frozen adapters on the student's base, asked for labels by task.

Memory per further teacher is its LoRA. The states of a batch are sorted by teacher and labelled
teacher by teacher, so that every forward pass has one adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from flowalign.backbone import Backbone
from flowalign.backbone.adapters import Lora
from flowalign.training.nonfinite import NotFinite, describe_pair, first_fault
from flowalign.training.rollout import batches
from flowalign.training.run.processes import missing_steps
from flowalign.types import Rollout, Source, TeacherLabel


@dataclass(frozen=True)
class Member:
    """One teacher."""

    adapter: str | Path | Lora | None  # an opened one, its folder or Hub id; None = the base itself
    guidance: float = 1.0  # CFG scale of its labels


class Bank:
    """A `flowalign.types.Teacher`: the teachers of several tasks, one for each task.

    members: teachers by name. routing: task -> name of its teacher. batch_size: (image, step)
    pairs per forward pass. dtype: how labels are stored. Adapters may differ in rank, alpha and
    layers. Raises ValueError for an adapter that does not fit the base.
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
        self.backbone, self.members, self.routing = backbone, dict(members), dict(routing)
        self.batch_size, self.dtype = batch_size, dtype
        for name, member in self.members.items():
            if member.adapter is None:
                continue
            try:
                backbone.load_adapter(_adapter(name), member.adapter, frozen=True)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                adapter = member.adapter
                where = adapter.file.parent if isinstance(adapter, Lora) else adapter
                raise ValueError(
                    f"the adapter {where} does not fit the base "
                    f"{backbone.name or 'model'}: {str(error).splitlines()[0]}. Give an adapter "
                    "that was trained on this base."
                ) from error

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> TeacherLabel:
        """Labels of all trained states. Raises NotFinite, on all processes, where the velocity of
        one is not finite."""
        names = [self.routing[task] for task in rollout.batch.tasks]
        device, steps = rollout.states.device, len(rollout.steps)
        sigmas = rollout.sigmas[rollout.steps].to(device)
        velocity = torch.empty_like(rollout.states, dtype=self.dtype)
        # (image, step) pairs, numbered image by image, of one teacher each
        parts = list(batches([name for name in names for _ in range(steps)], self.batch_size))
        parts += parts[-1:] * missing_steps(len(parts), self.backbone.sharded)
        for name, group in groupby(parts, key=lambda part: part[0]):
            source = self.source(name)
            with self.backbone.adapter(source.adapter):  # once per teacher: switching costs time
                for _, pairs in group:
                    pair = torch.tensor(pairs, device=device)
                    row, column = pair // steps, pair % steps
                    label = self.backbone.velocity(
                        rollout.states[row, column],
                        sigmas[column],
                        rollout.conditioning.select(row),
                        guidance=source.guidance,
                    )
                    velocity[row, column] = label.to(self.dtype)
        broken, fault = (~torch.isfinite(velocity)).flatten(2).any(2), None
        if broken.any():
            row, column = broken.nonzero()[0].tolist()
            where = describe_pair(rollout, row, rollout.steps[column])
            what = f"a label of teacher {names[row]!r}"
            fault = NotFinite(what, where, "Look at its adapter alone")
        if fault := first_fault(fault):
            raise fault
        return TeacherLabel(velocity, names)

    def sources(self, tasks: list[str]) -> list[Source]:
        """Who samples the prompts of each task: its teacher."""
        return [self.source(self.routing[task]) for task in tasks]

    def source(self, name: str) -> Source:
        """A teacher's adapter on the base, and its CFG scale."""
        member = self.members[name]
        return Source(None if member.adapter is None else _adapter(name), member.guidance)


def _adapter(name: str) -> str:
    return f"teacher_{name}"  # on the base; the student has another name
