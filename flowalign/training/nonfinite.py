"""Numbers that go wrong: which of them is NaN or infinite first, and when a run has to stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.system.escape import shown
from flowalign.types import Rollout

SHOWN = 120  # characters of a prompt in a message
LEAST_SCALE = 1.0  # float16's loss scale starts at 65536; gradients that overflow below 1 stay so


@dataclass(frozen=True)
class Fault:
    """The first number of an update that is NaN or infinite. what: whose it is. where: at which
    images and steps. remedy: what may help."""

    what: str
    where: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what} is NaN or infinite: {self.where}"


NARROW = "or use bfloat16 if model.dtype is float16"
DIVERGED = f"The student has diverged. Lower optimizer.lr, {NARROW}"


def describe_pair(rollout: Rollout, row: int, step: int | None) -> str:
    """An image of a rollout, and a step of its schedule if it is known, for a message."""
    task, prompt = rollout.batch.tasks[row], shown(rollout.batch.prompts[row], SHOWN)
    if step is None:
        return f"task {task!r}, prompt {prompt!r}"
    sigmas = rollout.sigmas if rollout.own_sigmas is None else rollout.own_sigmas[row]
    sigma = float(sigmas[step])
    when = f"at step {step} (sigma {sigma:.3f}), "
    return f"{when}task {task!r}, prompt {prompt!r}"


def fault_of_rollout(rollout: Rollout) -> Fault | None:
    """What is wrong with sampled trajectories, if anything is.

    A state that is not finite stays so to the end, so that only the end is looked at. An image
    alone is left to its reward, which masks it; if all are broken, the VAE is to blame.
    """
    ends = [rollout.latents, rollout.log_probs]
    if rollout.latents is None:
        ends += [rollout.states[:, -1]] if rollout.steps else []
        ends += [] if rollout.next_states is None else [rollout.next_states[:, -1]]
    broken = torch.stack([_broken(end) for end in ends if end is not None]).any(0)
    if broken.any():
        row = int(broken.nonzero()[0])
        columns = _broken(rollout.states[row]).nonzero().flatten().tolist()
        step = rollout.steps[columns[0]] if columns else None  # None: after the trained ones
        where = (
            f"{describe_pair(rollout, row, step)} ({int(broken.sum())} of {len(rollout)} images)"
        )
        if rollout.sources is None:
            return Fault("a state that the student sampled", where, DIVERGED)
        name = rollout.sources[row].adapter or "the base"
        return Fault(f"a state that {name} sampled", where, f"Look at {name} alone, {NARROW}")
    images = rollout.images
    if images is None or not len(images) or not _broken(images).all():
        return None
    where = f"{describe_pair(rollout, 0, None)} (all {len(images)} images); the latents are finite"
    return Fault("an image that the VAE decoded", where, "Use another model.vae_dtype")


def fault_of_pairs(velocity: Tensor, rollout: Rollout, rows: Tensor, steps: Tensor) -> Fault:
    """What is wrong with a micro-batch whose loss is not finite: the student's velocity [b,C,h,w],
    or else the loss alone, as labels and advantages were finite. rows, steps [b] of its pairs."""
    broken = _broken(velocity)
    first = int(broken.nonzero()[0]) if broken.any() else 0
    what = "the student's velocity" if broken.any() else "the loss"
    share = f" ({int(broken.sum())} of {len(broken)} pairs)" if broken.any() else " or beside it"
    return Fault(
        what, describe_pair(rollout, int(rows[first]), int(steps[first])) + share, DIVERGED
    )


def first_fault(fault: Fault | None) -> Fault | None:
    """The first fault that any process has. All must call it."""
    return next((each for each in gather_object([fault]) if each), None)


def all_finite(values: Any) -> bool:
    """Whether all tensors of a nested list or mapping are finite."""
    if isinstance(values, Tensor):
        return bool(torch.isfinite(values.detach()).all())
    if isinstance(values, Mapping):
        values = list(values.values())
    return not isinstance(values, list | tuple) or all(map(all_finite, values))


def _broken(values: Tensor) -> Tensor:
    """[B,...] -> [B] on the CPU: whether a row holds NaN or infinity."""
    return (~torch.isfinite(values.detach())).flatten(1).any(1).cpu()


class Skips:
    """The updates in a row that took no optimizer step, and why the first of them did not."""

    def __init__(self, limit: int) -> None:
        self.limit, self.row = limit, 0
        self.first: Fault | None = None
        self._put_off = False

    def note(self, fault: Fault | None) -> None:
        """After an update: what kept it from taking a step, None if it took one."""
        self.row = self.row + 1 if fault else 0
        self.first = (self.first or fault) if fault else None

    def saves(self, due: bool) -> bool:
        """Whether to write a checkpoint that is due. Not while updates are skipped: it would push
        out the sound ones. Then it is written after the next update that takes a step."""
        due = due or self._put_off
        self._put_off = due and self.row > 0
        return due and not self._put_off

    @property
    def reason(self) -> str:
        """Why the run has to stop, "" if it need not."""
        if self.row < self.limit or not self.first:
            return ""
        return f"{self.row} updates in a row were skipped (train.max_skipped): {self.first}"
