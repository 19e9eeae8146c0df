"""An algorithm from outside the library: named by an entry point, it is a stage like any other."""

import json
import sys
from pathlib import Path
from typing import Any

import documents
import fakes
import pytest
from accelerate.state import AcceleratorState

from flowalign.commands import cli, recipe
from flowalign.config import ConfigError, Stage, TrainingStage, load, parse


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/toy_algorithm.py as a distribution on the path."""
    info = tmp_path / "site" / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    entry = "[flowalign.algorithms]\ntoy = toy_algorithm:ToyStage\nbad = toy_algorithm:Missing\n"
    (info / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(info.parent)


def run(model: str, folder: Path, *changes: str) -> Path:
    """The config file of a run of it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    raw = fakes.settings(model, folder).model_dump(mode="json", exclude={"grpo", "stage"})
    raw["rollout"] |= {"kind": "ode", "window": None}
    path = folder.parent / f"{folder.name}.yaml"
    config = parse({**raw, "stage": "toy"}, changes, stage=TrainingStage)
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_it_trains_and_resumes_to_the_same_bits(random_model: str, tmp_path: Path) -> None:
    config = run(random_model, tmp_path / "run")
    assert cli.main(["train", "--config", str(config)]) == 0
    part = run(random_model, tmp_path / "part", "train.updates=2")
    assert cli.main(["train", "--config", str(part)]) == 0
    again = ["--resume", "train.updates=4"]
    AcceleratorState._reset_state(reset_partial_state=True)
    assert cli.main(["train", "--config", str(part), *again]) == 0
    weights = [
        (tmp_path / name / "adapter" / "pytorch_lora_weights.safetensors").read_bytes()[-4000:]
        for name in ("run", "part")
    ]
    assert weights[0] == weights[1]
    assert "toy" in (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "4 of 4" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.usefixtures("installed")
def test_the_doctor_predicts_it_by_what_it_keeps(random_model, tmp_path, capsys) -> None:
    config = run(random_model, tmp_path / "run")
    assert cli.main(["doctor", "--no-model", "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert "peak in noising" in text and "peak in VAE decode" in text and "labels" not in text


@pytest.mark.usefixtures("installed")
def test_init_writes_its_config(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "--stage", "toy", "--reward", "ocr", "--all"]) == 0
    config: Any = load("toy.yaml")
    assert config.toy.noise_levels == 3  # declared by the plugin; NFT's shipped 8 are not its own
    assert config.stage == "toy" and config.tasks[0].validation == "tiny/ocr_val"
    assert "# Noise levels." in Path("toy.yaml").read_text()
    assert recipe.stages_and_problems(config, tmp_path)[1] == []
    assert cli.main(["init", "--stage", "toy", "--teachers", "tiny/ocr", "--force"]) == 2
    assert cli.main(["init", "--stage", "bad"]) == 2
    assert "Missing" in capsys.readouterr().err


def test_the_examples_of_its_page_run(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(documents.example_package(tmp_path))
    raw = fakes.settings(random_model, tmp_path / "run").model_dump(mode="json", exclude={"grpo"})
    raw["rollout"] |= {"kind": "ode", "window": None}
    own = {"advantage": "my_advantages:centred"}
    for stage in ("weighted", "milder"):
        config = parse({**raw, "stage": stage, stage: own}, stage=TrainingStage)
        loop = fakes.wired(config, moved=True)
        prepared: Any = loop.prepare(loop.rollout(0))
        assert prepared.advantage.view(2, 4).sum(1).abs().max() < 1e-6
        loop.run()
    assert {"my_advantages", "weighted", "milder"} <= sys.modules.keys()
    monkeypatch.chdir(tmp_path)
    for stage in ("weighted", "nft"):
        assert cli.main(["init", "--stage", stage, "--reward", "ocr"]) == 0
    assert "power: 1.0" in Path("weighted.yaml").read_text()
    keys = [load(f"{s}.yaml", stage=Stage).model_dump() for s in ("weighted", "nft")]
    assert keys[0]["weighted"]["noise_levels"] == keys[1]["nft"]["noise_levels"] == 8
    assert all(keys[0][name] == keys[1][name] for name in ("rollout", "optimizer", "lora"))
    variant = fakes.ROOT / "configs" / "variants" / "1x24gb.yaml"
    varied = load("weighted.yaml", stage=Stage, variant=variant)
    assert varied.model.gradient_checkpointing  # as nft


@pytest.mark.usefixtures("installed")
def test_an_entry_point_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(ConfigError, match="bad.*Missing"):
        parse({"stage": "bad"}, stage=TrainingStage)
