"""Credit: from the rewards of B images to their advantages. Pure tensors.

group [B]: which images share a prompt. task [B]: which images share a reward; no statistic spans
two tasks, as each reward has its own range (None = one task). valid [B]: False where the reward
failed; such a row leaves every statistic and gets advantage 0. Computed in float64, returned as
float32 [B], without gradient.

`gdpo` uses the parts of a composed reward as well. Without them it takes the reward as its only
part, so that every variant can be called with (value, group) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

# Rewards that differ by less than this share of their size are equal: 8 roundings of float32.
_ROUNDING = 8 * torch.finfo(torch.float32).eps


def group_relative(
    value: Tensor,
    group: Tensor,
    *,
    std: str = "batch",
    eps: float = 1e-4,
    valid: Tensor | None = None,
    task: Tensor | None = None,
) -> Tensor:
    """(value - mean of its group) / (std + eps) [B], the advantage of GRPO (2402.03300).

    std "batch": of all valid values of the image's task around their common mean (Flow-GRPO's
    global_std=True, whose batches hold one task each); "group": of the image's own group. Both are
    population std (divide by n).
    A group of one gets 0. Departure: a group whose values are equal up to rounding gets exactly
    0, where the published code leaves +-1e-17 if the mean rounds, and then trains on it.
    """
    if std not in ("batch", "group"):
        raise ValueError(f"unknown std {std!r}; take 'batch' or 'group'")
    value, group, valid, task = _checked(value, group, valid, task)
    advantage = torch.zeros_like(value)
    for images in _groups(task, valid):
        spread = value[images].std(correction=0)  # population std
        for rows in _groups(group, valid & (task == task[images[0]])):
            rewards = value[rows]
            if not _all_equal(rewards):
                scale = spread if std == "batch" else rewards.std(correction=0)
                advantage[rows] = (rewards - rewards.mean()) / (scale + eps)
    return advantage.float()


def gaussian_ranks(
    value: Tensor, group: Tensor, *, valid: Tensor | None = None, task: Tensor | None = None
) -> Tensor:
    """Ranks within the group mapped to normal quantiles [B]: Phi^-1((rank - 1/2) / n), rank 1..n.

    Equal values (up to rounding) share the mean of their quantiles; a group that is all equal, or
    of one, gets 0. The idea is G2RPO's (2604.08539): an advantage distributed as N(0, 1) whatever
    the reward's scale and tails. Only the order counts: distances between rewards are lost. n
    quantiles have a std below 1 (.67 for n = 2, .97 for n = 24), and with ties the result is not
    normal (rewards of 0 and 1 give two values).
    """
    value, group, valid, _ = _checked(value, group, valid, task)  # a group is of one task
    advantage = torch.zeros_like(value)
    for rows in _groups(group, valid):
        rewards, order = value[rows].sort()
        if _all_equal(rewards):
            continue
        n = len(rewards)
        rank = torch.arange(1, n + 1, dtype=rewards.dtype, device=rewards.device)
        quantile = torch.special.ndtri((rank - 0.5) / n)  # Phi^-1
        gap = rewards.diff(prepend=rewards[:1]) > _ROUNDING * rewards.abs().max()
        tie = gap.long().cumsum(0)  # [n] equal numbers for equal values
        shared = torch.zeros_like(rewards).index_add(0, tie, quantile) / tie.bincount(minlength=n)
        advantage[rows[order]] = shared[tie]
    return advantage.float()


def gdpo(
    value: Tensor,
    group: Tensor,
    *,
    parts: Tensor | None = None,
    weights: Tensor | None = None,
    valid: Tensor | None = None,
    task: Tensor | None = None,
) -> Tensor:
    """GDPO (2601.05242): every part of a reward normalised in its group, then added up [B].

        sum = sum over k of weight_k (part_k - mean of its group) / max(std of its group, 1e-6)
        A   = (sum - mean of its task) / max(std of its task, 1e-6)

    parts, weights [K,B]: the parts of the reward and how they are weighted, a column an image; a
    weight of 0 = the image's reward has no such part. None = the value is the only part. With
    GRPO's one normalisation of the weighted sum, the part with the largest range dominates.
    Population std. A part that is NaN leaves that part's statistics and adds 0. Departure: a group
    in which no part has a spread gets exactly 0, as in `group_relative`.
    """
    value, group, valid, task = _checked(value, group, valid, task)
    parts = value[None] if parts is None else parts.to(value.device).detach().double()
    weights = torch.ones_like(parts) if weights is None else weights.to(parts)
    if parts.ndim != 2 or parts.shape[1:] != value.shape or weights.shape != parts.shape:
        raise ValueError(
            f"parts and weights must both be [K,{len(value)}], got {list(parts.shape)} and "
            f"{list(weights.shape)}"
        )
    total, spread = torch.zeros_like(value), torch.zeros_like(valid)
    for part, weight in zip(parts, weights, strict=True):
        for rows in _groups(group, valid & torch.isfinite(part) & (weight != 0)):
            scores = part[rows]
            if not _all_equal(scores):
                scale = scores.std(correction=0).clamp_min(1e-6)
                total[rows] += weight[rows] * (scores - scores.mean()) / scale
                spread[rows] = True
    advantage = torch.zeros_like(value)
    for rows in _groups(task, valid):
        sums = total[rows]
        normalised = (sums - sums.mean()) / sums.std(correction=0).clamp_min(1e-6)
        advantage[rows] = torch.where(spread[rows], normalised, 0.0)
    return advantage.float()


ADVANTAGES: dict[str, Callable[..., Tensor]] = {  # (value, group, *, valid, task) -> [B]
    "group_std": partial(group_relative, std="group"),
    "batch_std": partial(group_relative, std="batch"),
    "gaussian": gaussian_ranks,
    "gdpo": gdpo,
}


def _checked(
    value: Tensor, group: Tensor, valid: Tensor | None, task: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All four [B] on one device, value as float64 without gradient. ValueError for bad input."""
    if valid is None:
        valid = torch.ones(value.shape, dtype=torch.bool)
    if task is None:
        task = torch.zeros(value.shape, dtype=torch.long)
    shapes = [list(t.shape) for t in (value, group, valid, task)]
    if value.ndim != 1 or shapes != [shapes[0]] * 4:
        raise ValueError(f"value, group, valid and task must all be [B], got {shapes}")
    device = value.device
    group = group.to(device)
    valid = valid.to(device, torch.bool)
    task = task.to(device)
    broken = int((valid & ~torch.isfinite(value)).sum())
    if broken:
        raise ValueError(f"{broken} of {len(value)} values are not finite; mark them in `valid`")
    return value.detach().double(), group, valid, task


def _groups(name: Tensor, valid: Tensor) -> Iterator[Tensor]:
    for one in name[valid].unique():  # yields the positions of its valid rows
        yield ((name == one) & valid).nonzero().flatten()


def _all_equal(value: Tensor) -> bool:
    return bool(value.max() - value.min() <= _ROUNDING * value.abs().max())
