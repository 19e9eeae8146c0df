"""The images that a run keeps: pictures for people, and a JSON file of the same name.

samples/update_000020.png shows images of a rollout, samples/held_out_000020.png of an evaluation.
The JSON file has a row an image: prompt, task, note (its reward, or its teacher) and the image as a
small WebP file in base64. Of each kind the newest `keep` stay, and the oldest. before_after.png
shows the images of the first evaluation and of the best one.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from flowalign.system.files import read_lines, replacing
from flowalign.system.images import pixels_of
from flowalign.training import metrics
from flowalign.training.report.pictures import (
    Block,
    Row,
    comparison,
    grid,
    score_text,
    webp,
)
from flowalign.types import Example, Rollout

COPIES, SHOWN = 4, 32  # images of a prompt, and of a picture, at most
HELD_OUT = 8  # prompts of a benchmark
TRAINING, EVALUATION = "update_", "held_out_"  # what the names of the files begin with
DRIFTS = DRIFT, HELD_OUT_DRIFT = "drift_rollout_", "drift_held_out_"  # of a rollout, an evaluation


def write_rollout(
    folder: Path, update: int, rollout: Rollout, notes: Sequence[str], keep: int | None = None
) -> Path:
    """Keep some images of a rollout that has them; returns the picture. notes: one an image."""
    assert rollout.images is not None
    copies = int(rollout.copy.max()) + 1
    rows = list(range(0, len(rollout), max(1, copies // COPIES)))[:SHOWN]
    batch, images = rollout.batch.select(rows), list(rollout.images[rows])
    about = zip(batch.prompts, batch.tasks, [notes[row] for row in rows], strict=True)
    return _write_images(folder, TRAINING, update, images, list(about), keep)


def write_examples(
    folder: Path, update: int, examples: Sequence[Example], keep: int | None = None
) -> Path:
    """Keep the images that an evaluation shows; returns the picture."""
    images = [pixels_of(example.picture) for example in examples]
    about = [
        (e.prompt, e.benchmark, "" if e.score is None else score_text(e.score)) for e in examples
    ]
    return _write_images(folder, EVALUATION, update, images, about, keep)


def write_before_after(run: Path, update: int) -> Path | None:
    """Draw what an evaluation after `update` updates has just shown, below the images of the first
    one: a block for each benchmark. None without images."""
    first, last = read_sample(run, EVALUATION, oldest=True), read_sample(run, EVALUATION)
    if first is None or last is None:
        return None
    logged = read_lines(run / "metrics.jsonl")
    said = {row[metrics.UPDATE]: metrics.headline(row) for row in logged if metrics.HEADLINE in row}

    def row(name: str, task: str, sample: tuple[int, list[dict[str, str]]]) -> Row:
        rows = [row for row in sample[1] if row["task"] == task]
        images = [Image.open(io.BytesIO(base64.b64decode(row["image"]))) for row in rows]
        return Row(images, [row["note"] for row in rows], name, said.get(sample[0], ""))

    blocks = []
    for task in dict.fromkeys(row["task"] for row in last[1]):
        pair = [row("before", task, first), row(f"after update {update}", task, last)]
        prompts = [row["prompt"] for row in last[1] if row["task"] == task]
        blocks.append(Block(task, prompts, pair))
    path = run / "before_after.png"
    title = f"{run.name}: before training, and the adapter that was kept."
    scored = "; below each image its score" if any(row["note"] for row in last[1]) else ""
    comparison(path, blocks, title=f"{title} Same prompts and noise{scored}.")
    return path


def _write_images(
    folder: Path,
    kind: str,
    update: int,
    images: Sequence[Tensor],
    about: Sequence[tuple[str, str, str]],
    keep: int | None,
) -> Path:
    """about: prompt, task and note of each image."""
    name = f"{kind}{update:06d}"
    path = folder / "samples" / f"{name}.png"
    captions = [f"{prompt}\n{note}".strip() for prompt, _, note in about]
    grid(path, images, captions, title=name)
    rows = [
        {"prompt": prompt, "task": task, "note": note, "image": webp(image)}
        for image, (prompt, task, note) in zip(images, about, strict=True)
    ]
    write_json(folder, kind, update, rows, keep)
    return path


def write_json(folder: Path, kind: str, update: int, content: Any, keep: int | None) -> None:
    """Write the JSON file of a sample; remove all samples of its kind but the oldest one and the
    newest `keep` (None = keep all)."""
    path = folder / "samples" / f"{kind}{update:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    for old in _samples(folder, kind)[1 : -keep if keep else 1]:
        old.unlink()
        old.with_suffix(".png").unlink(missing_ok=True)


def _samples(run: Path, kind: str) -> list[Path]:
    """The JSON files, oldest first: six digits and more sort as numbers by their length."""
    paths = (run / "samples").glob(f"{kind}*.json")
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def read_sample(run: Path, kind: str, *, oldest: bool = False) -> tuple[int, Any] | None:
    """Update and content of the newest (or the oldest) samples of a run that can be read; None if
    there are none. kind: TRAINING, EVALUATION or one of DRIFTS."""
    for path in _samples(run, kind)[:: 1 if oldest else -1]:
        with suppress(OSError, ValueError):
            return int(path.stem.removeprefix(kind)), json.loads(path.read_text("utf-8"))
    return None
