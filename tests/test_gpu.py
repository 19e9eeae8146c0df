"""What only a GPU can show: `python -m pytest -m gpu`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fakes
import families
import pytest
import torch
from agreement import assert_same
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from flowalign.backbone import Backbone
from flowalign.config import ADAPTER, ModelConfig, to_yaml
from flowalign.rewards import score
from flowalign.rewards.preference import PickScore
from flowalign.rewards.scoring import AsyncScorer
from flowalign.training.algorithm import pairs_of
from flowalign.training.loop import Loop
from flowalign.types import PromptBatch

PATHS = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])

pytestmark = [
    pytest.mark.gpu,
    # dynamo looks at .grad of a block's inputs, which are no leaves, while it traces
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # inductor, as it is imported and about products in float32
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
TEACHERS = ["anchor={adapter: null}", "student.label_dtype=float32", "student.label_batch=8"]


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_rollout_labels_and_update_are_the_eager_ones(random_model: str, tmp_path: Path):
    loops: list[Loop] = []
    for compile in (False, True):
        given = [*TEACHERS, f"model.compile={str(compile).lower()}"]
        config = fakes.distillation(random_model, tmp_path / f"run{compile}", *given)
        loops.append(fakes.wired(config, moved=True))
        backbone = loops[-1].backbone
        assert backbone.device.type == "cuda" and backbone.compiled == compile
    assert_same(*loops, values=1e-3, gradients=1e-2)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_first_ratio_is_exactly_1_in_bf16_where_batches_are_equal(
    random_model: str, tmp_path: Path, guidance: float
) -> None:
    given = ["model.dtype=bfloat16", f"rollout.guidance={guidance}"]
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", *given), moved=True)
    rollout = loop.rollout(0)
    assert rollout.log_probs is not None
    prepared = loop.algorithm.prepare(rollout, 0)
    keep = torch.ones(len(rollout), dtype=torch.bool)
    for pairs in pairs_of(rollout, keep, loop.config.rollout.batch_size):
        velocity = loop.algorithm.velocity(pairs)
        metrics = loop.algorithm.loss(pairs, velocity, prepared).metrics
        assert metrics["ratio_error"] == 0


@pytest.mark.parametrize("offload", [False, True])
def test_a_reward_scores_on_its_own_device_from_a_worker_thread(offload: bool) -> None:
    """A thread begins with device 0 as its current one, whichever its maker had."""
    images = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    batch = PromptBatch(["a red circle"] * 4, ["a"] * 4, [{}] * 4)
    expected = PickScore("tiny", device="cpu")(images, batch.prompts, batch.metadata)
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    reward = PickScore("tiny", device=last, offload=offload)
    scorer = AsyncScorer(lambda x, batch: score(reward, x, batch.prompts, batch.metadata), 60)
    with torch.cuda.device(last):
        for _ in range(2):
            scorer.submit(images.to(last), batch)
        found = scorer.collect()
    assert found.valid.all() and found.value.device.type == "cpu"
    assert_close(found.value, torch.cat([expected.value] * 2), rtol=0, atol=1e-4)


def test_a_resumed_run_is_the_uninterrupted_one_where_it_is_deterministic(random_model, tmp_path):
    """In processes of their own: cuBLAS reads its workspace's size when it starts."""

    def run(folder: Path, updates: int, *more: str) -> dict[str, Tensor]:
        found = fakes.distillation(
            random_model, folder, "train.deterministic=true", f"train.updates={updates}",
            "train.checkpoint_every=1", "optimizer.schedule=constant", "model.dtype=bfloat16",
        )  # fmt: skip
        path = folder / "given.yaml"
        path.write_text(to_yaml(found))
        subprocess.run(
            [sys.executable, "-m", "flowalign.commands.cli", "train", "--config", str(path), *more],
            env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": PATHS},
            check=True,
            timeout=300,
        )
        return load_file(folder / "adapter" / ADAPTER)

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4, "--resume")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_float16_trains_with_a_scaled_loss(random_model: str, tmp_path: Path) -> None:
    found = fakes.settings(random_model, tmp_path / "run", "model.dtype=float16")
    loop = fakes.wired(found, moved=True)
    scaler = loop.accelerator.scaler
    assert scaler is not None and scaler.get_scale() > 1
    before = torch.cat([p.detach().flatten().clone() for p in loop.parameters])
    loop.run()
    after = torch.cat([p.detach().flatten() for p in loop.parameters])
    assert torch.isfinite(after).all() and not torch.equal(before, after)
    assert {p.dtype for p in loop.parameters} == {torch.float32}


@pytest.mark.parametrize("family", ["flux", "flux2"])
def test_flux_learns_in_bf16_and_without_cudnns_attention(family: str, tmp_path: Path) -> None:
    """Its backward pass ended in an illegal memory access, which no process survives."""
    families.pipeline(family).save_pretrained(tmp_path / "model")
    found = fakes.settings(str(tmp_path / "model"), tmp_path / "run", "model.dtype=bfloat16")
    loop = fakes.wired(found, moved=True)
    before = torch.cat([p.detach().flatten().clone() for p in loop.parameters])
    loop.run()
    after = torch.cat([p.detach().flatten() for p in loop.parameters])
    assert torch.isfinite(after).all() and not torch.equal(before, after)


@pytest.mark.parametrize("attention", ["native", "_native_flash", "_native_efficient"])
def test_an_attention_backend_gives_the_same_velocity(tmp_path: Path, attention: str) -> None:
    families.pipeline("flux").save_pretrained(tmp_path)

    def velocity(name: str | None) -> Tensor:
        sizes = {"height": 32, "width": 32, "max_sequence_length": 14, "dtype": "bfloat16"}
        model = ModelConfig.model_validate({"id": str(tmp_path), "attention": name, **sizes})
        backbone = Backbone.load(model, "cuda")
        cond = backbone.encode(fakes.PROMPTS[:2])
        x = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return backbone.velocity(x.cuda(), 0.5, cond, guidance=2.0)

    assert_close(velocity(attention), velocity(None), rtol=0.05, atol=0.05)
