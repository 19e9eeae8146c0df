"""Atomic checkpoints and exact resume. A checkpoint is a folder that one rename creates, with a
manifest that reveals damage.

Nothing is unpickled: tensors are safetensors, the optimizer is read with weights_only, the rest
is JSON. Prompts and noise are pure functions of (seed, update), so their position is a number.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save
from torch import Tensor

from flowalign.system import files, manifest
from flowalign.system.devices import current
from flowalign.system.folder import RunFolder
from flowalign.training.run import resume
from flowalign.training.run.processes import from_main

COPY = "kept"  # the run's adapter below a checkpoint: adapter.safetensors is what is being trained


class Checkpoints:
    """The checkpoints of a run: RUN/checkpoints/update_000020, ..., the newest `keep` of them."""

    def __init__(self, run: Path, keep: int) -> None:
        self.run = RunFolder(run)
        self.keep = keep

    def all(self) -> list[Path]:
        """The checkpoints with a manifest, oldest first. `flowalign.training.run.resume.newest`
        verifies their files."""
        named = resume.checkpoints(self.run.path)
        return [path for path in named if (path / manifest.MANIFEST).is_file()]

    def latest(self) -> Path | None:
        return (self.all() or [None])[-1]

    def save(
        self,
        update: int,
        *,
        tensors: Mapping[str, Sequence[Tensor]],
        states: dict[str, Any],
        progress: dict[str, Any],
        about: Mapping[str, Any] | None = None,
        best: bool = False,
    ) -> Path:
        """Write a checkpoint; all processes must call it, and the main one writes.

        tensors: lists of weights; states: state dicts; progress: for JSON; about: for the manifest;
        best: whether the run has a best adapter, which is copied. Raises OSError on all processes,
        such as on a full disk; older checkpoints are then unchanged.
        """
        drawn, rest = get_rng()
        # as bytes: gather_object fails to unpickle these tensors (torch 2.11)
        rngs: list[tuple[bytes, str]] = gather_object([(save(drawn), json.dumps(rest))])
        final = self.run.checkpoints / f"update_{update:06d}"  # six digits: names sort as numbers

        def write() -> None:
            with files.replacing(final, durable=True, swap=True) as part:
                part.mkdir()
                if self.run.log.exists():
                    shutil.copyfile(self.run.log, RunFolder(part).log)
                if best:
                    shutil.copytree(self.run.adapter, part / COPY)
                # all bytes pass through Python: a full disk is then an OSError, not an error of
                # torch or safetensors
                for name, values in tensors.items():
                    rows = {str(i): v.detach().cpu().contiguous() for i, v in enumerate(values)}
                    (part / f"{name}.safetensors").write_bytes(save(rows))
                buffer = io.BytesIO()
                torch.save(_plain(states), buffer)
                (part / "states.pt").write_bytes(buffer.getbuffer())
                (part / "progress.json").write_text(json.dumps({"update": update, **progress}))
                for index, (drawn, rest) in enumerate(rngs):
                    (part / f"rng_{index}.safetensors").write_bytes(drawn)
                    (part / f"rng_{index}.json").write_text(rest)
                manifest.write_manifest(part, {"update": update, **(about or {})})
            self._rotate(update)

        from_main(write)
        return final

    def restore(self, folder: Path, update: int, evaluated: int) -> None:
        """Set the run back to a sound checkpoint; see `resume.truncate_to`. The checkpoint's
        adapter, if it has one, becomes the run's. Old checkpoints of a killed run are removed."""
        resume.truncate_to(self.run.path, folder, update, evaluated)
        if (folder / COPY).is_dir():
            with files.replacing(self.run.adapter, durable=True, swap=True) as part:
                shutil.copytree(folder / COPY, part)
        self._rotate(update)

    def _rotate(self, update: int) -> None:
        """Remove the checkpoints older than the newest `keep`. Folders with a later update were
        skipped by a resume, and do not count."""
        complete = [path for path in self.all() if resume.update_of(path) <= update]
        oldest = resume.update_of(complete[-self.keep :][0])
        for old in resume.checkpoints(self.run.path):
            if resume.update_of(old) < oldest:
                aside = self.run.checkpoints / f".{old.name}"
                os.replace(old, aside)  # atomic, like its creation
                shutil.rmtree(aside)


def _plain(value: Any) -> Any:
    """An equal value that has one object for equal texts. Pickle writes each object once, so
    without this the bytes would depend on whether the run was resumed."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return sys.intern(value) if isinstance(value, str) else value


def load(
    folder: Path, process_index: int, tensors: Mapping[str, Sequence[Tensor]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint that `flowalign.training.run.resume.newest` has verified: fills `tensors`
    in place, restores the RNGs, returns states and progress."""
    saved = {name: load_file(folder / f"{name}.safetensors") for name in tensors}
    # on the CPU: load_state_dict moves each part to its parameter's device
    states = torch.load(folder / "states.pt", weights_only=True, map_location="cpu")
    progress = json.loads((folder / "progress.json").read_text())
    for name, values in tensors.items():
        for i, value in enumerate(values):
            value.data.copy_(saved[name][str(i)])
    rng = folder / f"rng_{process_index}.json"
    if rng.exists():  # otherwise this is an additional process, which keeps its state
        set_rng((load_file(rng.with_suffix(".safetensors")), json.loads(rng.read_text())))
    return states, progress


def write_best_adapter(
    run: Path, save_adapter: Callable[[Path], None], scores: Mapping[str, float]
) -> None:
    """Replace the adapter of a run. save_adapter: writes the weights into a folder."""
    with files.replacing(RunFolder(run).adapter, durable=True, swap=True) as part:
        part.mkdir()
        save_adapter(part)
        (part / RunFolder(run).scores.name).write_text(json.dumps(dict(scores)))
        manifest.write_manifest(part, {"scores": dict(scores)})


# Random numbers ----------------------------------------------------------------------------------

# State of the global generators: tensors, and the rest for JSON. The library has its own
# generators; a plugin's reward may use these.
Rng = tuple[dict[str, Tensor], dict[str, list[Any]]]


def get_rng() -> Rng:
    """The state of torch's, numpy's and Python's global generators, and of the device's."""
    kind, keys, position, gauss, cached = np.random.get_state()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.array(keys))}
    if device := current():
        tensors[device.type] = torch.get_device_module(device).get_rng_state()
    version, internal, gauss_next = random.getstate()
    numpy_rest = [kind, int(position), int(gauss), float(cached)]
    return tensors, {"python": [version, list(internal), gauss_next], "numpy": numpy_rest}


def set_rng(rng: Rng) -> None:
    """Put the global generators back into a state that `get_rng` returned."""
    tensors, rest = rng
    torch.set_rng_state(tensors["torch"])
    if (device := current()) and device.type in tensors:
        torch.get_device_module(device).set_rng_state(tensors[device.type])
    kind, position, gauss, cached = rest["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy(), position, gauss, cached))
    version, internal, gauss_next = rest["python"]
    random.setstate((version, tuple(internal), gauss_next))
