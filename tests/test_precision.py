"""One policy of precision: float32 adapters compute in the base's dtype, wherever they are used."""

from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowalign.backbone import Backbone
from flowalign.backbone.lora import CastingLinear
from flowalign.config import EvalStage, load
from flowalign.eval.evaluation import load_adapters
from flowalign.training.algorithm import STUDENT
from flowalign.training.inputs import Inputs
from flowalign.training.run import processes


def velocity(backbone: Backbone) -> Tensor:
    """At one noisy batch; as it is, without autocast."""
    cond = backbone.encode(fakes.PROMPTS[:3])
    x = torch.randn(3, *backbone.latent_shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return backbone.velocity(x, 0.6, cond, guidance=3.0)


def test_a_casting_layer_is_the_rounded_product_with_float32_weights_and_gradients() -> None:
    layer, x = CastingLinear(8, 4, bias=False), torch.randn(2, 3, 8, dtype=torch.bfloat16)
    expected = x @ layer.weight.detach().bfloat16().T
    found = layer(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    found.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert_close(layer.weight.grad, x.float().sum((0, 1)).expand(4, 8), rtol=1e-2, atol=1e-2)
    single = CastingLinear(8, 4, bias=False)
    assert torch.equal(single(x.float()), x.float() @ single.weight.T)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16",
                                   pytest.param("float16", marks=pytest.mark.slow)])  # fmt: skip
def test_training_and_evaluation_have_the_same_arithmetic(random_model, tmp_path, dtype: str):
    """The velocity that a run trains, and the one that `flowalign eval` scores, to the bit."""
    given = [f"model.dtype={dtype}"]
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", *given), moved=True)
    trained = velocity(loop.backbone)
    loop.backbone.save_adapter(STUDENT, tmp_path / "adapter")
    models = {"base": None, "mine": str(tmp_path / "adapter")}
    model = loop.config.model.model_dump(mode="json")
    path = fakes.evaluation(random_model, tmp_path, ["a"], models=models, model=model)
    found = load(path, stage=EvalStage)
    assert isinstance(found, EvalStage)
    backbone = Backbone.load(found.model)
    load_adapters(backbone, found, Inputs(found.model))
    with backbone.adapter("eval_mine"):
        assert torch.equal(velocity(backbone), trained)
    with backbone.adapter(None), loop.backbone.base():
        assert torch.equal(velocity(backbone), velocity(loop.backbone))
    assert not any(p.requires_grad for p in backbone.core.parameters())


def test_a_half_precision_base_is_under_no_autocast(random_model: str, tmp_path: Path) -> None:
    """Norms and modulation are computed in the base's dtype, in training as in sampling."""
    given = ["model.dtype=bfloat16", "optimizer.micro_batch=8", "train.updates=2"]
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", *given), moved=True)
    kinds: set[Any] = set()
    for module in loop.backbone.core.modules():
        if isinstance(module, torch.nn.LayerNorm | CastingLinear):
            module.register_forward_hook(lambda _, args, out: kinds.add((args[0].dtype, out.dtype)))
    loop.run()
    assert kinds == {(torch.bfloat16, torch.bfloat16)}
    assert {p.dtype for p in loop.parameters} == {torch.float32}
    assert all(row["grad_norm"] > 0 and row["ratio_error"] == 0 for row in fakes.lines(loop))


def test_labels_of_a_frozen_teacher_are_the_velocities_it_was_trained_with(random_model, tmp_path):
    """A frozen adapter has the base's dtype: what a float32 one is rounded to at every product."""
    paths = fakes.teachers(random_model, tmp_path)
    found = []
    for frozen in (False, True):
        backbone = fakes.backbone(random_model, dtype="bfloat16")
        backbone.load_adapter("odd", paths["odd"], frozen=frozen)
        with backbone.adapter("odd"):
            found.append(velocity(backbone))
        kinds = {p.dtype for p in backbone.adapter_parameters("odd")}
        assert kinds == {torch.bfloat16 if frozen else torch.float32}
    assert torch.equal(*found)


def test_float16_asks_accelerate_for_a_scaler_and_nothing_for_autocast(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate has no fp16 on a CPU, and says so itself: the choice is what can be seen here."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(processes, "Accelerator", lambda **given: seen.append(given))
    for dtype in ("float32", "bfloat16", "float16"):
        processes.start(fakes.settings(random_model, tmp_path / "run", f"model.dtype={dtype}"))
    assert [given["mixed_precision"] for given in seen] == ["no", "no", "fp16"]
    assert all(not handler.enabled for given in seen for handler in given["kwargs_handlers"])
