"""Atomic checkpoints and exact resume. A checkpoint is a folder that appears by one rename, with a
manifest that tells damage.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save
from torch import Tensor

from flowalign.system import files, manifest
from flowalign.system.devices import current
from flowalign.system.manifest import Damaged
from flowalign.training.run.processes import from_main
from flowalign.training.run.resume import CHECKPOINTS, checkpoints, name_of, update_of


class Checkpoints:
    """The checkpoints of a run: RUN/checkpoints/update_000020, ..., the newest `keep` of them."""

    def __init__(self, run: Path, keep: int) -> None:
        self.run, self.keep = run, keep
        self.folder = run / CHECKPOINTS

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first: their manifests can be read. Whether their files are
        as these say, `flowalign.training.run.resume.newest` finds out."""
        return [path for path in checkpoints(self.run) if _complete(path)]

    def latest(self) -> Path | None:
        """The newest complete checkpoint, if any."""
        return (self.all() or [None])[-1]

    def save(
        self,
        update: int,
        *,
        tensors: Mapping[str, Sequence[Tensor]],
        states: dict[str, Any],
        progress: dict[str, Any],
        about: Mapping[str, Any] | None = None,
        copies: Mapping[str, Path] | None = None,
    ) -> Path:
        """Write one; all processes must call it, and the main one writes.

        tensors: lists of weights; states: state dicts; progress: for JSON; about: for the manifest;
        copies: {name in it: file or folder of the run, which may be missing}. Raises OSError on all
        processes, such as on a full disk; the older checkpoints are then as they were.
        """
        rng = get_rng()
        # as bytes: gather_object fails to unpickle these tensors (torch 2.11)
        rngs: list[tuple[bytes, str]] = gather_object([(save(rng.tensors), json.dumps(rng.rest))])
        final = self.folder / name_of(update)
        said = {"update": update, **(about or {})}

        def write() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for stale in self.folder.glob(".*"):  # of a run that was killed
                _remove(stale)
            if _about(final) != said:  # else it is of this very state, from before a resume
                if final.exists():
                    _remove(final)
                with files.replacing(final, durable=True) as part:
                    part.mkdir()
                    for name, source in (copies or {}).items():
                        _copy(source, part / name)
                    _write(part, tensors, states, {"update": update, **progress}, rngs)
                    manifest.write_manifest(part, said)
            self._rotate(update)

        from_main(write)
        return final

    def _rotate(self, update: int) -> None:
        """Remove what is older than the newest `keep`. Folders that claim to be newer than this
        update were skipped by a resume, and do not count."""
        complete = [path for path in self.all() if update_of(path) <= update]
        oldest = update_of(complete[-self.keep :][0])
        for old in checkpoints(self.run):
            if update_of(old) < oldest:
                aside = self.folder / f".{old.name}"
                os.replace(old, aside)  # it disappears at once, as it came
                _remove(aside)


def _complete(folder: Path) -> bool:
    try:
        manifest.read_manifest(folder)
    except Damaged:
        return False
    return True


def _about(folder: Path) -> Mapping[str, Any] | None:
    """What a sound checkpoint says of itself; None for a damaged one."""
    try:
        return manifest.check_manifest(folder).about
    except Damaged:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copyfile(source, target)


def _write(
    folder: Path,
    tensors: Mapping[str, Sequence[Tensor]],
    states: dict[str, Any],
    progress: dict[str, Any],
    rngs: Sequence[tuple[bytes, str]],
) -> None:
    """The files of a checkpoint. All bytes pass through Python: a full disk is then an OSError, and
    no error of torch's or safetensors' own."""
    for name, values in tensors.items():
        rows = {str(i): v.detach().cpu().contiguous() for i, v in enumerate(values)}
        (folder / f"{name}.safetensors").write_bytes(save(rows))
    buffer = io.BytesIO()
    torch.save(_plain(states), buffer)
    (folder / "states.pt").write_bytes(buffer.getbuffer())
    (folder / "progress.json").write_text(json.dumps(progress))
    for index, (drawn, rest) in enumerate(rngs):
        (folder / f"rng_{index}.safetensors").write_bytes(drawn)
        (folder / f"rng_{index}.json").write_text(rest)


def _plain(value: Any) -> Any:
    """The same with equal texts as one object each: pickle writes an object once, so without this
    the bytes would depend on whether the run was resumed."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return sys.intern(value) if isinstance(value, str) else value


def load(
    folder: Path, process_index: int, tensors: Mapping[str, Sequence[Tensor]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read back one that `flowalign.training.run.resume.newest` has checked: fills `tensors` in
    place, restores the RNGs, returns states and progress. Nothing is changed if it does not fit
    (ValueError)."""
    saved = {name: load_file(folder / f"{name}.safetensors") for name in tensors}
    for name, values in tensors.items():
        shapes = [list(saved[name][key].shape) for key in sorted(saved[name], key=int)]
        if shapes != [list(value.shape) for value in values]:
            raise ValueError(
                f"{folder}/{name} holds {len(shapes)} tensors, the run has {len(values)} or others "
                "in shape: it is of another config. Use another `output`, or delete its "
                "checkpoints."
            )
    # on the CPU: load_state_dict moves each part to its parameter's device
    states = torch.load(folder / "states.pt", weights_only=True, map_location="cpu")
    progress = json.loads((folder / "progress.json").read_text())
    for name, values in tensors.items():
        for i, value in enumerate(values):
            value.data.copy_(saved[name][str(i)])
    rng = folder / f"rng_{process_index}.json"
    if rng.exists():  # else there are more processes than before: the new ones keep their own
        set_rng(Rng(load_file(rng.with_suffix(".safetensors")), json.loads(rng.read_text())))
    return states, progress


# The best adapter --------------------------------------------------------------------------------

ADAPTER = "adapter"  # below the folder of a run: the best adapter that was evaluated, else the last
COPY = "kept"  # the same below a checkpoint, whose adapter.safetensors is what is being trained
SCORES = "scores.json"  # headline and update of the evaluation that chose it, {} if none did
OTHER = "it is that of another evaluation"


def write_best_adapter(
    run: Path, save_adapter: Callable[[Path], None], scores: Mapping[str, float]
) -> None:
    """Replace the adapter of a run. save_adapter: writes its weights into a folder."""
    with files.replacing(run / ADAPTER, durable=True, swap=True) as part:
        part.mkdir()
        save_adapter(part)
        (part / SCORES).write_text(json.dumps(dict(scores)))
        manifest.write_manifest(part, {"scores": dict(scores)})


def why_not_best(run: Path, scores: Mapping[str, float]) -> str:
    """What is wrong with the adapter of a run, "" if it is sound and was chosen by this
    evaluation."""
    try:
        about = manifest.check_manifest(run / ADAPTER).about
    except Damaged as error:
        return str(error)
    return "" if about.get("scores") == dict(scores) else OTHER


def restore_best_adapter(run: Path, checkpoint: Path) -> dict[str, float]:
    """Make the adapter of a run the copy in a sound checkpoint; returns its scores, {} if the
    checkpoint has none."""
    copy = checkpoint / COPY
    if not copy.is_dir():
        return {}
    with files.replacing(run / ADAPTER, durable=True, swap=True) as part:
        shutil.copytree(copy, part)
    return dict(manifest.read_manifest(copy).about["scores"])


# Random numbers ----------------------------------------------------------------------------------


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
