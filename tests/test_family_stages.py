"""Every stage on a small pipeline of every family: it trains, goes on where it stopped, merges and
is evaluated. test_second_device.py runs this file on a second device, too."""

import json
from pathlib import Path
from typing import Any

import diffusers
import fakes
import families
import pytest
import test_checkpoint

import flowalign
from flowalign.backbone import ModelError, family_of, loading
from flowalign.backbone.adapters import read_lora
from flowalign.backbone.flux import Flux
from flowalign.backbone.structure import cut_prompts
from flowalign.commands import evaluate as evaluation
from flowalign.config import ModelConfig, TrainingStage
from flowalign.teachers.merge import merge
from flowalign.training.loop import Loop

MODELS = [name for name in families.PIPELINES if name not in ("sd3", "schnell")]
# add noise to images, decode with a gradient, encode, sample with the teachers
STAGES = ("nft", "gradient", "dpo", "opd")
LENGTH = 64  # tokens: the templates of FLUX.2 and Qwen-Image leave room for the prompts


@pytest.fixture(
    scope="module",
    params=[m if m == "flux" else pytest.param(m, marks=pytest.mark.slow) for m in MODELS],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a pipeline."""
    folder = tmp_path_factory.mktemp(request.param)
    families.pipeline(request.param).save_pretrained(folder)
    found = ModelConfig(id=str(folder), max_sequence_length=LENGTH)
    assert cut_prompts(found, fakes.PROMPTS) == []
    return str(folder)


def settings(model: str, output: Path, stage: str, updates: int) -> TrainingStage:
    """So many updates of a stage; images of 64 x 32 pixels."""
    shared = [f"train.updates={updates}", "train.checkpoint_every=1", "optimizer.schedule=constant",
              "model.height=64", f"model.max_sequence_length={LENGTH}"]  # fmt: skip
    if stage == "nft":
        return fakes.forward(model, output, *shared, stage=stage)
    if stage == "gradient":
        return fakes.ascending(model, output, *shared)
    if stage == "dpo":
        return fakes.pairs(model, output, *shared, size=(64, 32))
    more = ["anchor={adapter: null, weight: 0.5}"] if stage == "opd" else []
    return fakes.distillation(model, output, *shared, *more, stage=stage)


def run(model: str, output: Path, stage: str, updates: int = 2, resume: bool = False) -> Loop:
    loop = fakes.wired(settings(model, output, stage, updates))
    assert loop.resume() == resume
    loop.run()
    return loop


@pytest.mark.slow
def test_all_that_saves_memory_goes_together(model: str, tmp_path: Path) -> None:
    """The keys of docs/before-you-spend.md, which recommends fp8 with checkpointing."""
    given = ["model.dtype=bfloat16", "model.quantization=fp8", "model.gradient_checkpointing=true",
             "model.offload_text_encoders=true", "model.decode_batch=2",
             "model.height=64", "train.updates=2",
             f"model.max_sequence_length={LENGTH}"]  # fmt: skip
    loop = fakes.wired(fakes.settings(model, tmp_path / "run", *given))
    loop.run()
    rows = test_checkpoint.state(loop)["metrics"]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_learns_and_goes_on_where_it_stopped(model: str, stage: str, tmp_path: Path):
    whole = test_checkpoint.state(run(model, tmp_path / "whole", stage))
    assert all(row["grad_norm"] > 0 for row in whole["metrics"]) and len(whole["metrics"]) == 2
    run(model, tmp_path / "run", stage, updates=1)
    again = test_checkpoint.state(run(model, tmp_path / "run", stage, resume=True))
    test_checkpoint.assert_same(again, whole)


@pytest.mark.slow
def test_adapters_merge_load_and_are_evaluated(model: str, tmp_path: Path) -> None:
    teachers = fakes.teachers(model, tmp_path)
    merge(list(teachers.values()), tmp_path / "merged")
    pipe: Any = flowalign.load(model, lora=tmp_path / "merged")
    assert pipe.transformer.peft_config and read_lora(tmp_path / "merged").ranks
    models = {"base": None, "merged": str(tmp_path / "merged")}
    small = {**fakes.SMALL, "height": 64, "max_sequence_length": LENGTH}
    keys = {"models": models, "model": {"id": model, **small}}
    path = fakes.evaluation(model, tmp_path, fakes.PROMPTS[:3], {"name": "b"}, **keys)
    assert evaluation.main(["--config", str(path)]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["models"]
    values = [[row["value"] for row in results[name]["images"]["b"]] for name in models]
    assert len(values[0]) == 3 and values[0] != values[1]


def test_a_pipeline_of_no_family_is_refused() -> None:
    with pytest.raises(ModelError, match=r"MyPipeline.*FluxPipeline.*backbones\.md"):
        family_of("MyPipeline")


class Mine(Flux):
    """A family of a plugin: FLUX with a pipeline class of its own."""

    name, pipeline = "mine", "MyPipeline"


def test_a_plugin_adds_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point, as an installed package declares it."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[flowalign.backbones]\nmine = {__name__}:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(diffusers, "MyPipeline", diffusers.FluxPipeline, raising=False)
    loading.families.cache_clear()
    try:
        assert family_of("MyPipeline") is Mine and family_of("FluxPipeline") is Flux
    finally:
        loading.families.cache_clear()
