"""What a run logs to accelerate's trackers: TensorBoard, Weights & Biases, or one's own.

Each gets the config and the metrics of every update; those that take images get the sample grids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from PIL import Image

from flowalign.config import TrainingStage


def begin(accelerator: Accelerator, config: TrainingStage) -> None:
    """Start the trackers of a run, with its config; the run is named as its folder."""
    folder = Path(config.output)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    options = {"wandb": {"name": folder.name, "dir": str(folder)}}
    accelerator.init_trackers(config.train.project, init_kwargs=options)
    whole = config.model_dump(mode="json")
    for tracker in accelerator.trackers:
        flat = tracker.name == "tensorboard"  # its hyperparameters are scalars
        tracker.store_init_configuration(dict(_scalars(whole)) if flat else whole)


def image(accelerator: Accelerator, name: str, path: Path, step: int) -> None:
    """Log a picture file."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))[None]
    for tracker in accelerator.trackers:
        options = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        if log := getattr(tracker, "log_images", None):
            log({name: pixels}, step=step, **options)


def _scalars(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """("rollout.steps", 10), ...; a list of scalars is one text."""
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        value = ", ".join(map(str, value))
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _scalars(item, f"{place}.{key}" if place else str(key))
    elif value is not None:
        yield place, value
