"""The room on the disk that a training run needs, before a model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from flowalign.backbone.adapters.files import AdapterError, read_lora
from flowalign.backbone.structure import family_without_text
from flowalign.config import ConfigError, ForwardStage, TrainingStage
from flowalign.training.run.disk import existing

ADAM_8BIT = 0.26  # of the bytes of float32 moments
REST = 1 << 18  # bytes of a run's text files: log, config, card, page


def adapter_bytes(config: TrainingStage) -> int:
    """Bytes of the student's adapter in float32. LookupError if the model's shapes are unknown."""
    if config.lora.init:
        try:
            lora = read_lora(config.lora.init)
            return lora.file.stat().st_size
        except (AdapterError, OSError):
            pass  # of an earlier stage, or on the Hub: as a fresh one
    family = family_without_text(config.model.id, config.model.revision, config.model.family)
    ends = tuple(f".{target}" for target in config.lora.targets or family.targets)
    layers = [
        layer
        for name, layer in family.core.named_modules()
        if isinstance(layer, nn.Linear) and f".{name}".endswith(ends)
    ]
    return 4 * config.lora.rank * sum(layer.in_features + layer.out_features for layer in layers)


def checkpoint_bytes(config: TrainingStage, adapter: int) -> int:
    """Bytes of a checkpoint: the adapter, its average, Adam's two moments, the best adapter
    and the policies of nft and awm. adapter: bytes of one of them (`adapter_bytes`)."""
    moments = 2 * (ADAM_8BIT if config.optimizer.name == "adamw8bit" else 1)
    policies = len(config.policies) if isinstance(config, ForwardStage) else 0
    copies = 1 + (config.ema is not None) + moments + 1 + policies
    return round(adapter * copies)


def check_room(config: TrainingStage) -> None:
    """ConfigError if the disk has no room for the checkpoints of a run and its adapter. Checkpoints
    that are there already need no more. Not counted: samples, and what trackers write."""
    folder = Path(config.output)
    try:
        own = adapter_bytes(config)
    except Exception:  # a model that cannot be built without its weights, or at all: said later
        return
    one = checkpoint_bytes(config, own)
    keep = min(config.train.keep, -(-config.train.updates // config.train.checkpoint_every))
    there = sum(p.stat().st_size for p in folder.glob("checkpoints/*/*") if p.is_file())
    # a checkpoint is whole before the oldest one goes
    needed = max(0, (keep + 1) * one - there) + 2 * own + REST
    free = shutil.disk_usage(existing(folder)).free
    if needed > free:
        raise ConfigError(
            [
                f"output: {existing(folder)} has {_size(free)} free, and the run needs about "
                f"{_size(needed)}: {keep + 1} checkpoints of {_size(one)}, of which train.keep = "
                f"{config.train.keep} stay, and the adapter of {_size(own)}. Free some, lower "
                "train.keep, or choose another `output`."
            ]
        )


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
