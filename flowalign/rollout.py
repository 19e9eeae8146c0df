"""From prompts to a Rollout: the one sampling loop, for training and for evaluation.

Every image owns its noise: it depends on the key of the call, on the place of the prompt in the
whole batch and on the number of the copy, not on batch size or number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowalign import sde
from flowalign.backbone import Backbone
from flowalign.types import Conditioning, Gaussian, PromptBatch, Rollout

See = Callable[[int, Tensor, PromptBatch], None]
"""Told of a batch of images: the row of the first one, images [b,3,H,W] in [0,1], their b rows."""


@dataclass(frozen=True)
class Schedule:
    """sigmas [T+1] and how to step along them: noise inside the window only, Euler outside.

    window (start, stop) are the steps with noise and training; None has neither. chosen: those of
    them that are trained, in order; None = all. actions: whether the sampled successors of the
    trained states are needed, and their log-probs (not under an ode).
    """

    sigmas: Tensor
    kind: str
    noise_level: float
    window: tuple[int, int] | None
    chosen: tuple[int, ...] | None = None
    actions: bool = True

    @property
    def trained(self) -> list[int]:
        """The steps whose states are kept, in order."""
        return list(range(*(self.window or (0, 0))) if self.chosen is None else self.chosen)

    @property
    def noisy(self) -> range:
        """The steps with noise."""
        return range(*self.window) if self.window and self.kind != "ode" else range(0)

    @property
    def forwards(self) -> int:
        """Forward passes until the last trained state (and its action) is known."""
        return self.trained[-1] + self.actions if self.trained else 0

    def transition(self, x: Tensor, velocity: Tensor, steps: Tensor) -> Gaussian:
        """The noisy transition at trained steps [B] (one each image) from x [B,C,h,w]."""
        sigmas = self.sigmas.to(x.device)
        return sde.transition(
            x,
            velocity,
            sigmas[steps],
            sigmas[steps + 1],
            noise_level=self.noise_level,
            kind=self.kind,
            sigma_max=float(self.sigmas[1]),
        )

    def euler(self, x: Tensor, velocity: Tensor, step: int) -> Tensor:
        """The deterministic step."""
        sigma, sigma_next = float(self.sigmas[step]), float(self.sigmas[step + 1])
        return sde.transition(
            x, velocity, sigma, sigma_next, noise_level=0, kind="ode", sigma_max=1.0
        ).mean


@dataclass(frozen=True)
class Noise:
    """The seeded noise of a call: key names the call, `shared` gives a group one start."""

    key: tuple[int, ...]
    shared: bool = False

    def draw(self, prompt: int, copy: int, shape: tuple[int, ...], extra: int) -> Tensor:
        """[1+extra, C,h,w] on the CPU: the initial noise, then one for each noisy step."""
        own = self._generator(prompt, copy)
        start = self._generator(prompt, -1) if self.shared else own
        first = torch.randn(1, *shape, generator=start)
        return torch.cat([first, torch.randn(extra, *shape, generator=own)])

    def _generator(self, prompt: int, copy: int) -> torch.Generator:
        entropy = np.random.SeedSequence([*self.key, prompt, copy + 1]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0]))


@torch.no_grad()
def sample(
    backbone: Backbone,
    prompts: PromptBatch,
    schedule: Schedule,
    *,
    guidance: float | Sequence[float],
    noise: Noise,
    copies: int = 1,
    first: int = 0,
    batch_size: int = 32,
    decode: bool = True,
    finish: bool | None = None,
    adapters: Sequence[str] | None = None,
    see: See | None = None,
) -> Rollout:
    """Sample `copies` images of each of P prompts -> Rollout of B = P * copies.

    first: the place of prompts[0] in the batch of all processes. batch_size: images a forward.
    finish: go on to the last latents; by default only where images are decoded from them, else
    the rollout stops at the last trained state. adapters and guidance may be one for each prompt.
    see: told of each batch of images as soon as it is decoded, before the next is sampled.
    """
    finish = decode if finish is None else finish
    cond = backbone.encode(prompts.prompts, copies)
    rows = [(first + p, c) for p in range(len(prompts)) for c in range(copies)]
    scales = [guidance] * len(prompts) if isinstance(guidance, int | float) else list(guidance)
    trajectories, images = [], []
    everyone = prompts.select([p - first for p, _ in rows])
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        shape, extra = backbone.latent_shape, len(schedule.noisy)
        drawn = torch.stack([noise.draw(p, c, shape, extra) for p, c in part])
        place = [p - first for p, _ in part]
        source = _Source(
            backbone,
            cond.select(slice(start, start + batch_size)),
            _alike([scales[p] for p in place], backbone.device),
            [adapters[p] for p in place] if adapters else None,
        )
        trajectories.append(_trajectory(source, schedule, drawn, finish))
        if decode:
            images.append(backbone.decode(trajectories[-1][-1], batch_size))
            if see:
                mine = range(start, start + len(part))
                see(start, images[-1], everyone.select(mine))
    states, following, log_probs, last = zip(*trajectories, strict=True)
    acted = schedule.actions and bool(schedule.noisy)
    return Rollout(
        states=torch.cat(states),
        next_states=torch.cat(following) if acted else None,
        steps=schedule.trained,
        sigmas=schedule.sigmas,
        log_probs=torch.cat(log_probs) if acted else None,
        latents=torch.cat(last) if finish else None,
        images=torch.cat(images) if decode else None,
        group=torch.tensor([p for p, _ in rows]),
        batch=everyone,
        conditioning=cond,
    )


@dataclass(frozen=True)
class _Source:
    """Whose velocity is followed: one batch's conditioning, guidance and adapters."""

    backbone: Backbone
    cond: Conditioning
    guidance: float | Tensor
    adapters: list[str] | None

    def velocity(self, x: Tensor, sigma: float) -> Tensor:
        return self.backbone.velocity(
            x, sigma, self.cond, guidance=self.guidance, adapters=self.adapters
        )


def _alike(values: list[float], device: torch.device) -> float | Tensor:
    """One number where all are the same (the cheaper path for guidance 1), else [B]."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values, device=device)


def _trajectory(
    source: _Source, schedule: Schedule, noise: Tensor, finish: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One batch of B along the schedule: trained states and their successors [B,S,C,h,w],
    log-probs [B,S], and the last latents [B,C,h,w]. noise [B,1+N,C,h,w], one each noisy step.

    States are float32; a log-prob is taken of the state that is stored.
    """
    noise = noise.to(source.backbone.device)
    x, trained, noisy = noise[:, 0], schedule.trained, schedule.noisy
    states, following, log_probs = [], [], []
    forwards = len(schedule.sigmas) - 1 if finish else schedule.forwards
    for step in range(len(schedule.sigmas) - 1):
        if step in trained:
            states.append(x)
        if step == forwards:
            break
        velocity = source.velocity(x, float(schedule.sigmas[step]))
        if step not in noisy:
            x = schedule.euler(x, velocity, step)
            continue
        gaussian = schedule.transition(x, velocity, torch.full((len(x),), step, device=x.device))
        x = sde.sample(gaussian, noise[:, 1 + step - noisy.start])
        if step in trained and schedule.actions:
            following.append(x)
            log_probs.append(sde.log_prob(gaussian, x))
    none = x.new_zeros(len(x), 0, *x.shape[1:])
    kept, after = (torch.stack(t, 1) if t else none for t in (states, following))
    return kept, after, torch.stack(log_probs, 1) if log_probs else x.new_zeros(len(x), 0), x
