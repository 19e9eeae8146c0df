"""A teacher on another base: a second frozen transformer labels the student's states."""

from pathlib import Path

import fakes
import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import ConfigError, TrainingStage, load, parse
from flowalign.config.model import ModelConfig
from flowalign.teachers.bank import Bank
from flowalign.training.preflight import world_problems
from flowalign.types import Rollout

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The random model with a transformer of twice the width, and more layers."""
    pipe = fakes.pipeline()
    torch.manual_seed(7)
    wider = {"num_layers": 3, "num_attention_heads": 4, "caption_projection_dim": 64}
    transformer = SD3Transformer2DModel.from_config({**pipe.transformer.config, **wider})
    pipe.register_modules(transformer=transformer.eval())
    folder = tmp_path_factory.mktemp("large")
    pipe.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def large_lora(large_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA of that model."""
    backbone = fakes.adapted(large_model, "t")
    folder = tmp_path_factory.mktemp("lora")
    backbone.save_adapter("t", folder)
    return str(folder)


def taught(model: str, large: str, output: Path, *overrides: str, **more: str) -> TrainingStage:
    """Task `odd` has a LoRA of the student's base, task `even` the other base."""
    keys = [f"teachers.even={{adapter: null, base: {large!r}}}", "student.label_dtype=float32"]
    keys = keys[: 1 if more else 2]
    return fakes.distillation(model, output, *keys, *overrides, **more)


def alone(backbone: Backbone, rollout: Rollout, rows: list[int], guidance: float) -> Tensor:
    """Velocities [B,S,C,h,w] of a model that knows nothing of a student."""
    steps = len(rollout.steps)
    sigma = rollout.sigmas[rollout.steps].repeat(len(rows))
    cond = rollout.conditioning.select(torch.tensor(rows).repeat_interleave(steps))
    with torch.no_grad():
        flat = backbone.velocity(rollout.states[rows].flatten(0, 1), sigma, cond, guidance=guidance)
    return flat.unflatten(0, (len(rows), steps))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_labels_are_those_of_that_transformer(
    random_model: str, large_model: str, large_lora: str, tmp_path: Path, guidance: float
) -> None:
    """Without an adapter and with a LoRA of that base, of which there is one copy."""
    odd = f"teachers.odd={{adapter: {large_lora!r}, base: {large_model!r}}}"
    scale = [f"teachers.{name}.guidance={guidance}" for name in ("even", "odd")]
    loop = fakes.wired(taught(random_model, large_model, tmp_path / "run", odd, *scale), moved=True)
    others = list(loop.backbone.others.values())
    assert len(others) == 2 and others[0] is others[1]
    assert others[0].pipe.vae is loop.backbone.pipe.vae
    rollout = loop.rollout(0)
    assert loop.algorithm.teachers
    label = loop.algorithm.teachers(rollout)
    expected = fakes.backbone(large_model)
    for name in ("even", "odd"):
        if name == "odd":
            expected.load_adapter("only", large_lora)
        rows = [i for i, teacher in enumerate(label.teacher) if teacher == name]
        assert torch.equal(label.velocity[rows], alone(expected, rollout, rows, guidance))
    trained = [n for n, p in loop.backbone.core.named_parameters() if p.requires_grad]
    assert trained and len(trained) == len(loop.parameters)
    assert not any(p.requires_grad for p in others[0].core.parameters())


def test_a_target_beyond_it_has_the_students_base_as_reference(
    random_model: str, large_model: str, tmp_path: Path
) -> None:
    given = ["teachers.even.extrapolate=1.5", "anchor={adapter: null}"]
    loop = fakes.wired(taught(random_model, large_model, tmp_path / "run", *given), moved=True)
    rollout = loop.rollout(0)
    assert loop.algorithm.teachers
    label = loop.algorithm.teachers(rollout)
    rows = [i for i, teacher in enumerate(label.teacher) if teacher == "even"]
    own = alone(fakes.backbone(large_model), rollout, rows, 1.0)
    base = alone(fakes.backbone(random_model), rollout, rows, 1.0)
    torch.testing.assert_close(label.velocity[rows], base + 1.5 * (own - base), rtol=0, atol=1e-5)


def test_it_has_its_own_dtype(random_model: str, large_model: str, tmp_path: Path) -> None:
    given = ["teachers.even.dtype=bfloat16", "teachers.even.device=cpu"]
    loop = fakes.wired(taught(random_model, large_model, tmp_path / "run", *given))
    (other,) = loop.backbone.others.values()
    assert other.core.dtype == other.dtype == torch.bfloat16
    assert loop.backbone.core.dtype == torch.float32
    rollout = loop.rollout(0)
    assert loop.algorithm.teachers
    label = loop.algorithm.teachers(rollout)
    rows = [i for i, teacher in enumerate(label.teacher) if teacher == "even"]
    expected = alone(fakes.backbone(large_model), rollout, rows, 1.0)
    gap = (label.velocity[rows] - expected).norm() / expected.norm()
    assert 0 < gap < 0.02
