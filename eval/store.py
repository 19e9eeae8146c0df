"""Images and scores of an evaluation on disk, so that a killed run continues where it stopped.

    <output>/images/<model>/<benchmark>/
        settings.json           what the images depend on; a run with other settings is refused
        00000_0.png             <place of the prompt>_<number of the copy>.png
        scores_<digest>/        one folder for each way of scoring
            settings.json       what the scores depend on, besides image, prompt and metadata
            rows.<process>.jsonl    one line per scored image, NaN as null

A row is written after its image, so every row has been scored on an image that existed. A last line
without its end was cut off by a kill and does not count. All processes share the folder.

A line holds the SHA-256 of its row and of the image's file; both settings.json hold their own. What
does not have the digest that it should is made again: a damaged line is scored, a damaged image is
sampled and scored. An image that no row speaks of has the checksums of its PNG.

A run with a larger or smaller `limit` is the same run, because the noise of an image depends on the
place of its prompt. So is one with another batch size, apart from float rounding.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import struct
import zlib
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor

from flowalign.backbone import Backbone, placement
from flowalign.config import EvalStage
from flowalign.eval.stats import from_json
from flowalign.rewards import describe
from flowalign.system import manifest
from flowalign.system.escape import shown
from flowalign.system.files import replacing, to_json
from flowalign.training.data import spread
from flowalign.training.report.pictures import pixels_of, png
from flowalign.types import PromptBatch

if TYPE_CHECKING:
    from flowalign.eval.suite import ImageSet

log = logging.getLogger("flowalign")

Key = tuple[int, int]  # an image: place of its prompt in the set, number of the copy
SETTINGS = "settings.json"
# keys of `model` that change an image, beside its size
MODEL_KEYS = {"id", "revision", "dtype", "vae_dtype", "quantization", "max_sequence_length"}

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
        # of another `limit` they are the same images
        same = {name: value for name, value in images.items() if name != "prompts"}
        self.rows = {judge: Rows(folder, same, depends, rank) for judge, depends in scores.items()}
        self._damaged: set[Key] = set()  # images whose file does not count
        self._digests: dict[Key, str | None] = {}  # of the images' files, None = there is none

    def check(self) -> None:
        """StoreError for images that this run would not sample."""
        recorded = self._recorded()
        if recorded is not None and (problems := differences(recorded, self.images)):
            raise another_run(self.folder, problems)

    def prepare(self) -> None:
        """Make the folders and record in them what they hold. For one process."""
        recorded = self._recorded() or {}
        # of a larger and a smaller `limit` the larger one describes the folder
        if len(recorded.get("prompts", ())) <= len(self.images.get("prompts", ())):
            write_record(self.folder / SETTINGS, self.images)
        for rows in self.rows.values():
            rows.mend()
            write_record(rows.folder / SETTINGS, rows.scores)

    def _recorded(self) -> dict[str, Any] | None:
        """What settings.json says. One that is damaged is made anew where a row proves that the
        images are this run's; else it raises StoreError."""
        try:
            return read_record(self.folder, self.folder / SETTINGS)
        except StoreError:
            if not any(any(True for _ in rows.lines()) for rows in self.rows.values()):
                raise
            log.warning("%s is damaged. It is written anew.", self.folder / SETTINGS)
            return None

    def read(self, judges: Mapping[str, PromptBatch], keys: Collection[Key]) -> Scored:
        """The rows of these images by all processes, as far as each was scored on the file that
        is there, or on none that is kept; and from now on no image that is damaged counts.

        judges {judge: its prompts with their metadata}.
        """
        wanted, vouched, doubted = set(keys), set(), set()
        rows: dict[str, dict[Key, dict[str, Any]]] = {judge: {} for judge in judges}
        asked: dict[str, set[Key]] = {judge: set() for judge in judges}
        for judge, prompts in judges.items():
            for line in self.rows[judge].lines():
                if line.key not in wanted:
                    continue
                if line.image and self._digest(line.key) not in (line.image, None):
                    doubted.add(line.key)
                    continue
                if line.image:
                    vouched.add(line.key)
                asked[judge].add(line.key)
                if line.of(prompts) and math.isfinite(line.row["value"]):
                    rows[judge].setdefault(line.key, line.row)
        for key in wanted - vouched:
            if self.has(key) and (key in doubted or not _is_whole(self._path(key))):
                self._damaged.add(key)
        if doubted or self._damaged:
            several = sorted(doubted | self._damaged)
            log.warning(
                "%s: damaged, or not the files that were scored: %d images, such as %s. They are "
                "made again.", self.folder, len(several), self._path(several[0]).name
            )  # fmt: skip
        return Scored(rows, asked)

    def append(self, judge: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of this process; they are in the file when this returns."""
        images = [self._digest((row["index"], row["copy"])) for row in rows]
        self.rows[judge].append(rows, images)

    def keeps(self, key: Key) -> bool:
        """Whether that image is to be written."""
        return self.kept is None or key[0] in self.kept

    def save(self, key: Key, image: Tensor) -> None:
        """Write an image [3,H,W] if the store keeps it and it is finite."""
        if self.keeps(key) and bool(image.isfinite().all()):
            content = png(image)
            with replacing(self._path(key)) as part:
                part.write_bytes(content)
            self._digests[key] = hashlib.sha256(content).hexdigest()
            self._damaged.discard(key)

    def load(self, key: Key) -> Tensor | None:
        """The image [3,H,W] in [0,1], on the CPU; None if there is none that can be read."""
        if key in self._damaged:
            return None
        try:
            return pixels_of(self._path(key).read_bytes())
        except BROKEN:
            return None

    def has(self, key: Key) -> bool:
        """Whether there is a file of that image that counts."""
        return key not in self._damaged and self._path(key).is_file()

    def _digest(self, key: Key) -> str | None:
        """SHA-256 of the file of an image; None where there is none."""
        if key not in self._digests:
            try:
                self._digests[key] = manifest.file_sha256(self._path(key))
            except OSError:
                self._digests[key] = None
        return self._digests[key]

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]:05}_{key[1]}.png"


# What PIL raises for a broken PNG.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)


def _is_whole(path: Path) -> bool:
    """Whether the parts of a PNG file have their checksums; reading it does not look at all."""
    try:
        Image.open(io.BytesIO(path.read_bytes())).verify()
    except BROKEN:
        return False
    return True


@dataclass(frozen=True)
class Scored:
    """Of some images: rows {judge: {image: its valid row}}, and asked {judge: the images that it
    was asked about before, whatever came of it}."""

    rows: dict[str, dict[Key, dict[str, Any]]]
    asked: dict[str, set[Key]]


@dataclass(frozen=True)
class Line:
    """A row as it lies on disk. image: SHA-256 of the file that was scored; None = none is kept."""

    row: dict[str, Any]
    image: str | None

    @property
    def key(self) -> Key:
        """Which image was scored."""
        return self.row["index"], self.row["copy"]

    def of(self, prompts: PromptBatch) -> bool:
        """Whether it was scored for one of these prompts with its metadata."""
        index = self.row["index"]
        return (
            0 <= index < len(prompts)
            and self.row["prompt"] == prompts.prompts[index]
            and self.row["metadata"] == prompts.metadata[index]
        )


class Rows:
    """The rows of one way of scoring the images of a folder.

    images, scores: what the images and the scores depend on. A row belongs to both.
    """

    def __init__(
        self, folder: Path, images: Mapping[str, Any], scores: Mapping[str, Any], rank: int = 0
    ) -> None:
        self.folder, self.scores = folder / f"scores_{_sha256(scores)[:12]}", scores
        self._about = _sha256([images, scores])
        self._own = self.folder / f"rows.{rank}.jsonl"
        self._complete = False  # whether that file is known to end with a complete line

    def append(self, rows: Sequence[Mapping[str, Any]], images: Sequence[str | None]) -> None:
        """Add rows of this process, with the digests of the images' files; they are in the file
        when this returns."""
        lines = [self._line(to_json(row), image) for row, image in zip(rows, images, strict=True)]
        if not self._complete and self._own.exists():  # drop a line that a kill cut off
            os.truncate(self._own, self._own.read_bytes().rfind(b"\n") + 1)
        self._complete = True
        with self._own.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())

    def lines(self) -> Iterator[Line]:
        """The rows of all processes, also invalid ones; damaged ones are left out."""
        for _, line in self._read():
            if line is not None:
                yield line

    def mend(self) -> None:
        """Remove damaged lines from the files, with a warning; their images are scored again."""
        damaged = {path for path, line in self._read() if line is None}
        for path in sorted(damaged):
            lines = path.read_bytes().split(b"\n")
            good = [line for line in lines[:-1] if self._parsed(line)]
            log.warning(
                "%s: %d of %d lines are damaged or of an older version. Their images are scored "
                "again.", path, len(lines) - 1 - len(good), len(lines) - 1
            )  # fmt: skip
            with replacing(path) as part:
                part.write_bytes(b"".join(line + b"\n" for line in good))

    def _read(self) -> Iterator[tuple[Path, Line | None]]:
        for path in sorted(self.folder.glob("rows.*.jsonl")):
            *lines, _ = path.read_bytes().split(b"\n")  # the last one is empty or was cut off
            for line in lines:
                yield path, self._parsed(line)

    def _line(self, row: Any, image: str | None) -> str:
        content = {"row": row, "image": image}
        digest = _sha256([self._about, content])
        return json.dumps({"sha256": digest, **content}, allow_nan=False)

    def _parsed(self, line: bytes) -> Line | None:
        """None for a line that is not what was written for these images and scores."""
        try:
            content = json.loads(line)
            if content.pop("sha256") != _sha256([self._about, content]):
                return None
            row = from_json(content["row"])  # in its order: results.json has the same bytes again
            _ = row["copy"]  # not optional here
            return Line(row, content["image"])
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            return None


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
            height, width = images.prompts.size or config.model.sizes[0]
            content = {
                "model": base | {"height": height, "width": width},
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
    """`flowalign.backbone.placement.fingerprint` of a base, before adapters are loaded onto it."""
    return placement.fingerprint((backbone.core, backbone.pipe.vae, *backbone.family.encoders))


# What a folder holds -----------------------------------------------------------------------------


def read_record(folder: Path, record: Path) -> dict[str, Any] | None:
    """What a record says about a folder; None for an empty one, StoreError if it is unreadable."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        content = json.loads(record.read_bytes())
        if content.pop("sha256") != _sha256(content):
            raise ValueError("its digest differs")
        return content
    except KeyError:
        reason = "it has no digest: it is damaged, or of an older version"
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        reason = shown(str(error))
    raise StoreError(
        f"{folder} is not empty, and has no readable {record.name} that says what its images are "
        f"({reason}). {REMEDY.format(folder)}"
    )


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write such a record, with its digest."""
    plain = json.loads(json.dumps(content, default=str))
    with replacing(path) as part:
        part.write_text(json.dumps({"sha256": _sha256(plain), **plain}, indent=1))


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


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
