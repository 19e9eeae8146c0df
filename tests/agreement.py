"""Two runs of one config that must do the same: rollout, labels, gradient."""

import torch
from torch import Tensor
from torch.testing import assert_close

from flowalign.training.algorithm import pairs_of
from flowalign.training.loop import Loop
from flowalign.training.student.opd import Labels


def assert_same(one: Loop, other: Loop, *, values: float, gradients: float) -> None:
    """The student `other` does what `one` does, within absolute errors of states and labels, and
    of gradients relative to the largest. Its teachers and its anchor do differ."""
    rollout = one.rollout(0)
    assert_close(other.rollout(0).states, rollout.states, rtol=0, atol=values)
    a, b = (loop.algorithm.prepare(rollout, 0) for loop in (one, other))
    assert isinstance(a, Labels) and isinstance(b, Labels)
    assert a.anchor is not None and b.anchor is not None
    assert_close(b.velocity, a.velocity, rtol=0, atol=values)
    assert_close(b.anchor, a.anchor, rtol=0, atol=values)
    tasks = rollout.batch.tasks
    by_task = [a.velocity[[task == name for task in tasks]] for name in ("even", "odd")]
    assert (by_task[0] - by_task[1]).abs().max() > 1e-2 < (a.velocity - a.anchor).abs().max()
    expected = gradient(one, a)
    scale = float(expected.abs().max())
    assert_close(gradient(other, b), expected, rtol=0, atol=gradients * scale)


def gradient(loop: Loop, labels: Labels) -> Tensor:
    """Of the loss on all pairs, by the trained parameters, flat."""
    rollout = labels.rollout
    (pairs,) = pairs_of(rollout, torch.ones(len(rollout), dtype=torch.bool), 100)
    loss = loop.algorithm.loss(pairs, loop.algorithm.velocity(pairs), labels).total
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, loop.parameters)])
