"""The images that a run keeps.

samples/update_000020.png shows images of a rollout, samples/held_out_000020.png of an evaluation. A
JSON file of the same name has a row for each image of an evaluation: prompt, task, note (its score)
and the image as a small WebP file in base64. drift_*.json are checks of the drift. Of each kind the
newest `keep` stay, and the oldest. before_after.png shows the images of the first evaluation and of
the best one.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from flowalign.system.files import read_lines, replacing
from flowalign.system.images import pixels_of
from flowalign.training import metrics
from flowalign.training.report.pictures import Block, Row, comparison, grid, score_text, webp
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
    about = zip(rollout.batch.select(rows).prompts, [notes[row] for row in rows], strict=True)
    captions = [f"{prompt}\n{note}".strip() for prompt, note in about]
    path = place(folder, TRAINING, update, "png")
    grid(path, list(rollout.images[rows]), captions, title=path.stem)
    _remove_old(folder, TRAINING, keep)
    return path


def write_examples(
    folder: Path, update: int, examples: Sequence[Example], keep: int | None = None
) -> Path:
    """Keep the images that an evaluation shows; returns the picture."""
    images = [pixels_of(example.picture) for example in examples]
    notes = ["" if e.score is None else score_text(e.score) for e in examples]
    captions = [f"{e.prompt}\n{note}".strip() for e, note in zip(examples, notes, strict=True)]
    path = place(folder, EVALUATION, update, "png")
    grid(path, images, captions, title=path.stem)
    rows = [
        {"prompt": e.prompt, "task": e.benchmark, "note": note, "image": webp(image)}
        for e, note, image in zip(examples, notes, images, strict=True)
    ]
    write_json(folder, EVALUATION, update, rows, keep)
    return path


def write_before_after(run: Path, update: int) -> Path | None:
    """Draw what an evaluation after `update` updates has just shown, below the images of the first
    one: a block for each benchmark. None without images."""
    first, last = read_sample(run, EVALUATION, oldest=True), read_sample(run, EVALUATION)
    if first is None or last is None:
        return None
    logged = read_lines(run / "metrics.jsonl")
    said = {row[metrics.UPDATE]: metrics.headline(row) for row in logged if metrics.HEADLINE in row}
    blocks = []
    for task in dict.fromkeys(row["task"] for row in last[1]):
        pair = []
        for name, (shown, content) in {"before": first, f"after update {update}": last}.items():
            rows = [row for row in content if row["task"] == task]
            images = [Image.open(io.BytesIO(base64.b64decode(row["image"]))) for row in rows]
            pair.append(Row(images, [row["note"] for row in rows], name, said.get(shown, "")))
        blocks.append(Block(task, [row["prompt"] for row in rows], pair))
    path = run / "before_after.png"
    title = f"{run.name}: before training, and the adapter that was kept."
    scored = "; below each image its score" if any(row["note"] for row in last[1]) else ""
    comparison(path, blocks, title=f"{title} Same prompts and noise{scored}.")
    return path


# The files ---------------------------------------------------------------------------------------


def place(run: Path, kind: str, update: int, ending: str) -> Path:
    """A file of a sample: "png", or "json"."""
    return run / "samples" / f"{kind}{update:06d}.{ending}"


def updates(run: Path, kind: str) -> list[int]:
    """After which updates a run has samples of a kind, in order."""
    names = (path.stem for path in (run / "samples").glob(f"{kind}*.*"))
    return sorted({int(n.removeprefix(kind)) for n in names if re.fullmatch(rf"{kind}\d+", n)})


def write_json(folder: Path, kind: str, update: int, content: Any, keep: int | None) -> None:
    """Write the JSON file of a sample; of its kind the oldest one stays and the newest `keep` (None
    = all)."""
    with replacing(place(folder, kind, update, "json")) as part:
        part.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    _remove_old(folder, kind, keep)


def _remove_old(folder: Path, kind: str, keep: int | None) -> None:
    for update in updates(folder, kind)[1 : -keep if keep else 1]:
        for ending in ("json", "png"):
            place(folder, kind, update, ending).unlink(missing_ok=True)


def read_sample(run: Path, kind: str, *, oldest: bool = False) -> tuple[int, Any] | None:
    """Update and content of the newest (or the oldest) JSON file of a kind that can be read; None
    if there is none. kind: EVALUATION or one of DRIFTS."""
    for update in updates(run, kind)[:: 1 if oldest else -1]:
        with suppress(OSError, ValueError):
            return update, json.loads(place(run, kind, update, "json").read_text("utf-8"))
    return None
