"""Clean latents with noise added: the states that sft, nft, awm and dpo learn from.

At x_sigma = (1 - sigma) x0 + sigma eps the velocity eps - x0 is that of flow matching (2210.02747,
eq. 23 for this path). The noise is a function of a key and of an image's number in the batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from flowalign.config.rollout import steps_within
from flowalign.training.rollout import Noise
from flowalign.types import Rollout, Schedule

WHOLE = (0.0, 1.0)


def stratified(
    shift: float, count: int, key: tuple[int, ...], within: tuple[float, float] = WHOLE
) -> Tensor:
    """`count` noise levels [S], falling: one drawn in each of `count` equal parts of a schedule.

    sigma = shift u / (1 + (shift - 1) u), u in (0, 1). within: the fraction of the schedule (0 is
    noise, 1 the image) that they are drawn from. key seeds the draw.
    """
    rng = np.random.default_rng(key)
    u = torch.from_numpy((np.arange(count) + rng.random(count)) / count)
    low, high = 1 - within[1], 1 - within[0]
    u = (low + (high - low) * u).flip(0).float()
    return shift * u / (1 + (shift - 1) * u)


def of_sampler(
    sigmas: Tensor,
    count: int,
    key: tuple[int, ...],
    within: tuple[float, float] = WHOLE,
    *,
    stratified: bool = True,
) -> Tensor:
    """`count` noise levels [S], falling, from a sampler's sigmas [T+1]. The steps in `within` are
    divided into `count` parts of about equal size, and one is drawn from each (AWM's code,
    time_type "discrete"). Not stratified: any of them are drawn, as in DiffusionNFT. There are at
    least as many steps as levels."""
    start, stop = steps_within(len(sigmas) - 1, within)
    if not stratified:
        steps = np.random.default_rng(key).permutation(range(start, stop))[:count]
        return sigmas[torch.from_numpy(np.sort(steps))]
    bounds = np.linspace(start, stop, count + 1).astype(int)
    drawn = np.random.default_rng(key).random(count) * np.diff(bounds)
    return sigmas[torch.from_numpy(bounds[:-1] + drawn.astype(int))]


def noised(rollout: Rollout, sigmas: Tensor, key: tuple[int, ...]) -> tuple[Rollout, Tensor]:
    """A rollout whose states are its last latents at the noise levels sigmas, and the velocity eps
    - x0 [B,S,C,h,w] there. sigmas: [S] for all images, or [B,S]. Each image and level has its own
    noise, seeded by the key."""
    assert rollout.latents is not None
    count = sigmas.shape[-1]
    clean = rollout.latents[:, None]  # [B,1,C,h,w]
    source = Noise(key)
    shape = clean.shape[2:]
    places = zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True)
    drawn = torch.stack([source.draw(*place, shape, count - 1) for place in places])
    noise = drawn.to(clean)
    noisy = torch.empty_like(noise)
    for level in range(count):  # one by one, which saves memory
        sigma = sigmas[..., level].to(clean).view(-1, 1, 1, 1)
        noisy[:, level] = (1 - sigma) * clean[:, 0] + sigma * noise[:, level]
    first = sigmas if sigmas.ndim == 1 else sigmas[0]
    states = dataclasses.replace(
        rollout,
        states=noisy,
        schedule=Schedule(torch.cat([first, torch.zeros(1)]), "ode", 0.0, (0, count)),
        own_sigmas=None if sigmas.ndim == 1 else sigmas.to(clean.device),
    )
    return states, noise.sub_(clean)
