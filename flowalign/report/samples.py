"""The images that a run keeps.

samples/update_000020.png shows images of a rollout, samples/held_out_000020.png of an evaluation.
drift_*.json are drift checks, watched_*.json the changes of the judges that are not trained; both
have small WebP images in base64. The oldest file and the newest KEPT files of each kind stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from flowalign.config import TrainingStage
from flowalign.report import trackers
from flowalign.report.pictures import grid, score_text
from flowalign.system.files import replacing, to_json
from flowalign.system.folder import RunFolder
from flowalign.system.images import pixels_of
from flowalign.training.evaluations import Evaluation
from flowalign.training.events import Learned, Listener
from flowalign.types import Example, Rollout

KEPT = 200  # newest files of a kind that stay
COPIES, SHOWN = 4, 32  # images of a prompt, and of a picture, at most
HELD_OUT = 8  # prompts of a benchmark
TRAINING, EVALUATION = GRIDS = "update_", "held_out_"  # prefixes of file names
DRIFT, WATCHED = "drift_rollout_", "watched_"


class Samples(Listener):
    """Writes some images of rollouts (every `sample_every` updates, and of the last one) and of
    each evaluation. The trackers get them, too."""

    def __init__(self, config: TrainingStage, accelerator: Accelerator) -> None:
        self.config = config
        self.accelerator = accelerator
        self.folder = Path(config.output)

    def learned(self, update: int, learned: Learned) -> None:
        train = self.config.train
        due = update % train.sample_every == 0 or update == train.updates
        prepared = learned.prepared
        if self.main and due and prepared and learned.rollout.images is not None:
            path = write_rollout(self.folder, update, learned.rollout, prepared.notes)
            trackers.image(self.accelerator, "samples", path, update)

    def evaluated(self, update: int, evaluation: Evaluation) -> None:
        if self.main and evaluation.report.examples:
            path = write_examples(self.folder, update, evaluation.report.examples)
            trackers.image(self.accelerator, "held_out", path, update)


def write_rollout(folder: Path, update: int, rollout: Rollout, notes: Sequence[str]) -> Path:
    """Write some images of a rollout that has decoded images; returns the picture's path. notes:
    one text per image."""
    assert rollout.images is not None
    copies = int(rollout.copy.max()) + 1
    rows = list(range(0, len(rollout), max(1, copies // COPIES)))[:SHOWN]
    about = zip(rollout.batch.select(rows).prompts, [notes[row] for row in rows], strict=True)
    captions = [f"{prompt}\n{note}".strip() for prompt, note in about]
    return _write_grid(folder, TRAINING, update, list(rollout.images[rows]), captions)


def write_examples(folder: Path, update: int, examples: Sequence[Example]) -> Path:
    """Write an evaluation's example images; returns the picture's path."""
    images = [pixels_of(example.picture) for example in examples]
    notes = ["" if e.score is None else score_text(e.score) for e in examples]
    captions = [f"{e.prompt}\n{note}".strip() for e, note in zip(examples, notes, strict=True)]
    return _write_grid(folder, EVALUATION, update, images, captions)


def _write_grid(
    folder: Path, kind: str, update: int, images: Sequence[Tensor], captions: Sequence[str]
) -> Path:
    path = sample_path(folder, kind, update)
    grid(path, images, captions, title=path.stem)
    _remove_old(folder, kind)
    return path


# The files ---------------------------------------------------------------------------------------


def sample_path(run: Path, kind: str, update: int) -> Path:
    return RunFolder(run).samples / f"{kind}{update:06d}.{'png' if kind in GRIDS else 'json'}"


def updates(run: Path, kind: str) -> list[int]:
    """The updates, in order, after which a run wrote samples of a kind."""
    names = (path.stem for path in RunFolder(run).samples.glob(f"{kind}*.*"))
    return sorted({int(n.removeprefix(kind)) for n in names if re.fullmatch(rf"{kind}\d+", n)})


def write_json(folder: Path, kind: str, update: int, content: Any) -> None:
    """Write what was found at an update, numbers and images."""
    with replacing(sample_path(folder, kind, update)) as part:
        part.write_text(json.dumps(to_json(content), allow_nan=False), encoding="utf-8")
    _remove_old(folder, kind)


def _remove_old(folder: Path, kind: str) -> None:
    for update in updates(folder, kind)[1:-KEPT]:
        sample_path(folder, kind, update).unlink(missing_ok=True)


def read_json(run: Path, kind: str, oldest: bool = False) -> tuple[int, Any] | None:
    """Update and content of the newest (or oldest) readable file of a kind; None without one."""
    for update in updates(run, kind)[:: 1 if oldest else -1]:
        with suppress(OSError, ValueError):
            return update, json.loads(sample_path(run, kind, update).read_text("utf-8"))
    return None
