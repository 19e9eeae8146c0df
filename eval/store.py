"""Images and scores of an evaluation that outlive the process: a killed run goes on where it was.

    <output>/images/<model>/<benchmark>/
        settings.json           what the images depend on; a run with other settings is refused
        00000_0.png             <place of the prompt>_<number of the copy>.png
        scores_<digest>/        one folder for each way of scoring that was asked for
            settings.json       what the scores depend on, besides image, prompt and metadata
            rows.<process>.jsonl    one line a scored image, NaN as null

A row is written after its image, so that a row stands for an image that was there. Everything but
the rows appears by one rename; a line of rows without its end is what a kill left of it, and is
not counted. Processes share the folder, on a file system that all of them see.

More prompts, or fewer, are no other run where the first ones are the same (`limit`): the noise of
an image depends on the place of its prompt. The size of a batch is free, too, but for the rounding
of float arithmetic, and so is that of the last batch, which may have been a smaller one before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accelerate.utils import gather_object
from torch import Tensor

from flowalign import frozen
from flowalign.adapters.files import read_lora
from flowalign.backbone import Backbone
from flowalign.config import ConfigError, EvalStage
from flowalign.eval.stats import from_json
from flowalign.pictures import pixels_of, png
from flowalign.rewards import describe
from flowalign.types import PromptBatch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from flowalign.config import BenchmarkConfig as Mark
    from flowalign.eval.suite import ImageSet

Key = tuple[int, int]
"""(place of the prompt in its set, number of the copy): the image, whoever sampled it."""

SETTINGS = "settings.json"


class Checked(Protocol):
    """Something that writes into a folder, if it may."""

    def check(self) -> None:
        """StoreError if the folder holds images of another run; changes nothing."""
        ...


class StoreError(ValueError):
    """A folder whose images are not those of this run: what was seen, what to do."""


class Store:
    """The images of one model for one set of prompts, and the rows of who judged them.

    images: what they depend on, fit for JSON; its `prompts` is the list of them. scores {judge:
    what its scores depend on}. kept: images are written for so many prompts, the first ones; None =
    for all. rank: of this process, which writes its own rows.
    """

    def __init__(
        self,
        folder: Path,
        images: Mapping[str, Any],
        scores: Mapping[str, Mapping[str, Any]],
        *,
        kept: int | None = None,
        rank: int = 0,
    ) -> None:
        self.folder, self.images, self.kept = folder, dict(images), kept
        self.rows = {judge: Rows(folder, found, rank) for judge, found in scores.items()}

    def check(self) -> None:
        """StoreError if the folder holds images that this run would not sample, or rows that cannot
        be read; changes nothing."""
        theirs = recorded(self.folder, self.folder / SETTINGS)
        if theirs is not None and (found := differences(theirs, self.images)):
            raise another_run(self.folder, found)
        for rows in self.rows.values():
            rows.check()

    def prepare(self) -> None:
        """Make the folders and say in them what they hold. For one process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        theirs = recorded(self.folder, self.folder / SETTINGS) or {}
        if len(theirs.get("prompts", ())) <= len(self.images.get("prompts", ())):
            appear(self.folder / SETTINGS, json.dumps(self.images, indent=1).encode())
        for rows in self.rows.values():
            rows.prepare()

    def keeps(self, key: Key) -> bool:
        """Whether that image is to be written."""
        return self.kept is None or key[0] < self.kept

    def save(self, key: Key, image: Tensor) -> None:
        """Write an image [3,H,W] if it `keeps` it. One that is not finite is no image."""
        if self.keeps(key) and bool(image.isfinite().all()):
            appear(self._path(key), png(image))

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


class Rows:
    """The rows of one way of scoring the images of a folder."""

    def __init__(self, images: Path, scores: Mapping[str, Any], rank: int = 0) -> None:
        self.folder, self.scores = images / f"scores_{digest(scores)[:12]}", scores
        self._mine = self.folder / f"rows.{rank}.jsonl"
        self._whole = False  # whether that file was seen to end with a whole line

    def check(self) -> None:
        """StoreError for a line that is whole, and no row."""
        for _ in self._all():
            pass

    def prepare(self) -> None:
        """Make the folder and say in it what it holds. For one process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        appear(self.folder / SETTINGS, json.dumps(self.scores, indent=1).encode())

    def read(self, prompts: PromptBatch) -> dict[Key, dict[str, Any]]:
        """The valid rows of all processes, one an image, that are about these prompts with their
        metadata. A failed one is not among them: the reward is asked again."""
        found: dict[Key, dict[str, Any]] = {}
        for row in self._all():
            if math.isfinite(row["value"]) and _about(row, prompts):
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

    def _all(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob("rows.*.jsonl")):
            *whole, _ = path.read_bytes().split(b"\n")  # after the last end of a line: nothing,
            for number, line in enumerate(whole, 1):  # or what a kill left
                yield _read(line, f"{path}, line {number}")


def _about(row: Mapping[str, Any], prompts: PromptBatch) -> bool:
    """Whether a row is of one of these prompts, with the metadata that it has here."""
    index = row["index"]
    if not 0 <= index < len(prompts):
        return False
    return row["prompt"] == prompts.prompts[index] and row["metadata"] == prompts.metadata[index]


def recorded(folder: Path, record: Path) -> Any:
    """What a record says that a folder holds; None where the folder is empty or missing.

    StoreError where it holds something, and nothing says what.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        return json.loads(record.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{folder} is not empty, and no {record.name} tells what its images are "
            f"({type(error).__name__}). {_remedy(folder)}"
        ) from None


def another_run(folder: Path, found: Sequence[str]) -> StoreError:
    """The refusal of a folder, for these differences."""
    return StoreError(
        f"{folder} holds images of another run: {'; '.join(found)}. {_remedy(folder)}"
    )


def _remedy(folder: Path) -> str:
    return f"Give another `output`, or delete {folder} to start anew."


def open_stores(
    config: EvalStage,
    sets: Sequence[ImageSet],
    weights: str,
    accelerator: Accelerator,
) -> dict[tuple[str, str], Store]:
    """{(model, set of images): its store}, to be admitted. weights: `fingerprint` of the base."""
    adapters = {name: folder and read_lora(folder).digest for name, folder in config.models.items()}
    # the main process speaks for all: a remote reward may describe itself to some of them only
    pairs = zip(config.benchmarks, sets, strict=True)
    scores = gather_object([[scores_of(mark, of) for mark, of in pairs]])[0]
    stores: dict[tuple[str, str], Store] = {}
    for name in config.models:
        for of, judged in zip(sets, scores, strict=True):
            kept = None if config.keep_images or of.layout else config.report.images
            stores[name, of.name] = Store(
                Path(config.output) / "images" / name / of.name,
                images_of(config, of, weights, adapters[name]),
                judged,
                kept=kept,
                rank=accelerator.process_index,
            )
    return stores


def admit(stores: Iterable[Store], others: Iterable[Checked], accelerator: Accelerator) -> None:
    """Make the stores ready to be written to, if all of them and of the others may be.

    Raises ConfigError, on every process and before anything is written, if a folder holds images of
    another run.
    """
    stores, problems = list(stores), []
    for each in (*stores, *others):
        try:
            each.check()
        except StoreError as error:
            problems.append(f"output: {error}")
    if problems := sorted(set(gather_object(problems))):
        raise ConfigError(problems)
    if accelerator.is_main_process:
        for store in stores:
            store.prepare()
    accelerator.wait_for_everyone()


def images_of(
    config: EvalStage, images: ImageSet, weights: str, adapter: str | None
) -> dict[str, Any]:
    """What the images of a model depend on. Not on the size of a batch, nor on the number of
    processes, but for the rounding of float arithmetic."""
    model = {"id", "revision", "dtype", "vae_dtype", "quantization"}
    model |= {"height", "width", "max_sequence_length"}
    return {
        "model": config.model.model_dump(include=model) | {"weights": weights},
        "adapter": adapter,
        "sampling": config.sampling.model_dump(exclude={"batch_size"}),
        "images": images.images,
        "prompts": images.prompts.prompts,
    }


def scores_of(mark: Mark, images: ImageSet) -> dict[str, dict[str, Any]]:
    """What the scores of each judge depend on, besides image, prompt and metadata."""
    judges = {benchmark.name: benchmark.reward for benchmark in images.judges}
    return {
        name: {"reward": spec.model_dump(mode="json"), "describe": describe(judges[name])}
        for name, spec in mark.judges.items()
    }


def digest(content: Any) -> str:
    """SHA-256 of what is fit for JSON."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(backbone: Backbone) -> str:
    """`flowalign.frozen.fingerprint` of a base, before adapters are loaded onto it."""
    pipe = backbone.pipe
    encoders = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
    return frozen.fingerprint((backbone.core, pipe.vae, *encoders))


def differences(theirs: Any, mine: Mapping[str, Any], place: str = "") -> list[str]:
    """What differs, a text each: "sampling.steps was 10 there, and is 40 here". Of two lists, the
    shorter may be the beginning of the longer."""
    theirs = theirs if isinstance(theirs, Mapping) else {}
    found = []
    for key in dict.fromkeys([*mine, *theirs]):
        here, there, name = mine.get(key), theirs.get(key), f"{place}{key}"
        if isinstance(here, Mapping):
            found += differences(there, here, f"{name}.")
        elif isinstance(here, list) and isinstance(there, list):
            pairs = enumerate(zip(there, here, strict=False))
            first = next(((i, a, b) for i, (a, b) in pairs if a != b), None)
            found += [_differs(f"{name}.{first[0]}", *first[1:])] if first else []
        elif here != there:
            found.append(_differs(name, there, here))
    return found


def _differs(name: str, there: Any, here: Any) -> str:
    return f"{name} was {_short(there)} there, and is {_short(here)} here"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:16]}...'"  # a digest


def _read(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = from_json(json.loads(line))
        _ = row["value"], row["index"], row["copy"], row["prompt"], row["metadata"]
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


def appear(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)
