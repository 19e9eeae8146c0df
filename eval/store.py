"""Images and scores of an evaluation on disk, so that a killed run continues where it stopped.

    <output>/images/<model>/<benchmark>/
        settings.json           what the images depend on; a run with other settings is refused
        00000_0.png             <index of the prompt>_<number of the copy>.png
        scores_<digest>/        one folder for each way of scoring
            settings.json       what the scores depend on, besides image, prompt and metadata
            rows.<process>.jsonl    one line per scored image, NaN as null

A row is written after its image. An image without a whole line is scored again; one without a file
is sampled again. All processes share the folder.

A run with a larger or smaller `limit` is the same run, because the noise of an image depends on the
index of its prompt. So is one with another batch size, apart from float rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.config import EvalStage
from flowalign.eval.scores import from_row, to_row
from flowalign.report.pictures import png
from flowalign.rewards import describe
from flowalign.system.escape import shown
from flowalign.system.files import append, read_lines, replacing, to_json
from flowalign.system.images import read_image, stacked
from flowalign.system.manifest import file_sha256, json_sha256
from flowalign.training.data import spread
from flowalign.types import ImageScore

if TYPE_CHECKING:
    from flowalign.eval.suite import Benchmark, ImageSet

ImageKey = tuple[int, int]  # an image: index of its prompt in the set, number of the copy
SETTINGS = "settings.json"
MODEL_KEYS = {  # of `model`, that change an image
    "id", "revision", "dtype", "quantization", "max_sequence_length", "height", "width"
}  # fmt: skip


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
        files: Mapping[ImageKey, Path] | None = None,
    ) -> None:
        self.folder = folder
        self.settings = dict(settings)
        self.saved_prompts = saved_prompts
        self._scores = scores
        self._rank = rank
        self._files = files

    def score_folder(self, judge: str) -> Path:
        """The folder of a judge's rows; each way of scoring has a folder of its own."""
        return self.folder / f"scores_{json_sha256(self._scores[judge])[:12]}"

    def check(self) -> dict[str, Any]:
        """What the folder holds, {} if nothing; StoreError where its record is not readable, or it
        holds images that this run would not sample."""
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return {}
        again = f"Give another `output`, or delete {self.folder} to start again."
        try:
            recorded = dict(json.loads((self.folder / SETTINGS).read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{self.folder} is not empty, and has no readable {SETTINGS} that says what its "
                f"images are ({shown(repr(error))}). {again}"
            ) from None
        there = _flat(recorded)
        here = _flat(self.settings)
        keys = [key for key in here | there if there.get(key) != here.get(key)]
        # in lists only shared items count: a smaller `limit` has the first prompts
        keys = [k for k in keys if not k[-1].isdecimal() or k in there.keys() & here.keys()]
        if keys:
            texts = (
                f"{key} was {shown(repr(there.get(key)), 40)} there, and is "
                f"{shown(repr(here.get(key)), 40)} here"
                for key in keys[:3]
            )
            text = f"{self.folder} holds images of another run: {'; '.join(texts)}."
            raise StoreError(f"{text} {again}")
        return recorded

    def prepare(self) -> None:
        """Create the folders and write their settings. One process calls it."""
        # the larger `limit` describes the folder
        records = {self.score_folder(judge): content for judge, content in self._scores.items()}
        if len(self.check().get("prompts", ())) <= len(self.settings.get("prompts", ())):
            records[self.folder] = self.settings
        for folder, content in records.items():
            with replacing(folder / SETTINGS) as part:
                part.write_text(json.dumps(content, indent=1, default=str))

    def read(
        self, judges: Sequence[Benchmark], keys: Collection[ImageKey]
    ) -> dict[str, dict[ImageKey, ImageScore]]:
        """{judge: {image: its score}} from the rows of all processes; the value is NaN where the
        reward failed. Rows whose prompt or metadata differ are left out."""
        scores: dict[str, dict[ImageKey, ImageScore]] = {judge.name: {} for judge in judges}
        for judge in judges:
            known = scores[judge.name]
            wanted = {key: judge.image(key) for key in keys}
            for path in sorted(self.score_folder(judge.name).glob("rows.*.jsonl")):
                for row in read_lines(path):
                    with suppress(KeyError, TypeError, AttributeError):  # not a row of this format
                        score = from_row(row, judge.reward.counts)
                        key = (score.image.index, score.image.copy)
                        # a failed image may have been scored later
                        if score.image == wanted[key] and not is_valid(known.get(key)):
                            known[key] = score
        return scores

    def append(self, judge: str, scores: Sequence[ImageScore]) -> None:
        """Add scores of this process; they are in the file when this returns."""
        lines = (json.dumps(to_json(to_row(score)), allow_nan=False) for score in scores)
        # the line break comes first, so that a truncated line does not damage the next one
        text = "".join(f"\n{line}" for line in lines)
        append(self.score_folder(judge) / f"rows.{self._rank}.jsonl", text)

    def saves(self, key: ImageKey) -> bool:
        return not self._files and (self.saved_prompts is None or key[0] in self.saved_prompts)

    def save(self, key: ImageKey, image: Tensor) -> None:
        """Write an image [3,H,W] if the store saves it and it is finite."""
        if self.saves(key) and bool(image.isfinite().all()):
            with replacing(self._path(key)) as part:
                part.write_bytes(png(image))

    def load(self, key: ImageKey) -> Tensor | None:
        """The image [3,H,W] in [0,1], on the CPU; None if there is no complete file."""
        with suppress(ValueError):
            return stacked(read_image(self._path(key)))[0]
        return None

    def has(self, key: ImageKey) -> bool:
        """Whether the image's file exists. Files are written atomically, so it is complete."""
        return bool(self._files) or self._path(key).is_file()

    def _path(self, key: ImageKey) -> Path:
        return self._files[key] if self._files else self.folder / f"{key[0]:05}_{key[1]}.png"


def is_valid(score: ImageScore | None) -> bool:
    return score is not None and math.isfinite(score.value)


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
    scores: dict[str, dict[str, Any]] = {}
    for benchmark, images in zip(config.benchmarks, sets, strict=True):
        judges = zip(images.judges, benchmark.judges.values(), strict=True)
        scores[images.name] = {
            judge.name: {"reward": c.model_dump(mode="json"), "describe": describe(judge.reward)}
            for judge, c in judges
        }
    # the main process decides: a remote reward may describe itself to some processes only
    scores = gather_object([scores])[0]
    base = config.model.model_dump(include=MODEL_KEYS) | {"weights": weights}
    stores = {}
    for model, images in product(config.models, sets):
        content = {
            "model": base,
            "adapter": adapters.get(model),
            "sampling": config.sampling_of(model).model_dump(exclude={"batch_size"}),
        }
        if files := images.files.get(model):
            content = {"files": [file_sha256(path) for path in files.values()]}
        shown = {*spread(len(images.prompts), config.report.images)}
        stores[model, images.name] = Store(
            config.folder.images / model / images.name,
            content | {"images": images.copies, "prompts": images.prompts.prompts},
            scores[images.name],
            saved_prompts=None if config.keep_images else shown,
            rank=accelerator.process_index,
            files=files,
        )
    return stores


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """{dotted key: value} of a value from JSON."""
    if not isinstance(value, Mapping | list):
        return {key: value}
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    inner = (_flat(item, f"{key}.{name}" if key else str(name)) for name, item in pairs)
    return {name: item for part in inner for name, item in part.items()}
