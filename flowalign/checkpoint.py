"""Atomic checkpoints and exact resume. A checkpoint is a folder that appears by one rename.

Nothing is unpickled: tensors are safetensors, the optimizer is read with weights_only, the rest
is JSON. Prompts and noise are pure functions of (seed, update), so their position is a number.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowalign.devices import current

PREFIX = "update_"


class Checkpoints:
    """The checkpoints of a run: folder/update_000020, ..., the newest `keep` of them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob(f"{PREFIX}*") if p.is_dir())

    def latest(self) -> Path | None:
        """The newest complete checkpoint, if any."""
        return (self.all() or [None])[-1]

    def save(
        self,
        update: int,
        accelerator: Accelerator,
        *,
        tensors: Mapping[str, Sequence[Tensor]],
        states: dict[str, Any],
        progress: dict[str, Any],
    ) -> Path:
        """Write one. tensors: lists of weights; states: state dicts; progress: for JSON."""
        final = self.folder / f"{PREFIX}{update:06d}"  # six digits: names sort as numbers
        part = self.folder / f".part_{update:06d}"
        if accelerator.is_main_process:
            for stale in self.folder.glob(".part_*"):  # of a run that was killed
                shutil.rmtree(stale)
            part.mkdir(parents=True)
            for name, values in tensors.items():
                rows = {str(i): v.detach().cpu().contiguous() for i, v in enumerate(values)}
                save_file(rows, part / f"{name}.safetensors")
            torch.save(states, part / "states.pt")
            (part / "progress.json").write_text(json.dumps({"update": update, **progress}))
        accelerator.wait_for_everyone()  # the folder is there
        rng, index = get_rng(), accelerator.process_index
        save_file(rng.tensors, part / f"rng_{index}.safetensors")
        (part / f"rng_{index}.json").write_text(json.dumps(rng.rest))
        accelerator.wait_for_everyone()  # every process has written its generators
        if accelerator.is_main_process:
            if final.exists():  # of this very state, from before the run was resumed
                shutil.rmtree(part)
            else:
                os.replace(part, final)
            for old in self.all()[: -self.keep]:
                os.replace(old, part)  # it disappears at once, as it came
                shutil.rmtree(part)
        accelerator.wait_for_everyone()
        return final


def load(
    folder: Path, process_index: int, tensors: Mapping[str, Sequence[Tensor]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read one back: fills `tensors` in place, restores the RNGs, returns states and progress."""
    for name, values in tensors.items():
        saved = load_file(folder / f"{name}.safetensors")
        if len(saved) != len(values):
            raise ValueError(
                f"{folder}/{name} holds {len(saved)} tensors, the run has {len(values)}: it is "
                "of another config. Use another `output`, or delete its checkpoints."
            )
        for i, value in enumerate(values):
            value.data.copy_(saved[str(i)])
    rng = folder / f"rng_{process_index}.json"
    if rng.exists():  # else there are more processes than before: the new ones keep their own
        set_rng(Rng(load_file(rng.with_suffix(".safetensors")), json.loads(rng.read_text())))
    # on the CPU: load_state_dict moves each part to its parameter's device
    states = torch.load(folder / "states.pt", weights_only=True, map_location="cpu")
    return states, json.loads((folder / "progress.json").read_text())


@dataclass(frozen=True)
class Rng:
    """State of the global generators. The library has its own; a plugin's reward may use these."""

    tensors: dict[str, Tensor]  # for safetensors
    rest: dict[str, list[Any]]  # for JSON


def get_rng() -> Rng:
    """The state of torch's, numpy's and Python's global generators, and of the device's."""
    kind, keys, position, gauss, cached = np.random.get_state()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.array(keys))}
    if device := current():
        tensors[device.type] = torch.get_device_module(device).get_rng_state()
    version, internal, gauss_next = random.getstate()
    numpy_rest = [kind, int(position), int(gauss), float(cached)]
    return Rng(tensors, {"python": [version, list(internal), gauss_next], "numpy": numpy_rest})


def set_rng(rng: Rng) -> None:
    """Put the global generators back into a state that `get_rng` returned."""
    torch.set_rng_state(rng.tensors["torch"])
    if (device := current()) and device.type in rng.tensors:
        torch.get_device_module(device).set_rng_state(rng.tensors[device.type])
    kind, position, gauss, cached = rng.rest["numpy"]
    np.random.set_state((kind, rng.tensors["numpy"].numpy(), position, gauss, cached))
    version, internal, gauss_next = rng.rest["python"]
    random.setstate((version, tuple(internal), gauss_next))
