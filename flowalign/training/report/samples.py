"""The images that a run keeps: pictures for people, and their data beside them.

samples/update_000020.png shows images of a rollout, samples/held_out_000020.png of an evaluation.
The .json file beside a picture has a row an image: prompt, task, note (its reward, or its teacher)
and the image as a small WebP file in base64. Of each kind the newest `keep` stay, and the oldest.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from flowalign.system.files import replacing, to_json
from flowalign.system.images import to_uint8
from flowalign.training.report.pictures import SMALL, grid, pixels_of
from flowalign.types import Example, Rollout

COPIES, SHOWN = 4, 32  # images of a prompt, and of a picture, at most
HELD_OUT = 8  # prompts of a benchmark
LONGEST = 256  # pixels of an image in the JSON file
TRAINING, EVALUATION = "update_", "held_out_"  # what the names of the files begin with
DRIFTS = DRIFT, HELD_OUT_DRIFT = "drift_rollout_", "drift_held_out_"  # of a rollout, an evaluation


def write_rollout(
    folder: Path, update: int, rollout: Rollout, notes: Sequence[str], keep: int | None = None
) -> Path:
    """Keep some images of a rollout that has them; returns the picture. notes: one an image."""
    assert rollout.images is not None
    copies = int(rollout.copy.max()) + 1
    rows = list(range(0, len(rollout), max(1, copies // COPIES)))[:SHOWN]
    batch = rollout.batch.select(rows)
    images = list(rollout.images[rows])
    path = _write(folder, f"{TRAINING}{update:06d}", images, batch.prompts, batch.tasks,
                  [notes[row] for row in rows])  # fmt: skip
    _forget(folder, TRAINING, keep)
    return path


def write_examples(
    folder: Path, update: int, examples: Sequence[Example], keep: int | None = None
) -> Path:
    """Keep the images that an evaluation shows; returns the picture."""
    path = _write(
        folder,
        f"{EVALUATION}{update:06d}",
        [pixels_of(example.picture) for example in examples],
        [example.prompt for example in examples],
        [example.benchmark for example in examples],
        [note(example.score) for example in examples],
    )
    _forget(folder, EVALUATION, keep)
    return path


def write_drift(
    folder: Path, update: int, kind: str, found: Mapping[str, Any], keep: int | None = None
) -> None:
    """Keep what a check of the drift found
    (`flowalign.training.report.drift.monitor.Check.about`)."""
    path = folder / "samples" / f"{kind}{update:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(json.dumps(to_json(found), allow_nan=False), encoding="utf-8")
    _forget(folder, kind, keep, ".json")


def _forget(folder: Path, kind: str, keep: int | None, suffix: str = ".png") -> None:
    """Remove all samples of a kind but the oldest one and the newest `keep`; None = none."""
    for old in _files(folder, kind, suffix)[1 : -keep if keep else 1]:
        for path in (old, old.with_suffix(".json")):
            path.unlink(missing_ok=True)


def _files(run: Path, kind: str, suffix: str = ".png") -> list[Path]:
    """The oldest first: six digits and more sort as numbers by their length."""
    found = (run / "samples").glob(f"{kind}*{suffix}")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def note(score: float) -> str:
    """What stands below an image: its score."""
    return "failed" if math.isnan(score) else f"{score:.2f}"


def _write(
    folder: Path,
    name: str,
    images: Sequence[Tensor],
    prompts: Sequence[str],
    tasks: Sequence[str],
    notes: Sequence[str],
) -> Path:
    lines = [f"{prompt}\n{note}".strip() for prompt, note in zip(prompts, notes, strict=True)]
    path = folder / "samples" / f"{name}.png"
    grid(path, images, lines, title=name)
    rows = [
        {"prompt": prompt, "task": task, "note": note, "image": webp(image)}
        for prompt, task, note, image in zip(prompts, tasks, notes, images, strict=True)
    ]
    with replacing(path.with_suffix(".json")) as part:
        part.write_text(json.dumps(rows), encoding="utf-8")
    return path


def webp(image: Tensor) -> str:
    """base64 of an image [3,H,W] in [0,1]; a tiny one without loss."""
    picture = Image.fromarray(to_uint8(image.nan_to_num(0.0, 1.0, 0.0)))
    picture.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=85, lossless=max(picture.size) <= SMALL)
    return base64.b64encode(file.getvalue()).decode()


Kept = tuple[int, Any]  # update, rows; of a drift, what `write_drift` was given


def newest(run: Path, kind: str) -> Kept | None:
    """The newest samples of a run that can be read; None if there are none. kind: TRAINING,
    EVALUATION or one of DRIFTS."""
    return next(_kept(run, kind, reverse=True), None)


def oldest(run: Path, kind: str) -> Kept | None:
    """The oldest."""
    return next(_kept(run, kind, reverse=False), None)


def _kept(run: Path, kind: str, reverse: bool) -> Iterator[Kept]:
    for path in _files(run, kind, ".json")[:: -1 if reverse else 1]:
        with suppress(OSError, ValueError):
            yield int(path.stem.removeprefix(kind)), json.loads(path.read_text("utf-8"))
