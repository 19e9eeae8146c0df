"""The bank of teachers: frozen adapters on the student's base, asked for labels by task.

Memory per further teacher is its LoRA; or another transformer, where a teacher has a base of its
own. The states of a batch are sorted by teacher and labelled teacher by teacher, so that every
forward pass has one adapter. A target may lie beyond its teacher:
v_ref + lambda (v_teacher - v_ref).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.backbone.adapters import Lora
from flowalign.training.nonfinite import NotFinite, describe_pair, first_fault
from flowalign.training.rollout import batches
from flowalign.training.run.processes import missing_steps
from flowalign.types import Rollout, Source, TeacherLabel


@dataclass(frozen=True)
class Member:
    adapter: str | Path | Lora | None  # an opened one, its folder or Hub id; None = the base itself
    guidance: float = 1.0  # CFG scale of its labels
    extrapolate: float = 1.0  # lambda; 1 = its own velocity
    reference: str = "base"  # v_ref at the same scale: the student's base, or "start"
    base: Backbone | None = None  # of `Backbone.load(beside=...)`; None = the student's


class Bank:
    """A `flowalign.types.Teacher`: the teachers of several tasks, one for each task.

    members: teachers by name. routing: task -> name of its teacher. batch_size: (image, step)
    pairs per forward pass. dtype: how labels are stored. start: what the student starts from, the
    reference "start" of members. substeps: Euler steps to the next noise level of the rollout; the
    label is the mean velocity over them. Adapters may differ in rank, alpha and layers. Raises
    ValueError for an adapter that does not fit the base.
    """

    def __init__(
        self,
        backbone: Backbone,
        members: Mapping[str, Member],
        routing: Mapping[str, str],
        *,
        batch_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        start: str | Path | Lora | None = None,
        substeps: int = 1,
    ) -> None:
        self.backbone = backbone
        self.members = dict(members)
        self.routing = dict(routing)
        self.batch_size = batch_size
        self.dtype = dtype
        self.substeps = substeps
        adapters = {teacher_name(name): member.adapter for name, member in self.members.items()}
        bases = {teacher_name(name): m.base for name, m in self.members.items() if m.base}
        backbone.others = {**backbone.others, **bases}
        if any(m.extrapolate != 1 and m.reference == "start" for m in self.members.values()):
            adapters[TEACHERS_START] = start
        for name, adapter in adapters.items():
            if adapter is not None:
                bases.get(name, backbone).load_adapter(name, adapter, frozen=True)

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> TeacherLabel:
        """Labels of all trained states. Raises NotFinite, on all processes, where the velocity of
        one is not finite."""
        names = [self.routing[task] for task in rollout.batch.tasks]
        device = rollout.states.device
        steps = len(rollout.steps)
        targets = {name: self.targets(name) for name in dict.fromkeys(names)}
        beyond = any(len(sources) > 1 for sources in targets.values())
        velocity = torch.zeros_like(rollout.states, dtype=torch.float32 if beyond else self.dtype)

        passes: list[tuple[Source, float, tuple[Tensor, Tensor]]] = []  # rows, columns
        # (image, step) pairs, numbered image by image, of one teacher each
        parts = batches([name for name in names for _ in range(steps)], self.batch_size)
        for name, group in groupby(parts, key=lambda part: part[0]):
            pairs = [torch.tensor(part, device=device) for _, part in group]
            places = [(pair // steps, pair % steps) for pair in pairs]
            for source, weight in targets[name]:
                passes += [(source, weight, place) for place in places]
        # other processes may have more passes of the sharded base, in which all take part
        here = sum(source.adapter not in self.backbone.others for source, *_ in passes)
        missing = missing_steps(here, self.backbone.sharded)
        passes += [(Source(None, 1.0), 0.0, passes[-1][2])] * missing
        for adapter, group in groupby(passes, key=lambda part: part[0].adapter):
            with self.backbone.adapter(adapter):  # once per teacher: switching costs time
                for source, weight, (row, column) in group:
                    with self.backbone.uncounted(not weight):
                        label = self._label(rollout, row, column, source.guidance)
                    velocity[row, column] += (weight * label).to(velocity.dtype)
        velocity = velocity.to(self.dtype)
        broken = (~torch.isfinite(velocity)).flatten(2).any(2)
        fault = None
        if broken.any():
            row, column = broken.nonzero()[0].tolist()
            where = describe_pair(rollout, row, rollout.steps[column])
            what = f"a label of teacher {names[row]!r}"
            fault = NotFinite(what, where, "Look at its adapter alone")
        if fault := first_fault(fault):
            raise fault
        return TeacherLabel(velocity, names)

    def _label(self, rollout: Rollout, row: Tensor, column: Tensor, guidance: float) -> Tensor:
        """The active adapter's velocity at b states [b,C,h,w]: with substeps (x_end - x) / dt of
        its own path to the next noise level, which a student of few steps takes in one."""
        texts = rollout.conditioning.select(row)
        x = rollout.states[row, column]
        step = torch.tensor(rollout.steps)[column.cpu()]
        sigma, following = (rollout.sigmas[s].to(x.device) for s in (step, step + 1))
        dt = (following - sigma) / self.substeps
        total = torch.zeros_like(x)
        for count in range(self.substeps):
            moved = x + dt.view(-1, 1, 1, 1) * total
            total = total + self.backbone.velocity(
                moved, sigma + count * dt, texts, guidance=guidance
            )
        return total / self.substeps

    def sources(self, tasks: list[str]) -> list[Source]:
        return [self.source(self.routing[task]) for task in tasks]

    def targets(self, name: str) -> list[tuple[Source, float]]:
        """The sources whose weighted velocities sum to the label of a teacher, with their weights:
        the teacher and, with an extrapolation, its reference."""
        member = self.members[name]
        source = self.source(name)
        if member.extrapolate == 1:
            return [(source, 1.0)]
        reference = Source(TEACHERS_START if member.reference == "start" else None, member.guidance)
        return [(source, member.extrapolate), (reference, 1 - member.extrapolate)]

    def source(self, name: str) -> Source:
        """A teacher's adapter on the base, or its own base, and its CFG scale."""
        member = self.members[name]
        plain = member.adapter is None and member.base is None
        return Source(None if plain else teacher_name(name), member.guidance)


TEACHERS_START = "teachers_start"  # the frozen adapter that the student starts from


def teacher_name(name: str) -> str:
    """The name of a teacher's adapter on its base, and of a base of its own."""
    return f"teacher_{name}"
