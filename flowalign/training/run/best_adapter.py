"""RUN/adapter, the adapter that a run keeps: the best that was evaluated, else the last.

It is written whole, with a manifest. Each checkpoint has a copy of the best one, so that a damaged
one can be restored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from flowalign.system import files, manifest
from flowalign.system.manifest import Damaged

ADAPTER = "adapter"  # below the folder of a run
COPY = "kept"  # the same below a checkpoint, whose adapter.safetensors is what is being trained
SCORES = "scores.json"  # which evaluation chose it
OTHER = "it is that of another evaluation"


def write(run: Path, save: Callable[[Path], None], scores: Mapping[str, float]) -> None:
    """Replace the adapter of a run. save: writes its weights into a folder. scores: headline and
    update of the evaluation that chose it, {} if none did."""
    with files.replacing(run / ADAPTER, durable=True, swap=True) as part:
        part.mkdir()
        save(part)
        (part / SCORES).write_text(json.dumps(dict(scores)))
        manifest.write_manifest(part, {"scores": dict(scores)})


def wrong(run: Path, scores: Mapping[str, float]) -> str:
    """What is wrong with the adapter of a run, "" if it is whole and was chosen by this
    evaluation."""
    try:
        about = manifest.check_manifest(run / ADAPTER).about
    except Damaged as error:
        return str(error)
    return "" if about.get("scores") == dict(scores) else OTHER


def restore(run: Path, checkpoint: Path) -> Mapping[str, float]:
    """Make the adapter of a run that of a sound checkpoint; returns its scores, {} if the
    checkpoint has none."""
    copy = checkpoint / COPY
    if not copy.is_dir():
        return {}
    with files.replacing(run / ADAPTER, durable=True, swap=True) as part:
        shutil.copytree(copy, part)
    return manifest.read_manifest(copy).about["scores"]
