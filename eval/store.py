"""Images and scores of an evaluation on disk, so that a killed run continues where it stopped.

    <output>/images/<model>/<benchmark>/
        settings.json           what the images depend on; a run with other settings is refused
        00000_0.png             <place of the prompt>_<number of the copy>.png
        scores_<digest>/        one folder for each way of scoring
            settings.json       what the scores depend on, besides image, prompt and metadata
            rows.<process>.jsonl    one line per scored image, NaN as null

A row is written after its image, so every row has been scored on an image that existed. A last line
without its end was cut off by a kill and does not count. All processes share the folder.

A run with a larger or smaller `limit` is the same run, because the noise of an image depends on the
place of its prompt. So is one with another batch size, apart from float rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign import frozen
from flowalign.backbone import Backbone
from flowalign.config import EvalStage
from flowalign.data import spread
from flowalign.eval.stats import from_json
from flowalign.files import replacing, to_json
from flowalign.pictures import pixels_of, png
from flowalign.rewards import describe
from flowalign.types import PromptBatch

if TYPE_CHECKING:
    from flowalign.eval.suite import ImageSet

Key = tuple[int, int]  # an image: place of its prompt in the set, number of the copy
SETTINGS = "settings.json"
MODEL_KEYS = {"id", "revision", "dtype", "vae_dtype", "quantization", "height", "width"}
MODEL_KEYS |= {"max_sequence_length"}  # keys of `model` that change an image


REMEDY = "Give another `output`, or delete {} to start anew."


class StoreError(ValueError):
    """A folder that holds images of another run: what was seen, what to do."""


class Store:
    """The images of one model for one set of prompts, and the rows of those who judged them.

    images: what the images depend on, as JSON, with the list of `prompts`. scores {judge: what its
    scores depend on}. kept: places of the prompts whose images are written, None = all. rank: of
    this process.
    """

    def __init__(
        self,
        folder: Path,
        images: Mapping[str, Any],
        scores: Mapping[str, Mapping[str, Any]],
        *,
        kept: Container[int] | None = None,
        rank: int = 0,
    ) -> None:
        self.folder, self.images, self.kept = folder, dict(images), kept
        self.rows = {judge: Rows(folder, depends, rank) for judge, depends in scores.items()}

    def check(self) -> None:
        """StoreError for images that this run would not sample, or rows that cannot be read."""
        recorded = read_record(self.folder, self.folder / SETTINGS)
        if recorded is not None and (problems := differences(recorded, self.images)):
            raise another_run(self.folder, problems)
        for rows in self.rows.values():
            list(rows.all())  # raises for a line that is no row

    def prepare(self) -> None:
        """Make the folders and record in them what they hold. For one process."""
        recorded = read_record(self.folder, self.folder / SETTINGS) or {}
        # of a larger and a smaller `limit` the larger one describes the folder
        if len(recorded.get("prompts", ())) <= len(self.images.get("prompts", ())):
            write_json(self.folder / SETTINGS, self.images)
        for rows in self.rows.values():
            write_json(rows.folder / SETTINGS, rows.scores)

    def keeps(self, key: Key) -> bool:
        """Whether that image is to be written."""
        return self.kept is None or key[0] in self.kept

    def save(self, key: Key, image: Tensor) -> None:
        """Write an image [3,H,W] if the store keeps it and it is finite."""
        if self.keeps(key) and bool(image.isfinite().all()):
            with replacing(self._path(key)) as part:
                part.write_bytes(png(image))

    def load(self, key: Key) -> Tensor | None:
        """The image [3,H,W] in [0,1], on the CPU; None if there is none that can be read."""
        try:
            return pixels_of(self._path(key).read_bytes())
        except (OSError, SyntaxError):  # PIL raises SyntaxError for a broken PNG
            return None

    def has(self, key: Key) -> bool:
        """Whether the file of that image exists."""
        return self._path(key).is_file()

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]:05}_{key[1]}.png"


class Rows:
    """The rows of one way of scoring the images of a folder."""

    def __init__(self, images: Path, scores: Mapping[str, Any], rank: int = 0) -> None:
        text = json.dumps(scores, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.folder, self.scores = images / f"scores_{digest[:12]}", scores
        self._own = self.folder / f"rows.{rank}.jsonl"
        self._complete = False  # whether that file is known to end with a complete line

    def read(self, prompts: PromptBatch) -> dict[Key, dict[str, Any]]:
        """The valid rows of all processes, one per image, of these prompts with their metadata."""
        rows: dict[Key, dict[str, Any]] = {}
        for row in self.all():
            index = row["index"]
            if (
                math.isfinite(row["value"])  # else the reward is asked again
                and 0 <= index < len(prompts)
                and row["prompt"] == prompts.prompts[index]
                and row["metadata"] == prompts.metadata[index]
            ):
                rows.setdefault((index, row["copy"]), row)
        return rows

    def judged(self) -> set[Key]:
        """The images that were judged before, whatever came of it."""
        return {(row["index"], row["copy"]) for row in self.all()}

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of this process; they are in the file when this returns."""
        lines = [json.dumps(to_json(row), allow_nan=False) for row in rows]
        if not self._complete and self._own.exists():  # drop a line that a kill cut off
            os.truncate(self._own, self._own.read_bytes().rfind(b"\n") + 1)
        self._complete = True
        with self._own.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())

    def all(self) -> Iterator[dict[str, Any]]:
        """The rows of all processes, also invalid ones; StoreError for a line that is no row."""
        for path in sorted(self.folder.glob("rows.*.jsonl")):
            *lines, _ = path.read_bytes().split(b"\n")  # the last one is empty or was cut off
            for number, line in enumerate(lines, 1):
                try:
                    row = from_json(json.loads(line))
                    _ = row["copy"]
                except (ValueError, KeyError, RecursionError) as error:
                    raise StoreError(
                        f"{path}, line {number} is no row of scores ({str(error)[:200]}). Delete "
                        "that line, or its file."
                    ) from None
                yield row


def open_stores(
    config: EvalStage,
    sets: Sequence[ImageSet],
    weights: str,
    adapters: Mapping[str, str | None],
    accelerator: Accelerator,
) -> dict[tuple[str, str], Store]:
    """{(model, image set): its store}, not yet checked.

    weights: `fingerprint` of the base. adapters {model: digest of its adapter, None for the base}.
    """
    scores = [
        {
            judge.name: {
                "reward": reward.model_dump(mode="json"),
                "describe": describe(judge.reward),
            }
            for judge, reward in zip(images.judges, benchmark.judges.values(), strict=True)
        }
        for benchmark, images in zip(config.benchmarks, sets, strict=True)
    ]
    # the main process decides: a remote reward may describe itself to some processes only
    scores = gather_object([scores])[0]
    base = config.model.model_dump(include=MODEL_KEYS) | {"weights": weights}
    stores = {}
    for model, adapter in adapters.items():
        for images, depends in zip(sets, scores, strict=True):
            shown = set(spread(len(images.prompts), config.report.images))
            content = {
                "model": base,
                "adapter": adapter,
                "sampling": config.sampling.model_dump(exclude={"batch_size"}),
                "images": images.copies,
                "prompts": images.prompts.prompts,
            }
            stores[model, images.name] = Store(
                Path(config.output) / "images" / model / images.name,
                content,
                depends,
                kept=None if config.keep_images or images.layout else shown,
                rank=accelerator.process_index,
            )
    return stores


def fingerprint(backbone: Backbone) -> str:
    """`flowalign.frozen.fingerprint` of a base, before adapters are loaded onto it."""
    pipe = backbone.pipe
    encoders = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
    return frozen.fingerprint((backbone.core, pipe.vae, *encoders))


# What a folder holds -----------------------------------------------------------------------------


def read_record(folder: Path, record: Path) -> Any:
    """What a record says about a folder; None for an empty one, StoreError if it is unreadable."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        content = json.loads(record.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no settings")
        return content
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{folder} is not empty, and has no readable {record.name} that says what its images "
            f"are ({type(error).__name__}). {REMEDY.format(folder)}"
        ) from None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    with replacing(path) as part:
        part.write_text(json.dumps(content, indent=1))


def another_run(folder: Path, problems: Sequence[str]) -> StoreError:
    """The error for a folder whose images differ from this run's."""
    return StoreError(
        f"{folder} holds images of another run: {'; '.join(problems)}. {REMEDY.format(folder)}"
    )


def differences(recorded: Any, wanted: Mapping[str, Any], place: str = "") -> list[str]:
    """What differs, one text each: "sampling.steps was 10 there, and is 40 here"."""
    recorded = recorded if isinstance(recorded, Mapping) else {}
    texts = []
    for key in dict.fromkeys([*wanted, *recorded]):
        there, here, name = recorded.get(key), wanted.get(key), f"{place}{key}"
        if isinstance(here, Mapping):
            texts += differences(there, here, f"{name}.")
            continue
        if isinstance(here, list) and isinstance(there, list):
            unequal = [i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b]
            if not unequal:  # of another `limit`: one list begins with the other
                continue
            name, there, here = f"{name}.{unequal[0]}", there[unequal[0]], here[unequal[0]]
        if here != there:
            # a long value is a digest: its beginning is enough
            a, b = (t if len(t := repr(v)) <= 40 else f"{t[:16]}...'" for v in (there, here))
            texts.append(f"{name} was {a} there, and is {b} here")
    return texts
