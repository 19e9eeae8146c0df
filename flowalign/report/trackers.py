"""Logging to accelerate's trackers: TensorBoard, Weights & Biases, or custom ones.

Every tracker gets the config and the metrics of every update; those that accept images also get the
sample grids.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from PIL import Image

from flowalign.config import TrainingStage
from flowalign.system.folder import RunFolder
from flowalign.training.run.resume import checkpoints


def begin(accelerator: Accelerator, config: TrainingStage) -> None:
    """Start the trackers of a run, with its config; the run is named after its folder."""
    folder = Path(config.output)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, dict[str, Any]] = {}
    if accelerator.is_main_process and "wandb" in config.train.trackers:
        options = {"wandb": {"name": folder.name, "dir": str(folder), **_wandb_run(config.folder)}}
    accelerator.init_trackers(config.train.project, init_kwargs=options)
    for tracker in accelerator.trackers:
        if tracker.name != "tensorboard":  # its hyperparameters are scalars alone
            tracker.store_init_configuration(config.model_dump(mode="json"))


def _wandb_run(folder: RunFolder) -> dict[str, str]:
    """W&B's options for the run in a folder: a run that has checkpoints continues under its id."""
    path = folder.wandb_run
    if path.is_file() and checkpoints(folder.path):
        return {"id": path.read_text().strip(), "resume": "allow"}
    run = uuid.uuid4().hex[:8]
    path.write_text(run)
    return {"id": run}


def image(accelerator: Accelerator, name: str, path: Path, step: int) -> None:
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))[None]
    for tracker in accelerator.trackers:
        options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        if log := getattr(tracker, "log_images", None):
            log({name: pixels}, step=step, **options)
