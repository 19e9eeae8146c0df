"""Images and scores of an evaluation on disk, so that a killed run continues where it stopped.

    <output>/images/<model>/<benchmark>/
        settings.json           what the images depend on; a run with other settings is refused
        00000_0.png             <index of the prompt>_<number of the copy>.png
        scores_<digest>/        one folder for each way of scoring
            settings.json       what the scores depend on, besides image, prompt and metadata
            rows.<process>.jsonl    one line per scored image with its SHA-256, NaN as null

A row is written after its image. A line that a kill cut off, or that does not match its SHA-256, is
scored again; a PNG that cannot be read is sampled again. All processes share the folder.

A run with a larger or smaller `limit` is the same run, because the noise of an image depends on the
index of its prompt. So is one with another batch size, apart from float rounding.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor

from flowalign.config import EvalStage
from flowalign.eval.stats import from_json
from flowalign.rewards import describe
from flowalign.system.escape import shown
from flowalign.system.files import replacing, to_json
from flowalign.system.images import pixels_of
from flowalign.system.manifest import file_sha256, json_sha256
from flowalign.training.data import spread
from flowalign.training.report.pictures import png
from flowalign.types import PromptBatch

if TYPE_CHECKING:
    from flowalign.eval.suite import ImageSet

log = logging.getLogger("flowalign")

Key = tuple[int, int]  # an image: index of its prompt in the set, number of the copy
ImageRow = dict[str, Any]  # the scores of an image by one judge
SETTINGS = "settings.json"
# keys of `model` that change an image, besides its size
MODEL_KEYS = {"id", "revision", "dtype", "vae_dtype", "quantization", "max_sequence_length"}


class StoreError(ValueError):
    """A folder that holds images of another run: what was seen, what to do."""


class Store:
    """The images of one model for one set of prompts, and the rows of their judges.

    settings: what the images depend on, as JSON, with the list of `prompts`. scores {judge: what
    its scores depend on}. saved_prompts: indices of the prompts whose images are written, None =
    all. rank: of this process. files: the images, where another program made them; these are read
    only.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        scores: Mapping[str, Mapping[str, Any]],
        *,
        saved_prompts: Container[int] | None = None,
        rank: int = 0,
        files: Mapping[Key, Path] | None = None,
    ) -> None:
        self.folder, self.settings, self.saved_prompts = folder, dict(settings), saved_prompts
        self._files = files
        self.score_folders = {
            judge: folder / f"scores_{json_sha256(depends)[:12]}"
            for judge, depends in scores.items()
        }
        self._scores, self._rank = scores, rank
        self._complete: set[Path] = set()  # row files that are known to end with a complete line

    def check(self) -> None:
        """StoreError for images that this run would not sample."""
        recorded = read_record(self.folder, self.folder / SETTINGS)
        if recorded is not None and (problems := differences(recorded, self.settings)):
            raise another_run(self.folder, problems)

    def prepare(self) -> None:
        """Make the folders and record in them what they hold. For one process."""
        recorded = read_record(self.folder, self.folder / SETTINGS) or {}
        # the larger `limit` describes the folder
        if len(recorded.get("prompts", ())) <= len(self.settings.get("prompts", ())):
            write_record(self.folder / SETTINGS, self.settings)
        for judge, folder in self.score_folders.items():
            write_record(folder / SETTINGS, self._scores[judge])

    def read(
        self, judges: Mapping[str, PromptBatch], keys: Collection[Key]
    ) -> dict[str, dict[Key, ImageRow]]:
        """{judge: {image: its row}} of these images, by all processes; the value of a row is NaN
        where the reward failed.

        judges {judge: its prompts with their metadata}.
        """
        wanted = set(keys)
        rows: dict[str, dict[Key, ImageRow]] = {judge: {} for judge in judges}
        for judge, prompts in judges.items():
            for row in self._all_rows(judge):
                key = row["index"], row["copy"]
                if key in wanted and _is_scored_for(row, prompts):
                    # a failed image may have been scored later
                    if not is_valid(rows[judge].get(key)):
                        rows[judge][key] = row
        return rows

    def _all_rows(self, judge: str) -> Iterator[ImageRow]:
        """The rows of all processes; lines that are damaged are left out."""
        for path in sorted(self.score_folders[judge].glob("rows.*.jsonl")):
            *lines, _ = path.read_bytes().split(b"\n")  # the last one is empty or was cut off
            rows = [row for line in lines if (row := _parsed(line))]
            if len(rows) < len(lines):
                log.warning(
                    "%s: %d of %d lines are damaged or of an older version. Their images are "
                    "scored again.", path, len(lines) - len(rows), len(lines)
                )  # fmt: skip
            yield from rows

    def append(self, judge: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of this process; they are in the file when this returns."""
        path = self.score_folders[judge] / f"rows.{self._rank}.jsonl"
        if path not in self._complete and path.exists():  # drop a line that a kill cut off
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._complete.add(path)
        plain = map(to_json, rows)
        lines = [
            json.dumps({"sha256": json_sha256(row), "row": row}, allow_nan=False) for row in plain
        ]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def saves(self, key: Key) -> bool:
        """Whether that image is to be written."""
        return not self._files and (self.saved_prompts is None or key[0] in self.saved_prompts)

    def save(self, key: Key, image: Tensor) -> None:
        """Write an image [3,H,W] if the store saves it and it is finite."""
        if self.saves(key) and bool(image.isfinite().all()):
            with replacing(self._path(key)) as part:
                part.write_bytes(png(image))

    def load(self, key: Key) -> Tensor | None:
        """The image [3,H,W] in [0,1], on the CPU; None if there is none without damage."""
        return pixels_of(self._path(key).read_bytes()) if self.has(key) else None

    def has(self, key: Key) -> bool:
        """Whether there is a file of that image. One that is damaged is removed."""
        path = self._path(key)
        if self._files or not path.is_file():
            return bool(self._files)
        try:
            with Image.open(path) as image:
                image.verify()  # the checksums of its chunks
        except Exception:  # PIL raises whatever its decoders do
            log.warning("%s is damaged; the image is sampled again.", path)
            path.unlink()
        return path.is_file()

    def _path(self, key: Key) -> Path:
        return self._files[key] if self._files else self.folder / f"{key[0]:05}_{key[1]}.png"


def _parsed(line: bytes) -> ImageRow | None:
    """None for a line that no store wrote."""
    try:
        content = json.loads(line)
        if content["sha256"] != json_sha256(content["row"]):
            return None
        return from_json(content["row"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def is_valid(row: Mapping[str, Any] | None) -> bool:
    """Whether there is a row with a score."""
    return row is not None and math.isfinite(row["value"])


def _is_scored_for(row: ImageRow, prompts: PromptBatch) -> bool:
    """Whether a row was scored for one of these prompts with its metadata."""
    index = row["index"]
    return (
        index < len(prompts)
        and row["prompt"] == prompts.prompts[index]
        and row["metadata"] == prompts.metadata[index]
    )


def open_stores(
    config: EvalStage,
    sets: Sequence[ImageSet],
    weights: str,
    adapters: Mapping[str, str | None],
    accelerator: Accelerator,
) -> dict[tuple[str, str], Store]:
    """{(model, image set): its store}, not yet checked.

    weights: `fingerprint` of the base. adapters {model that samples: digest of its adapter, None
    for the base}.
    """
    scores = [
        {
            judge.name: {
                "reward": reward.model_dump(mode="json"),
                "describe": describe(judge.reward),
            }
            for judge, reward in zip(images.judges, benchmark.judges.values(), strict=True)
        }
        for benchmark, images in zip(config.scored, sets, strict=True)
    ]
    # the main process decides: a remote reward may describe itself to some processes only
    scores = gather_object([scores])[0]
    base = config.model.model_dump(include=MODEL_KEYS) | {"weights": weights}
    stores = {}
    for model in config.models:
        for images, depends in zip(sets, scores, strict=True):
            pictured = set(spread(len(images.prompts), config.report.images))
            height, width = images.prompts.size or config.model.image_sizes[0]
            files = images.files.get(model)
            content = {
                "model": base | {"height": height, "width": width},
                "adapter": adapters.get(model),
                "sampling": config.sampling_of(model).model_dump(exclude={"batch_size"}),
            }
            if files:
                content = {"files": [file_sha256(path) for path in files.values()]}
            content |= {"images": images.copies, "prompts": images.prompts.prompts}
            stores[model, images.name] = Store(
                Path(config.output) / "images" / model / images.name,
                content,
                depends,
                saved_prompts=None if config.keep_images or images.layout else pictured,
                rank=accelerator.process_index,
                files=files,
            )
    return stores


# What a folder holds -----------------------------------------------------------------------------


def read_record(folder: Path, record: Path) -> dict[str, Any] | None:
    """What a record says about a folder; None for an empty one, StoreError if it is unreadable."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        content = json.loads(record.read_bytes())
        if content.pop("sha256") != json_sha256(content):
            raise ValueError("its digest differs")
        return content
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{folder} is not empty, and has no readable {record.name} that says what its images "
            f"are ({shown(repr(error))}). Give another `output`, or delete {folder} to start again."
        ) from None


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write such a record, with its digest."""
    plain = json.loads(json.dumps(content, default=str))
    with replacing(path) as part:
        part.write_text(json.dumps({"sha256": json_sha256(plain), **plain}, indent=1))


def another_run(folder: Path, problems: Sequence[str]) -> StoreError:
    """The error for a folder whose images differ from this run's."""
    return StoreError(
        f"{folder} holds images of another run: {'; '.join(problems)}. Give another `output`, or "
        f"delete {folder} to start again."
    )


def differences(recorded: Any, wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs, one text each: "sampling.steps was 10 there, and is 40 here"."""
    recorded = recorded if isinstance(recorded, Mapping) else {}
    texts = []
    for key in dict.fromkeys([*wanted, *recorded]):
        there, here, name = recorded.get(key), wanted.get(key), f"{prefix}{key}"
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
