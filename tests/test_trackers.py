"""What a run tells TensorBoard, Weights & Biases and trackers of accelerate's interface."""

import json
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowalign.commands import train
from flowalign.config import to_yaml
from flowalign.training.report import trackers
from flowalign.training.report.pictures import grid

EVALUATED = ["evaluation={every: 1, prompts: 2}", "tasks.0.validation=tiny/ocr_val"]


def test_tensorboard_has_config_metrics_and_samples(finished_run: fakes.FinishedRun) -> None:
    folder = finished_run.folder / "tensorboard" / "mine"
    events = EventAccumulator(str(folder)).Reload()
    assert {"reward", "loss"} <= set(events.Tags()["scalars"])
    for name in ("samples", "held_out", "before_after"):
        image = events.Images(name)[-1]
        assert image.step in (0, 2) and image.width > 32 and image.height > 32
    (text,) = events.Tensors("config/text_summary")[0].tensor_proto.string_val
    assert b"    stage: grpo\n" in text


class Notebook(GeneralTracker):
    """A tracker of the user's own."""

    name, requires_logging_directory = "notebook", False

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.images: dict[tuple[str, int | None], np.ndarray] = {}

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
        self.images |= {(key, step): image for key, (image,) in values.items()}


def test_any_tracker_gets_the_whole_config_and_images_as_it_can(
    random_model: str, tmp_path: Path
) -> None:
    config = fakes.settings(random_model, tmp_path / "the_run")
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    tracker = Notebook()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    trackers.begin(accelerator, config)
    path = tmp_path / "grid.png"
    grid(path, torch.rand(4, 3, 32, 32), ["a"] * 4)
    trackers.image(accelerator, "samples", path, 3)
    assert tracker.config == config.model_dump(mode="json")
    assert tracker.images["samples", 3].shape[2] == 3


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
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    assert train.main(["--config", str(tmp_path / "config.yaml")]) == 0
    (found,) = begun
    assert (found.project, found.name) == ("flowalign", "the_run")
    assert dict(found.config) == json.loads(config.model_dump_json())
    files = tmp_path / "the_run" / "wandb"
    pictures = {path.name.partition("_")[0] for path in files.rglob("*.png")}
    assert {"samples", "held", "before"} <= pictures
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    again = ["--config", str(tmp_path / "config.yaml"), "--resume", "train.updates=2"]
    assert train.main(again) == 0
    assert begun[1].id == found.id
