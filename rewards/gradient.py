"""The gradient of a reward: every call of `with_gradient`, and what is checked before a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowalign.rewards.base import RewardBase
from flowalign.rewards.scoring import score, settings_kept
from flowalign.types import Metadata

# `__call__` sees 8 bits a channel, and may compute in other bits
RELATIVE, ABSOLUTE = 0.05, 0.02
CHECKED = 2  # images, at most, at which a gradient is checked
STEPS = (0.01, 0.03, 0.1)  # root mean squares, of pixels in [0,1]


class GradientError(ValueError):
    """A reward whose `with_gradient` is not what it has to be."""


def value_with_gradient(
    reward: RewardBase, images: Tensor, prompts: Sequence[str], metadata: Metadata
) -> Tensor:
    """The value [B] of images [B,3,H,W] in [0,1]. It requires a gradient where they do.

    Raises GradientError where the reward returns something else, and whatever it raises itself.
    """
    with settings_kept(reward.name):
        value = reward.with_gradient(images, prompts, metadata)
    if not isinstance(value, Tensor):
        raise GradientError(f"it returned {type(value).__name__}; want a tensor [{len(images)}]")
    if list(value.shape) != [len(images)]:
        raise GradientError(f"it returned the shape {list(value.shape)}; want [{len(images)}]")
    if images.requires_grad and not value.requires_grad:
        raise GradientError("its value has no gradient (no_grad, detach, or numpy?)")
    return value


def gradient_problems(
    reward: RewardBase, images: Tensor, prompts: Sequence[str], metadata: Metadata
) -> Iterator[str]:
    """What is wrong with a reward's gradient at the first of B images [B,3,H,W] in [0,1]: it is NaN
    or 0, the value of an image depends on other images, or is not that of `__call__`, or a step
    along the gradient does not raise that value."""
    # with less contrast: a step must be possible from every pixel
    images = (0.1 + 0.8 * images[:CHECKED].detach()).requires_grad_()
    prompts = prompts[:CHECKED]
    metadata = metadata[:CHECKED]
    try:
        with torch.enable_grad():
            value = value_with_gradient(reward, images, prompts, metadata)
            slopes = [torch.autograd.grad(v, images, retain_graph=True)[0] for v in value]
    except Exception as error:  # whatever the user's code raises
        yield f"{type(error).__name__}: {error}"
        return
    slope = torch.stack([slopes[row][row] for row in range(len(images))])
    if not slope.isfinite().all():
        yield "its gradient is NaN or infinite"
        return
    if not slope.any():
        yield "its gradient is 0 everywhere (does it round, or compare?)"
        return
    if any(slopes[row][other].any() for row in range(len(images)) for other in range(row)):
        yield "the value of an image depends on other images of the batch"
    images = images.detach()
    called = score(reward, images, prompts, metadata)
    if not called.valid.all():
        return  # a failure of `__call__` is told where the run scores
    if not torch.allclose(value.detach().float().cpu(), called.value, RELATIVE, ABSOLUTE):
        seen = f"{value.tolist()}, and __call__ {called.value.tolist()}"
        yield f"its values are {seen}; they must be the same"
        return
    unit = slope / slope.square().mean().sqrt()
    moved = [score(reward, (images + step * unit).clamp(0, 1), prompts, metadata) for step in STEPS]
    if not any(scores.value.sum() > called.value.sum() for scores in moved):
        yield "the value of __call__ does not rise along its gradient: has it another sign?"
