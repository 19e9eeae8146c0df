"""Two runs of one config that must do the same: rollout, labels, gradient."""

import torch
from torch import Tensor
from torch.testing import assert_close

from flowalign.loop import Loop, pairs_of
from flowalign.student.opd import Student
from flowalign.types import Rollout


def assert_same(one: Loop, other: Loop, *, values: float, gradients: float) -> None:
    """The student `other` does what `one` does, within absolute errors of states and labels, and
    of gradients relative to the largest. Its teachers and its anchor do differ."""
    rollout = one.rollout(0)
    assert_close(other.rollout(0).states, rollout.states, rtol=0, atol=values)
    for loop in (one, other):
        loop.algorithm.prepare(rollout, 0)
    a, b = one.algorithm, other.algorithm
    assert isinstance(a, Student) and isinstance(b, Student)
    assert_close(b.labels, a.labels, rtol=0, atol=values)
    assert_close(b.anchors, a.anchors, rtol=0, atol=values)
    by_task = [a.labels[[task == name for task in rollout.batch.tasks]] for name in ("even", "odd")]
    assert (by_task[0] - by_task[1]).abs().max() > 1e-2 < (a.labels - a.anchors).abs().max()
    expected = gradient(one, rollout)
    scale = float(expected.abs().max())
    assert_close(gradient(other, rollout), expected, rtol=0, atol=gradients * scale)


def gradient(loop: Loop, rollout: Rollout) -> Tensor:
    """Of the loss on all pairs, by the trained parameters, flat."""
    (pairs,) = pairs_of(rollout, torch.ones(len(rollout), dtype=torch.bool), 100)
    loss = loop.algorithm.loss(pairs, loop.velocity(pairs)).total
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, loop.parameters)])
