"""What is learnt from a rollout: the protocol of an algorithm, and the micro-batches it sees.

An Algorithm prepares a rollout once (it scores the images, or asks teachers for labels), and turns
velocities at (image, step) pairs into a loss. `flowalign.training.loop` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from flowalign.training.nonfinite import Fault
from flowalign.training.rollout import OnImages, Schedule
from flowalign.types import Conditioning, Rollout, Source, StepLoss

STUDENT = "student"  # name of the adapter that is trained


class TrainingError(RuntimeError):
    """A run that must stop: what happened, and what to do."""


class NotFinite(TrainingError):
    """Numbers of an update that are NaN or infinite, on every process: there is nothing to learn
    from it. The loop leaves the update out; many in a row end the run."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault}. {fault.remedy}.")
        self.fault = fault


@dataclass(frozen=True)
class Pairs:
    """A micro-batch of b (image, step) pairs of a rollout."""

    rows: Tensor  # [b] images of the rollout
    columns: Tensor  # [b] positions among its trained steps
    steps: Tensor  # [b] positions in the schedule
    sigma: Tensor  # [b]
    x: Tensor  # [b,C,h,w] states
    x_next: Tensor | None  # [b,C,h,w] sampled successors; None where the rollout kept none
    old_log_prob: Tensor | None  # [b] of x_next, under the policy that sampled it
    conditioning: Conditioning
    size: int  # rows of the forward pass, at least b
    first: bool  # whether costly diagnostics are taken on this micro-batch
    mean: Tensor | None = None  # [b,C,h,w] that x_next was sampled around, where the rollout has it

    def action(self) -> tuple[Tensor, Tensor]:
        """x_next and old_log_prob of a rollout that has them."""
        assert self.x_next is not None and self.old_log_prob is not None
        return self.x_next, self.old_log_prob


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rollout that is ready to be learnt from; an algorithm adds what its loss needs."""

    rollout: Rollout  # the states to train on, which need not be those that were sampled
    keep: Tensor  # [B] images that carry gradient
    metrics: Mapping[str, float]  # means over all processes
    notes: list[str]  # B texts that stand below the samples: a reward, a teacher


P = TypeVar("P", bound=Prepared)


class Algorithm(Protocol[P]):
    """What is learnt from a rollout."""

    needs_images: bool  # rollouts are decoded
    needs_latents: bool  # rollouts run to their end
    guidance: float  # the CFG scale at which the student is trained
    on_images: OnImages | None  # called with each batch of images during the rollout

    def plan(self, update: int, bucket: int = 0) -> Schedule:
        """How the rollout of an update steps, and which of its states are trained."""
        ...

    def sources(self, tasks: list[str]) -> list[Source] | None:
        """Who samples each image, by its task; None = the student."""
        ...

    def prepare(self, rollout: Rollout, update: int) -> P:
        """Score or label a rollout, once."""
        ...

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: P) -> StepLoss:
        """Mean loss of b pairs, from the student's velocity [b,C,h,w] there."""
        ...

    def learnt(self, steps: int) -> None:
        """After the optimizer steps of a rollout, of which at least one was taken. steps: those of
        the run so far."""
        ...

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Weights of its own, by name, that a checkpoint holds."""
        ...


class Stateless:
    """The part of an algorithm that keeps nothing from one rollout to the next."""

    def learnt(self, steps: int) -> None:
        """Nothing to do."""

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """None."""
        return {}


def pairs_of(rollout: Rollout, keep: Tensor, size: int) -> Iterator[Pairs]:
    """All (image, step) pairs of the kept images in micro-batches of `size`: step by step, images
    in order.

    The forward pass of a smaller last micro-batch has `size` rows, too: kernels differ in the last
    bits between sizes, so that a ratio is exactly 1 where `size` is that of the rollout's batches.
    """
    size = min(size, len(rollout) * len(rollout.steps))
    images = keep.nonzero().flatten()
    device = rollout.states.device
    rows = images.repeat(len(rollout.steps)).to(device)
    columns = torch.arange(len(rollout.steps)).repeat_interleave(len(images)).to(device)
    steps, sigmas = torch.tensor(rollout.steps, device=device), rollout.sigmas.to(device)
    own = rollout.own_sigmas
    for i, (r, c) in enumerate(zip(rows.split(size), columns.split(size), strict=True)):
        yield Pairs(
            rows=r,
            columns=c,
            steps=steps[c],
            sigma=sigmas[steps[c]] if own is None else own[r, c],
            x=rollout.states[r, c],
            x_next=None if rollout.next_states is None else rollout.next_states[r, c],
            old_log_prob=None if rollout.log_probs is None else rollout.log_probs[r, c],
            conditioning=rollout.conditioning.select(r),
            size=size,
            first=i == 0,
            mean=None if rollout.means is None else rollout.means[r, c],
        )


def filled(parts: Iterable[Pairs], count: int) -> Iterator[tuple[Pairs, float]]:
    """The micro-batches with weight 1; then, up to `count`, the last one again with weight 0."""
    for pairs in parts:
        count -= 1
        yield pairs, 1.0
    for _ in range(count):
        yield replace(pairs, first=False), 0.0
