"""A compiled model does what the eager one does: rollout, labels of two teachers, update."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowalign.loop import Loop, pairs_of
from flowalign.student import Student
from flowalign.types import Rollout

# aot_eager compiles the same graphs under the same guards, and leaves out the code generation
CASES = [
    ("aot_eager", 3.0),
    pytest.param("inductor", 1.0, marks=pytest.mark.slow),
    pytest.param("inductor", 3.0, marks=pytest.mark.slow),
]
pytestmark = [  # torch's own: dynamo looks at .grad of a block's inputs, which are no leaves
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
FLOAT32 = "student.label_dtype=float32"
SAME_SHAPE = "student.label_batch=8"  # as the rollout: another shape would be compiled anew


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(model: str, folder: Path, *overrides: str, backend: Any = None) -> tuple[Loop, Rollout]:
    """A student with two teachers and an anchor, moved away from all of them, and its rollout."""
    given = [FLOAT32, SAME_SHAPE, "anchor={adapter: null}", *overrides]
    loop = fakes.wired(fakes.distillation(model, folder, *given), moved=True)
    if backend:
        loop.backbone.compile(backend=backend)
    return loop, loop.rollout(0)


def gradient(loop: Loop, rollout: Rollout) -> Tensor:
    (pairs,) = pairs_of(rollout, torch.ones(len(rollout), dtype=torch.bool), 100)
    loss = loop.algorithm.loss(pairs, loop.velocity(pairs)).total
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, loop.parameters)])


@pytest.mark.parametrize(("backend", "guidance"), CASES)
def test_compiled_rollout_labels_and_update_are_the_eager_ones(
    random_model: str, tmp_path: Path, backend: str, guidance: float
) -> None:
    given = [f"rollout.guidance={guidance}"]
    given += [f"teachers.{name}.guidance={guidance}" for name in ("even", "odd")]
    eager, rollout = run(random_model, tmp_path / "eager", *given)
    compiled, again = run(random_model, tmp_path / "compiled", *given, backend=backend)
    assert_close(again.states, rollout.states, rtol=0, atol=1e-5)
    for loop in (eager, compiled):
        loop.algorithm.prepare(rollout, 0)
    a, b = eager.algorithm, compiled.algorithm
    assert isinstance(a, Student) and isinstance(b, Student)
    assert_close(b.labels, a.labels, rtol=0, atol=1e-5)
    assert_close(b.anchors, a.anchors, rtol=0, atol=1e-5)
    expected = gradient(eager, rollout)
    assert_close(
        gradient(compiled, rollout), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )
    by_task = [a.labels[[task == name for task in rollout.batch.tasks]] for name in ("even", "odd")]
    assert (by_task[0] - by_task[1]).abs().max() > 1e-2  # the teachers do differ


def test_every_block_is_compiled_and_no_more(random_model: str, tmp_path: Path) -> None:
    loop, _ = run(random_model, tmp_path / "run", backend="eager")
    core = loop.backbone.core
    found = {type(m).__name__ for m in core.modules() if m._compiled_call_impl is not None}
    assert loop.backbone.compiled and found == {"JointTransformerBlock"}
