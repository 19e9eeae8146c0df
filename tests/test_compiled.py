"""A compiled model does what the eager one does: rollout, labels of two teachers, update."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from agreement import assert_same
from torch.testing import assert_close

from flowalign.backbone.compilation import compiles
from flowalign.config import ModelConfig
from flowalign.training.algorithm import pairs_of
from flowalign.training.loop import Loop

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


def run(model: str, folder: Path, *overrides: str, compiled: bool = False) -> Loop:
    """A student with two teachers and an anchor, moved away from all of them."""
    given = [FLOAT32, SAME_SHAPE, "anchor={adapter: null}", *overrides]
    loop = fakes.wired(fakes.distillation(model, folder, *given), moved=True)
    if compiled:
        loop.backbone.compile(backend="inductor")
    return loop


@pytest.mark.long
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_compiled_rollout_labels_and_update_are_the_eager_ones(
    random_model: str, tmp_path: Path, guidance: float
) -> None:
    given = [f"rollout.guidance={guidance}"]
    given += [f"teachers.{name}.guidance={guidance}" for name in ("even", "odd")]
    eager = run(random_model, tmp_path / "eager", *given)
    compiled = run(random_model, tmp_path / "compiled", *given, compiled=True)
    assert_same(eager, compiled, values=1e-5, gradients=1e-5)


@pytest.mark.parametrize(
    ("asked", "device", "images", "quantization", "chosen"),
    [
        ("auto", "cuda", 500, None, True),
        ("auto", "cuda", 499, None, False),
        ("auto", "cpu", 10**6, None, False),
        ("auto", "cuda", 10**6, "nf4", False),
        (True, "cpu", 1, None, True),
        (False, "cuda", 10**6, None, False),
    ],
)
def test_auto_compiles_where_it_pays(
    asked: bool | str, device: str, images: int, quantization: str | None, chosen: bool
) -> None:
    model = ModelConfig.model_validate(
        {"id": "tiny", "dtype": "bfloat16", "compile": asked, "quantization": quantization}
    )
    assert compiles(model, device, images)[0] == chosen


def test_blocks_that_do_not_compile_run_eagerly(
    random_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("no compiler here")

    model = fakes.backbone(random_model)
    x, cond = torch.randn(2, *model.latent_shape), model.encode(fakes.PROMPTS[:2])
    with torch.no_grad():
        eager = model.velocity(x, 0.7, cond, guidance=1.0)
        model.compile(backend=broken)  # pyright: ignore[reportArgumentType]
        for _ in range(2):
            assert torch.equal(model.velocity(x, 0.7, cond, guidance=1.0), eager)
    assert not model.compiled
    (warning,) = (record for record in caplog.records if record.name == "flowalign")
    assert "JointTransformerBlock" in warning.message and "no compiler here" in warning.message


@pytest.mark.slow
def test_a_compiled_loss_of_pairs_is_the_eager_one(random_model: str, tmp_path: Path) -> None:
    """With the reference of a run that starts from a LoRA."""
    start = fakes.teachers(random_model, tmp_path)["even"]
    found = []
    for backend in (None, "aot_eager"):
        given = fakes.pairs(random_model, tmp_path / "run", f"lora.init={start}", "dpo.beta=10")
        loop = fakes.wired(given, moved=True)
        if backend:
            loop.backbone.compile(backend=backend)
        prepared: Any = loop.algorithm.prepare(loop.rollout(0), 0)
        (pairs,) = pairs_of(prepared.rollout, prepared.keep, 32)
        loss = loop.algorithm.loss(pairs, loop.algorithm.velocity(pairs), prepared).total
        found.append((loss.detach(), fakes.gradient(loop, loss)))
    for eager, compiled in zip(*found, strict=True):
        assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def ratios(loop: Loop) -> list[float]:
    """The largest |ratio - 1| of each micro-batch of the loop's next update, before its optimizer
    steps change anything."""
    found = []
    loss = loop.algorithm.loss

    def watched(*given: Any) -> Any:
        step = loss(*given)
        found.append(step.metrics["ratio_error"])
        return step

    loop.algorithm.loss = watched  # pyright: ignore[reportAttributeAccessIssue]
    loop.step.learn(loop.algorithm.prepare(loop.rollout(0), 0))
    return found


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("window", ["null", "[1, 3]"])
def test_a_compiled_ratio_does_not_read_the_rollouts_log_probabilities(
    random_model: str, tmp_path: Path, steps: int, window: str
) -> None:
    """They are of another graph. Here they are wrong by .1, and the learning rate is 0."""
    given = [
        f"optimizer.updates_per_rollout={steps}",
        f"rollout.window={window}",
        "optimizer.lr=1e-20",
    ]
    given += ["optimizer.micro_batch=3", "grpo.clip_range=1e-5"]
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", *given), moved=True)
    rollout = loop.rollout
    loop.rollout = lambda update: replace(r := rollout(update), log_probs=r.log_probs + 0.1)  # pyright: ignore
    assert max(ratios(loop)) > 0.05
    loop.backbone.compiled = True
    assert max(ratios(loop)) == 0


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [1, 2])
def test_compiled_ratios_begin_at_one_and_the_gradient_is_the_eager_one(
    random_model: str, tmp_path: Path, dtype: str, steps: int
) -> None:
    given = [f"model.dtype={dtype}", f"optimizer.updates_per_rollout={steps}", "optimizer.lr=1e-20",
             "optimizer.micro_batch=8", "rollout.batch_size=8", "grpo.clip_range=1e-5"]  # fmt: skip
    norms = []
    for backend in (None, "inductor"):
        found = fakes.settings(random_model, tmp_path / str(backend), *given)
        loop = fakes.wired(found, moved=True)
        if backend:
            loop.backbone.compile(backend=backend)
        assert max(ratios(loop)) == 0
        means = loop.step.learn(loop.algorithm.prepare(loop.rollout(0), 0))
        norms.append(means["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4 if dtype == "float32" else 0.05)


@pytest.mark.long
def test_labels_in_16_bits_are_those_of_the_rollout_and_close_to_the_update() -> None:
    """Inductor builds other graphs with gradients and without: a teacher that equals the student
    labels what the student's rollout has, and the update is off by rounding."""
    model = fakes.backbone("tiny", dtype="bfloat16", height=96, width=96)
    for name in ("teacher", "student"):
        model.add_adapter(name, rank=8, alpha=16.0)
        fakes.shake(model, name, scale=0.05)
    model.compile()
    x, cond = torch.randn(4, *model.latent_shape), model.encode(fakes.PROMPTS[:4])
    with torch.no_grad():
        rollout = model.velocity(x, 0.7, cond, guidance=1.0)
        with model.adapter("teacher"):
            label = model.velocity(x, 0.7, cond, guidance=1.0)
    update = model.velocity(x, 0.7, cond, guidance=1.0).detach()
    assert torch.equal(label, rollout)
    assert (update - label).square().mean().sqrt() < 0.02 * update.square().mean().sqrt()
