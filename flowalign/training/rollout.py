"""From prompts to a Rollout: the one sampling loop, for training and for evaluation.

Every image owns its noise: it depends on the key of the call, on the number of the prompt in the
batch of all processes and of the copy, not on batch size or number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from types import EllipsisType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flowalign import sde
from flowalign.backbone import Backbone
from flowalign.config import RolloutConfig, SamplingConfig, TrainingStage, WindowConfig
from flowalign.training.run.processes import missing_steps
from flowalign.training.solvers import Dpm2
from flowalign.types import Conditioning, PromptBatch, Rollout, Schedule, Source

# Takes a batch of images: the row of the first one, images [b,3,H,W] in [0,1], their b prompts.
OnImages = Callable[[int, Tensor, PromptBatch], None]


K = TypeVar("K", bound=Hashable)


class Stream(IntEnum):
    """The purpose of a random draw. Draws are seeded by (seed, update, stream), so no two share a
    seed. Only the noise of a rollout is seeded by (seed, update)."""

    STATES = 1  # which states an update trains
    SFT = 2  # noise levels and noise of sft
    NOISE = 4  # noise on the images that nft, awm and dpo learn from
    LEVELS = 5  # their noise levels
    FIXED = 6  # fixed states of a run


def schedule_of(config: TrainingStage, backbone: Backbone, update: int | None = None) -> Schedule:
    """The schedule of an update's rollout; of all, with the steps that a moving window reaches
    (`window_of`), if update is None."""
    r = config.rollout
    return Schedule(
        sigmas=backbone.sigmas(r.steps),
        kind=r.kind,
        noise_level=r.noise_level,
        window=r.trained if update is None else window_of(r, update),
        actions=config.needs_actions,
        solver=r.solver,
    )


def clean_schedule(backbone: Backbone, steps: int, solver: str = "euler") -> Schedule:
    """A schedule for samples of which only the images are used: no noise, no trained state."""
    return Schedule(backbone.sigmas(steps), "ode", 0.0, None, solver=solver)


def window_of(rollout: RolloutConfig, update: int) -> tuple[int, int]:
    """[start, stop) of the steps with noise and training in an update.

    A moving window (MixGRPO, 2507.21802) advances by one step every `every` updates, from high to
    low noise. After the last position it starts again, as with `roll_back` in the authors' scripts;
    without `roll_back` it would stay there.
    """
    window, (start, stop) = rollout.window, rollout.trained
    if not isinstance(window, WindowConfig):
        return start, stop
    start = update // window.every % (stop - window.width + 1)
    return start, start + window.width


@dataclass(frozen=True)
class Noise:
    """The seeded noise of a call. shared: the images of a prompt have one initial noise."""

    key: tuple[int, ...]  # identifies the call, such as (seed, update)
    shared: bool = False

    def draw(self, prompt: int, copy: int, shape: tuple[int, ...], extra: int) -> Tensor:
        """Noise [1+extra,C,h,w] on the CPU: the initial noise, then one for each noisy step."""
        generator = self._generator(prompt, copy)
        start = self._generator(prompt, -1) if self.shared else generator
        first = torch.randn(1, *shape, generator=start)
        return torch.cat([first, torch.randn(extra, *shape, generator=generator)])

    def _generator(self, prompt: int, copy: int) -> torch.Generator:
        # copy + 1, as seeds are not negative: copy -1 is the start that a group shares
        entropy = np.random.SeedSequence([*self.key, prompt, copy + 1]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0]))


# An image: its prompt's number in the batch of all processes, and its copy
ImagePlace = tuple[int, int]


def places(prompts: int, copies: int) -> list[ImagePlace]:
    """(prompt, copy) of all images of a batch; the copies of a prompt follow one another."""
    return list(product(range(prompts), range(copies)))


def shard(prompts: int, copies: int, shares: int, rank: int, world: int) -> list[ImagePlace]:
    """The images of process `rank` of `world`, ordered by the optimizer step that they are for.

    The batch is cut into `shares` of complete prompts, one for each optimizer step. Every process
    has an equal part of each share, so a step learns from the same images for any `world`. The
    config and the checks refuse batches that cannot be divided so.
    """
    size = prompts // shares * copies // world
    images = places(prompts, copies)
    starts = range(0, len(images), size * world)
    return [images[i] for s in starts for i in range(s + rank * size, s + (rank + 1) * size)]


@torch.no_grad()
def sample(
    backbone: Backbone,
    batch: PromptBatch,
    schedule: Schedule,
    *,
    guidance: float,
    noise: Noise,
    places: Sequence[ImagePlace],
    batch_size: int = 32,
    decode: bool = True,
    finish: bool = True,
    sources: Sequence[Source] | None = None,
    on_images: OnImages | None = None,
) -> Rollout:
    """Sample B images -> Rollout. batch: B rows, the prompt of each image.

    places: (prompt, copy) of the B images, which seed their noise. batch_size: images per forward
    pass. decode: whether latents are decoded. finish: whether to sample to the last latents;
    otherwise the rollout stops at the last trained state. sources: the
    sampler of each image (None = the active adapter, at `guidance`); images of one source are
    sampled together. on_images: called with each decoded batch of images before the next is sampled
    (with sources, only if all images have the same source).
    """
    cond = backbone.encode(batch.prompts)
    shape = backbone.latent_shape
    extra = len(schedule.noisy)
    parts = list(batches(sources or [None] * len(batch), batch_size))
    if sources:  # without sources all processes have the same number
        on_base = [s for s, _ in parts if s is not None and s.adapter not in backbone.others]
        repeated = (Source(None, 1.0), parts[-1][1])
        parts += [repeated] * missing_steps(len(on_base), backbone.sharded)
    order, trajectories, images = [], [], []
    for source, rows in parts:
        drawn = torch.stack([noise.draw(*places[row], shape, extra) for row in rows])
        texts = cond.select(torch.tensor(rows, device=cond.index.device))
        scale = source.guidance if source else guidance
        with backbone.adapter(source.adapter) if source else nullcontext():
            trajectories.append(_trajectory(backbone, texts, scale, schedule, drawn, finish))
        order += rows
        if decode:
            images.append(backbone.decode(trajectories[-1].last))
            if on_images:
                on_images(rows[0], images[-1], batch.select(rows))
    # In the order of the batch, without repeats; without sources they are so already.
    back = torch.tensor(order, device=backbone.device)[: len(batch)].argsort() if sources else ...
    joined = _Trajectory(*(_joined(column, back) for column in zip(*trajectories, strict=True)))
    return Rollout(
        states=joined.states,
        next_states=joined.next_states,
        schedule=schedule,
        log_probs=joined.log_probs,
        latents=joined.last if finish else None,
        images=_joined(images, back),
        group=torch.tensor([prompt for prompt, _ in places]),
        copy=torch.tensor([copy for _, copy in places]),
        batch=batch,
        conditioning=cond,
        sources=sources,
    )


def generate(
    backbone: Backbone,
    prompts: PromptBatch,
    settings: SamplingConfig,
    indices: Sequence[int] | None = None,
    copies: int = 1,
) -> Tensor:
    """Images [P*copies,3,H,W] in [0,1] of P prompts, deterministic (Euler ODE).

    indices: the prompts' indices in their set, which seed the noise. None = 0, 1, 2... The copies
    of a prompt follow one another.
    """
    indices = range(len(prompts)) if indices is None else indices
    keys = places(len(prompts), copies)
    rollout = sample(
        backbone,
        prompts.select([prompt for prompt, _ in keys]),
        clean_schedule(backbone, settings.steps),
        guidance=settings.guidance,
        noise=Noise((settings.seed,)),
        places=[(indices[prompt], copy) for prompt, copy in keys],
        batch_size=settings.batch_size,
    )
    assert rollout.images is not None
    return rollout.images


def _joined(parts: Sequence[Tensor | None], back: Tensor | EllipsisType) -> Any:
    """All batches as one tensor, its rows indexed by `back`; None if a batch has no tensor."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors)[back] if tensors else None


def batches(kinds: Sequence[K], size: int) -> Iterator[tuple[K, list[int]]]:
    """(kind, up to `size` of its rows in order) for each forward pass; kinds: the kind of every
    row."""
    for kind in dict.fromkeys(kinds):
        rows = [row for row, other in enumerate(kinds) if other == kind]
        for start in range(0, len(rows), size):
            yield kind, rows[start : start + size]


class _Trajectory(NamedTuple):
    """A batch of B images along the schedule."""

    states: Tensor  # [B,S,C,h,w], the trained ones
    next_states: Tensor | None  # [B,S,C,h,w]; None where no action is needed, or none is random
    log_probs: Tensor | None  # [B,S] of next_states
    last: Tensor  # [B,C,h,w] latents


def _trajectory(
    backbone: Backbone,
    cond: Conditioning,
    guidance: float,
    schedule: Schedule,
    noise: Tensor,
    finish: bool,
) -> _Trajectory:
    """Sample one batch. noise [B,1+N,C,h,w]: the start, and one for each noisy step."""
    noise = noise.to(backbone.device)
    x = noise[:, 0]
    trained = schedule.trained
    noisy = schedule.noisy
    states, following, log_probs = [], [], []
    count = len(schedule.sigmas) - 1
    taken = 0  # steps: to the end, or until the last trained state (and its action) is known
    if finish:
        taken = count
    elif trained:
        taken = trained[-1] + schedule.actions
    solver = None if schedule.solver == "euler" else Dpm2(schedule.sigmas)
    for step in range(count):
        if step in trained:
            states.append(x)
        if step == taken:  # nothing after it is trained or decoded
            break
        velocity = backbone.velocity(x, float(schedule.sigmas[step]), cond, guidance=guidance)
        if solver:
            x = solver.advance(x, velocity)
            continue
        steps = torch.full((len(x),), step, device=x.device)
        gaussian = sde.scheduled_transition(schedule, x, velocity, steps, noisy=step in noisy)
        if step not in noisy:
            x = gaussian.mean
            continue
        x = sde.sample(gaussian, noise[:, 1 + step - noisy.start])
        if step in trained and schedule.actions:
            following.append(x)
            log_probs.append(sde.log_prob(gaussian, x))  # of x as it is stored, in float32
    return _Trajectory(
        states=torch.stack(states, 1) if states else x.new_zeros(len(x), 0, *x.shape[1:]),  # S = 0
        next_states=torch.stack(following, 1) if following else None,
        log_probs=torch.stack(log_probs, 1) if log_probs else None,
        last=x,
    )
