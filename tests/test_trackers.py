"""What a run tells TensorBoard, Weights & Biases and trackers of accelerate's interface."""

import json
from pathlib import Path
from typing import Any

import fakes
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowalign.config import to_yaml

EVALUATED = ["evaluation={every: 1, prompts: 2}", "tasks.0.validation=tiny/ocr_val"]


def test_tensorboard_has_metrics_and_samples(finished_run: fakes.FinishedRun) -> None:
    folder = finished_run.folder / "tensorboard" / "mine"
    events = EventAccumulator(str(folder)).Reload()
    assert {"reward", "loss"} <= set(events.Tags()["scalars"])
    for name in ("samples", "held_out"):
        image = events.Images(name)[-1]
        assert image.step in (0, 2) and image.width > 32 and image.height > 32


def test_weights_and_biases_gets_project_name_config_and_images(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline; what it would send lies in its own files."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    begun: list[Any] = []
    real = wandb.init

    def init(**options: Any) -> Any:
        begun.append(real(**options))
        return begun[-1]

    monkeypatch.setattr(wandb, "init", init)
    given = ["train.updates=1", "train.sample_every=1", "train.trackers=[wandb]", *EVALUATED]
    config = fakes.settings(random_model, tmp_path / "the_run", *given)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    given = ["--config", tmp_path / "config.yaml"]
    assert fakes.command(*given) == 0
    (found,) = begun
    assert (found.project, found.name) == ("flowalign", "the_run")
    assert dict(found.config) == json.loads(config.model_dump_json())
    files = tmp_path / "the_run" / "wandb"
    pictures = {path.name.partition("_")[0] for path in files.rglob("*.png")}
    assert {"samples", "held", "before"} <= pictures
    assert fakes.command(*given, "--resume", "train.updates=2") == 0
    assert begun[1].id == found.id
