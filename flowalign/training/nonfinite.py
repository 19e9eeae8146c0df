"""Numbers that are not finite: the first one of an update, and when a run must stop."""

from __future__ import annotations

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.system.escape import shown
from flowalign.types import Rollout

LEAST_SCALE = 1.0  # float16's loss scale starts at 65536; gradients that overflow below 1 stay so
DIVERGED = "The student has diverged. Lower optimizer.lr, or use bfloat16 instead of float16"


class TrainingError(RuntimeError):
    """A run that must stop: what happened, and what to do."""


class NotFinite(TrainingError):
    """The first number of an update that is NaN or infinite: whose it is, and at which image and
    step. remedy: what may help. Raised on every process, because nothing can be learnt from the
    update. The loop skips the update; many in a row end the run."""

    def __init__(self, what: str, where: str, remedy: str = DIVERGED) -> None:
        super().__init__(what, where, remedy)
        self.remedy = remedy

    def __str__(self) -> str:
        return "{} is NaN or infinite: {}".format(*self.args)


def describe_pair(rollout: Rollout, row: int, step: int | None) -> str:
    """An image of a rollout, and a step of its schedule if it is known, for a message."""
    task = rollout.batch.tasks[row]
    prompt = shown(rollout.batch.prompts[row], 120)
    return ("" if step is None else f"at step {step}, ") + f"task {task!r}, prompt {prompt!r}"


def fault_of_rollout(rollout: Rollout) -> NotFinite | None:
    """The fault of a rollout with a state that is not finite. Only the last state is checked,
    because NaN persists. Rewards mask such images themselves."""
    ends = [rollout.latents, rollout.log_probs]
    if rollout.latents is None:
        ends.append(rollout.states[:, -1:])  # none where no state is kept
        ends += [] if rollout.next_states is None else [rollout.next_states[:, -1]]
    broken = torch.stack([_broken(end) for end in ends if end is not None]).any(0)
    if not broken.any():
        return None
    row = int(broken.nonzero()[0])
    columns = _broken(rollout.states[row]).nonzero().flatten().tolist()
    where = describe_pair(rollout, row, rollout.steps[columns[0]] if columns else None)
    if rollout.sources is None:
        return NotFinite("a state that the student sampled", where)
    name = rollout.sources[row].adapter or "the base"
    return NotFinite(f"a state that {name} sampled", where, f"Look at {name} alone")


def fault_of_pairs(velocity: Tensor, rollout: Rollout, rows: Tensor, steps: Tensor) -> NotFinite:
    """The fault of a micro-batch whose loss is not finite: the student's velocity [b,C,h,w], or
    otherwise the loss, because labels and advantages were finite. rows, steps [b]: of its pairs."""
    broken = _broken(velocity)
    first = int(broken.nonzero()[0]) if broken.any() else 0
    what = "the student's velocity" if broken.any() else "the loss"
    return NotFinite(what, describe_pair(rollout, int(rows[first]), int(steps[first])))


def first_fault(fault: NotFinite | None) -> NotFinite | None:
    """The first fault of any process. All processes must call it."""
    return next(filter(None, gather_object([fault])), None)


def _broken(values: Tensor) -> Tensor:
    """[B,...] -> [B] on the CPU: whether a row holds NaN or infinity."""
    return (~torch.isfinite(values.detach())).flatten(1).any(1).cpu()
