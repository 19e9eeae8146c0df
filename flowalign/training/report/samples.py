"""The images that a run keeps.

samples/update_000020.png shows images of a rollout, samples/held_out_000020.png of an evaluation.
drift_*.json are checks of the drift, with small WebP images in base64. Of each kind the newest
KEPT stay, and the oldest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowalign.system.files import replacing
from flowalign.system.folder import RunFolder
from flowalign.system.images import pixels_of
from flowalign.training.report.pictures import grid, score_text
from flowalign.types import Example, Rollout

KEPT = 200  # newest files of a kind
COPIES, SHOWN = 4, 32  # images of a prompt, and of a picture, at most
HELD_OUT = 8  # prompts of a benchmark
TRAINING, EVALUATION = "update_", "held_out_"  # what the names of the files begin with
DRIFT = "drift_rollout_"


def write_rollout(folder: Path, update: int, rollout: Rollout, notes: Sequence[str]) -> Path:
    """Keep some images of a rollout that has them; returns the picture. notes: one an image."""
    assert rollout.images is not None
    copies = int(rollout.copy.max()) + 1
    rows = list(range(0, len(rollout), max(1, copies // COPIES)))[:SHOWN]
    about = zip(rollout.batch.select(rows).prompts, [notes[row] for row in rows], strict=True)
    captions = [f"{prompt}\n{note}".strip() for prompt, note in about]
    path = place(folder, TRAINING, update)
    grid(path, list(rollout.images[rows]), captions, title=path.stem)
    _remove_old(folder, TRAINING)
    return path


def write_examples(folder: Path, update: int, examples: Sequence[Example]) -> Path:
    """Keep the images that an evaluation shows; returns the picture."""
    images = [pixels_of(example.picture) for example in examples]
    notes = ["" if e.score is None else score_text(e.score) for e in examples]
    captions = [f"{e.prompt}\n{note}".strip() for e, note in zip(examples, notes, strict=True)]
    path = place(folder, EVALUATION, update)
    grid(path, images, captions, title=path.stem)
    _remove_old(folder, EVALUATION)
    return path


# The files ---------------------------------------------------------------------------------------


def place(run: Path, kind: str, update: int) -> Path:
    return RunFolder(run).samples / f"{kind}{update:06d}.{'json' if kind == DRIFT else 'png'}"


def updates(run: Path, kind: str) -> list[int]:
    """After which updates a run has samples of a kind, in order."""
    names = (path.stem for path in RunFolder(run).samples.glob(f"{kind}*.*"))
    return sorted({int(n.removeprefix(kind)) for n in names if re.fullmatch(rf"{kind}\d+", n)})


def write_drift(folder: Path, update: int, content: Any) -> None:
    with replacing(place(folder, DRIFT, update)) as part:
        part.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    _remove_old(folder, DRIFT)


def _remove_old(folder: Path, kind: str) -> None:
    for update in updates(folder, kind)[1:-KEPT]:
        place(folder, kind, update).unlink(missing_ok=True)


def read_drift(run: Path) -> tuple[int, Any] | None:
    """Update and content of the newest check that can be read; None if there is none."""
    for update in updates(run, DRIFT)[::-1]:
        with suppress(OSError, ValueError):
            return update, json.loads(place(run, DRIFT, update).read_text("utf-8"))
    return None
