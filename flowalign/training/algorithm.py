"""What is learnt from a rollout: algorithms, what they are built from, and the pairs they see.

An algorithm prepares a rollout once (it scores the images, or asks teachers for labels), and turns
velocities at (image, step) pairs into a loss. `flowalign.training.loop` does the rest. A new one is
its file, its config section (a `TrainingStage` whose `algorithm` names the class) and one line in
`flowalign.config.STAGES`, or an entry point of the group `flowalign.algorithms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, ClassVar, Generic, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import TrainingStage
from flowalign.config.learning import ADVANTAGE_PLUGINS
from flowalign.credit import ADVANTAGES
from flowalign.rewards import RewardBase, load
from flowalign.system.packages import entry_points
from flowalign.training.nonfinite import TrainingError as TrainingError
from flowalign.training.rollout import OnImages, clean_schedule, window_of
from flowalign.types import (
    Conditioning,
    PromptBatch,
    Rollout,
    Schedule,
    Source,
    StepLoss,
    Teacher,
)

STUDENT = "student"  # name of the adapter that is trained


# Advantages --------------------------------------------------------------------------------------


def advantage_function(name: str) -> Callable[..., Tensor]:
    """(value [B], group [B], *, valid [B], task [B]) -> advantage [B] of a config's `advantage`: a
    variant of `flowalign.credit`, or a function (value [b], group [b]) -> advantage [b] of yours,
    at module:function or an entry point of the group flowalign.advantages.

    Yours is called once a task, with the images whose reward is valid, of all processes, so with
    complete groups; group is the number of an image's prompt. Raises ValueError where it cannot be
    imported; the result raises TrainingError where it is not a tensor [b] of finite numbers.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    points = {point.name: point.value for point in entry_points(ADVANTAGE_PLUGINS)}
    function = load(points.get(name, name), "advantage")

    def advantages(value: Tensor, group: Tensor, *, valid: Tensor, task: Tensor) -> Tensor:
        result = torch.zeros_like(value)
        for number in task[valid].unique():
            rows = valid & (task == number)
            advantage = function(value[rows], group[rows])
            sound = isinstance(advantage, Tensor) and advantage.shape == value[rows].shape
            if not sound or not advantage.isfinite().all():
                wanted = f"want a tensor [{int(rows.sum())}] of finite numbers"
                raise TrainingError(f"advantage {name!r} returned {advantage!r:.200}; {wanted}.")
            result[rows] = advantage.to(value)
        return result

    return advantages


# Algorithms --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What an algorithm is built from.

    rewards, prompts: by task name. teachers: label each image's states by its task; anchor: labels
    the states of every task (both None where the config names none). held_out: prompts of
    validation by task, of training where a task has none.
    """

    config: Any  # the TrainingStage of the algorithm
    backbone: Backbone
    accelerator: Accelerator
    rewards: Mapping[str, RewardBase] = field(default_factory=dict)
    teachers: Teacher | None = None
    anchor: Teacher | None = None
    prompts: Mapping[str, PromptBatch] = field(default_factory=dict)
    held_out: Mapping[str, PromptBatch] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared:
    """A velocity, besides the student's, that the loss needs in an update. adapter: None = the
    base, otherwise an adapter of the student's size. share: fraction of the micro-batches."""

    adapter: str | None
    share: float


@dataclass(frozen=True)
class Keeps:
    """What an algorithm keeps of a rollout, and what it compares there. The loop samples
    accordingly, and memory and time of a run are predicted from it."""

    images: bool = False  # decoded images
    latents: bool = False  # the ends of the trajectories; else they stop after the trained states
    actions: bool = False  # sampled successors of the trained states, and their log-probs
    noise_levels: int = 0  # states an image, made of its latents; 0 = states of its trajectory
    targets: Sequence[str] = ()  # dtype of each velocity that is stored for every state
    labels: int = 0  # forward passes of the teacher (and of the anchor) for the label of a state
    taught_images: bool = False  # teachers sample the images
    policies: Sequence[str] = ()  # frozen copies of the student's adapter
    compared: Sequence[Compared] = ()
    ascended: int = 0  # images at once whose reward's gradient passes through the decoder
    candidates: int = 0  # images tried along this gradient, per image
    fixed_states: int = 0  # states whose distance to the targets an evaluation measures


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rollout that is ready for training; an algorithm adds what its loss needs."""

    rollout: Rollout  # the states to train on; they may differ from the sampled ones
    keep: Tensor  # [B] images that carry gradient
    metrics: Mapping[str, float]  # means over all processes
    notes: list[str]  # B texts below the samples: a reward, a teacher


P = TypeVar("P", bound=Prepared)


class Algorithm(ABC, Generic[P]):
    """What is learnt from a rollout.

    guidance: the CFG scale at which the student is trained. teachers: the stage's, or None.
    on_images: called with each batch of images during the rollout. needs_groups: whether `prepare`
    compares the images of a prompt, which then are never divided between processes. (`Scored`
    compares images across processes.) needs_gradients: whether the rewards must be differentiable.
    """

    on_images: OnImages | None = None
    needs_groups: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = False

    def __init__(self, parts: Parts) -> None:
        self.config, self.backbone = parts.config, parts.backbone
        self.accelerator, self.teachers = parts.accelerator, parts.teachers
        self.guidance: float = parts.config.loss_guidance

    @classmethod
    @abstractmethod
    def keeps(cls, config: Any, updates: Sequence[int] | None = None) -> Keeps:
        """What a stage keeps. updates: those over which shares are averaged; None = all."""

    @classmethod
    def row_problems(cls, config: Any, source: str, prompts: PromptBatch) -> Iterator[str]:
        """The problems of a task's prompt set, named by `source`, for this algorithm; by default
        none. Called before a model is loaded."""
        yield from ()

    @classmethod
    def trained_steps(cls, config: Any, update: int) -> tuple[int, ...]:
        """The steps whose states an update trains: a function of (seed, update)."""
        return tuple(range(*window_of(config.rollout, update)))

    def plan(self, update: int) -> Schedule:
        """The schedule of an update's rollout and its trained states; by default all steps, without
        noise or trained states."""
        rollout = self.config.rollout
        return clean_schedule(self.backbone, rollout.steps, rollout.solver)

    @abstractmethod
    def prepare(self, rollout: Rollout, update: int) -> P:
        """Score or label a rollout, once."""

    @abstractmethod
    def loss(self, pairs: Pairs, velocity: Tensor, prepared: P) -> StepLoss:
        """Mean loss of b pairs, from the student's velocity [b,C,h,w] there."""

    def drift(self, pairs: Pairs, prepared: P) -> Mapping[str, float]:
        """The student's distance from the base at b pairs, for the log, if the loss does not
        measure it anyway; by default nothing. Called without gradient."""
        return {}

    def velocity(self, pairs: Pairs) -> Tensor:
        """The student's velocity [b,C,h,w] at the pairs, with gradient."""
        return pairs.velocity(self.backbone, self.guidance)

    @torch.no_grad()
    def velocity_of(self, adapter: str | None, pairs: Pairs) -> Tensor:
        """The velocity [b,C,h,w] of a frozen adapter at the pairs; None = of the base."""
        with self.backbone.adapter(adapter):
            return pairs.velocity(self.backbone, self.guidance)

    def sources(self, tasks: list[str]) -> list[Source] | None:
        """The sampler of each image, by its task; None = the student samples all."""
        return None

    def learnt(self, steps: int) -> None:  # noqa: B027, by default nothing
        """Called after the optimizer steps of a rollout if at least one was taken. steps: the run's
        optimizer steps so far."""

    def held_out(self) -> Mapping[str, float]:
        """Measurements of the averaged adapter at an evaluation, besides its scores. All processes
        call it; the main process's numbers count."""
        return {}

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Further weights, by name, that checkpoints hold; restoring writes to them in place."""
        return {}


def algorithm_class(config: TrainingStage | type[TrainingStage]) -> type[Algorithm[Any]]:
    return resolve_name(config.algorithm)


# Pairs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """A micro-batch of b (image, step) pairs of a rollout."""

    rows: Tensor  # [b] images of the rollout
    columns: Tensor  # [b] positions among its trained steps
    steps: Tensor  # [b] positions in the schedule
    sigma: Tensor  # [b]
    x: Tensor  # [b,C,h,w] states
    x_next: Tensor | None  # [b,C,h,w] sampled successors; None where the rollout kept none
    # [b] of x_next, under the policy that sampled it; None where that is the student as it is
    old_log_prob: Tensor | None
    conditioning: Conditioning
    size: int  # rows of the forward pass, at least b

    def action(self) -> tuple[Tensor, Tensor | None]:
        """x_next and old_log_prob of a rollout that kept its actions."""
        assert self.x_next is not None
        return self.x_next, self.old_log_prob

    def velocity(self, backbone: Backbone, guidance: float) -> Tensor:
        """The velocity [b,C,h,w] of the active adapter at the pairs."""
        return backbone.velocity(
            self.x, self.sigma, self.conditioning, guidance=guidance, rows=self.size
        )


def pairs_of(rollout: Rollout, keep: Tensor, size: int) -> Iterator[Pairs]:
    """All (image, step) pairs of the kept images, step by step, images in order; see `pairs_at`."""
    images = keep.nonzero().flatten()
    count = len(rollout.steps)
    columns = torch.arange(count).repeat_interleave(len(images))
    return pairs_at(rollout, images.repeat(count), columns, size)


def pairs_at(rollout: Rollout, rows: Tensor, columns: Tensor, size: int) -> Iterator[Pairs]:
    """The pairs of images rows [n] and trained steps columns [n] in micro-batches of `size`.

    The forward pass of a smaller last micro-batch is padded to `size` rows: kernels differ in the
    last bits between sizes, and the ratio must be exactly 1 where the rollout's batches have `size`
    images.
    """
    size = min(size, len(rollout) * len(rollout.steps))
    device = rollout.states.device
    rows, columns = rows.to(device), columns.to(device)
    steps = torch.tensor(rollout.steps, device=device)
    sigmas = rollout.sigmas.to(device)
    per_image = rollout.own_sigmas
    for r, c in zip(rows.split(size), columns.split(size), strict=True):
        yield Pairs(
            rows=r,
            columns=c,
            steps=steps[c],
            sigma=sigmas[steps[c]] if per_image is None else per_image[r, c],
            x=rollout.states[r, c],
            x_next=None if rollout.next_states is None else rollout.next_states[r, c],
            old_log_prob=None if rollout.log_probs is None else rollout.log_probs[r, c],
            conditioning=rollout.conditioning.select(r),
            size=size,
        )
