"""Images and scores of an evaluation that outlive the process: a killed run goes on where it was.

    <output>/images/<model>/<benchmark>/
        settings.json           what the images depend on; a run with other settings is refused
        00000_0.png             <place of the prompt>_<number of the copy>.png
        scores_<digest>/        one folder for each way of scoring that was asked for
            settings.json       what the scores depend on
            rows.<process>.jsonl    one line a scored image, NaN as null

A row is written after its image, so that a row stands for an image that was there. Everything but
the rows appears by one rename; a line of rows without its end is what a kill left of it, and is
not counted. Processes share the folder, on a file system that all of them see.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowalign import frozen
from flowalign.backbone import Backbone, read_lora
from flowalign.config import ConfigError, EvalConfig
from flowalign.eval.stats import from_json
from flowalign.pictures import pixels_of, png
from flowalign.rewards import describe
from flowalign.types import PromptBatch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flowalign.config import Benchmark as Mark
    from flowalign.eval.suite import Benchmark

Key = tuple[int, int]
"""(place of the prompt in its set, number of the copy): the image, whoever sampled it."""

SETTINGS = "settings.json"


class StoreError(ValueError):
    """A folder whose images are not those of this run: what was seen, what to do."""


class Store:
    """The images and rows of one model on one benchmark.

    images, scores: what each of them depends on, fit for JSON. kept: images are written for so
    many prompts, the first ones; None = for all. rank: of this process, which writes its own rows.
    """

    def __init__(
        self,
        folder: Path,
        images: Mapping[str, Any],
        scores: Mapping[str, Any],
        *,
        kept: int | None = None,
        rank: int = 0,
    ) -> None:
        self.folder, self.images, self.scores, self.kept = folder, images, scores, kept
        self.scored = folder / f"scores_{digest(scores)[:12]}"
        self._mine = self.scored / f"rows.{rank}.jsonl"
        self._whole = False  # whether that file was seen to end with a whole line

    def check(self) -> None:
        """StoreError if the folder holds images that this run would not sample; changes nothing."""
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return
        path = self.folder / SETTINGS
        remedy = f"Give another `output`, or delete {self.folder} to start anew."
        try:
            theirs = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{self.folder} is not empty, and no {SETTINGS} tells what its images are "
                f"({type(error).__name__}). {remedy}"
            ) from None
        if found := _differences(theirs, dict(self.images)):
            raise StoreError(
                f"{self.folder} holds images of another run: {'; '.join(found)}. {remedy}"
            )
        self.rows()

    def prepare(self) -> None:
        """Make the folders and say in them what they hold. For one process."""
        self.scored.mkdir(parents=True, exist_ok=True)
        for path, content in ((self.folder, self.images), (self.scored, self.scores)):
            _appear(path / SETTINGS, json.dumps(content, indent=1).encode())

    def rows(self) -> dict[Key, dict[str, Any]]:
        """The valid rows of all processes, one an image. A failed one is not among them: the reward
        is asked again. StoreError for a line that is whole, and no row."""
        found: dict[Key, dict[str, Any]] = {}
        for path in sorted(self.scored.glob("rows.*.jsonl")):
            *whole, _ = path.read_bytes().split(b"\n")  # after the last end of a line: nothing,
            for number, line in enumerate(whole, 1):  # or what a kill left
                row = _read(line, f"{path}, line {number}")
                if math.isfinite(row["value"]):
                    found.setdefault((row["index"], row["copy"]), row)
        return found

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of this process; they are in the file when this returns."""
        lines = [json.dumps(_without_nan(row), allow_nan=False) for row in rows]
        if not self._whole and self._mine.exists():
            os.truncate(self._mine, self._mine.read_bytes().rfind(b"\n") + 1)
        self._whole = True
        with self._mine.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())

    def keeps(self, key: Key) -> bool:
        """Whether that image is to be written."""
        return self.kept is None or key[0] < self.kept

    def save(self, key: Key, image: Tensor) -> None:
        """Write an image [3,H,W] if it `keeps` it. One that is not finite is no image."""
        if self.keeps(key) and bool(image.isfinite().all()):
            _appear(self._path(key), png(image))

    def load(self, key: Key) -> Tensor | None:
        """The image [3,H,W] in [0,1], on the CPU; None where there is none that can be read."""
        try:
            return pixels_of(self._path(key).read_bytes())
        except (OSError, SyntaxError):  # PIL's word for a broken PNG
            return None

    def has(self, key: Key) -> bool:
        """Whether that image lies there."""
        return self._path(key).is_file()

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]:05}_{key[1]}.png"


def open_stores(
    config: EvalConfig,
    benchmarks: Sequence[Benchmark],
    weights: str,
    accelerator: Accelerator,
) -> dict[tuple[str, str], Store]:
    """{(model, benchmark): its store}, ready to be written to.

    weights: `fingerprint` of the base. Raises ConfigError, on every process and before anything is
    written, if a folder holds images of another run.
    """
    kept = None if config.keep_images else config.report.images
    adapters = {name: folder and adapter_digest(folder) for name, folder in config.models.items()}
    # the main process speaks for all: a remote reward may describe itself to some of them only
    scores = gather_object(
        [
            [
                scores_of(mark, wired)
                for mark, wired in zip(config.benchmarks, benchmarks, strict=True)
            ]
        ]
    )[0]
    stores: dict[tuple[str, str], Store] = {}
    for name in config.models:
        for mark, wired, judged in zip(config.benchmarks, benchmarks, scores, strict=True):
            stores[name, mark.name] = Store(
                Path(config.output) / "images" / name / mark.name,
                images_of(config, mark, wired.prompts, weights, adapters[name]),
                judged,
                kept=kept,
                rank=accelerator.process_index,
            )
    problems = []
    for store in stores.values():
        try:
            store.check()
        except StoreError as error:
            problems.append(f"output: {error}")
    if problems := sorted(set(gather_object(problems))):
        raise ConfigError(problems)
    if accelerator.is_main_process:
        for store in stores.values():
            store.prepare()
    accelerator.wait_for_everyone()
    return stores


def images_of(
    config: EvalConfig, mark: Mark, prompts: PromptBatch, weights: str, adapter: str | None
) -> dict[str, Any]:
    """What the images of a model depend on. Not on the size of a batch, nor on the number of
    processes, but for the rounding of float arithmetic."""
    model = {"id", "revision", "dtype", "vae_dtype", "quantization"}
    model |= {"height", "width", "max_sequence_length"}
    return {
        "model": config.model.model_dump(include=model) | {"weights": weights},
        "adapter": adapter,
        "sampling": config.sampling.model_dump(exclude={"batch_size"}),
        "prompts": digest(prompts.prompts),
        "images": mark.images,
    }


def scores_of(mark: Mark, benchmark: Benchmark) -> dict[str, Any]:
    """What the scores of a benchmark's images depend on, besides the images."""
    return {
        "reward": mark.reward.model_dump(mode="json"),
        "describe": describe(benchmark.reward),
        "metadata": digest(benchmark.prompts.metadata),
    }


def digest(content: Any) -> str:
    """SHA-256 of what is fit for JSON."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def adapter_digest(folder: str) -> str:
    """SHA-256 of an adapter's weights and metadata (alpha ...), wherever it lies."""
    weights, metadata = read_lora(folder)
    found = hashlib.sha256(digest(metadata).encode())
    for name in sorted(weights):
        tensor = weights[name].contiguous().reshape(-1)
        found.update(f"{name} {tensor.dtype} {list(weights[name].shape)}".encode())
        found.update(tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def fingerprint(backbone: Backbone) -> str:
    """`flowalign.frozen.fingerprint` of a base, before adapters are loaded onto it."""
    pipe = backbone.pipe
    encoders = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
    return frozen.fingerprint((backbone.core, pipe.vae, *encoders))


def _differences(theirs: Any, mine: Mapping[str, Any], place: str = "") -> list[str]:
    """What differs, a text each: "sampling.steps was 10 there, and is 40 here"."""
    theirs = theirs if isinstance(theirs, Mapping) else {}
    found = []
    for key in dict.fromkeys([*mine, *theirs]):
        here, there = mine.get(key), theirs.get(key)
        if isinstance(here, Mapping):
            found += _differences(there, here, f"{place}{key}.")
        elif here != there:
            found.append(f"{place}{key} was {_short(there)} there, and is {_short(here)} here")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:16]}...'"  # a digest


def _read(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = from_json(json.loads(line))
        _ = row["value"], row["index"], row["copy"]
    except (ValueError, AttributeError, KeyError) as error:
        raise StoreError(
            f"{where} is no row of scores ({error!r}). Delete that line, or its file."
        ) from None
    return row


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _appear(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)
