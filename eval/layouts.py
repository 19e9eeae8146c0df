"""Folders of images in the layouts that official scripts read.

`t2i_compbench` (Karine-Huang/T2I-CompBench, GORS_finetune/inference_eval.py and the evaluations):
FOLDER/samples/<prompt>_<number>.png, six digits, counted over all images; officially 10 per prompt.
The evaluations read every file: its prompt ends at the first "_", its number follows the last.

`dpg_bench` (TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py): FOLDER/<item>.png, one file per
prompt, with four square images in a 2x2 grid in reading order (`--pic-num 4`), or one image
(`--pic-num 1`). <item> is the prompt's file without .txt, which is the `item_id` of dpg_bench.csv;
the script takes it from the name up to its first ".". `--resolution` is the side of one image.

`geneval` (djghosh13/geneval@af4902f, evaluate_images.py): FOLDER/00000/metadata.jsonl, a line with
tag, include, exclude and prompt, and FOLDER/00000/samples/00000.png, ..., equally many for all
prompts. `flowalign eval --images FOLDER` scores it, too.

A folder appears by one rename when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowalign.eval.store import Store, StoreError, check_record, write_record
from flowalign.rewards.geneval import GenEval
from flowalign.system.files import replacing
from flowalign.training.report.pictures import png
from flowalign.types import PromptBatch

if TYPE_CHECKING:
    from flowalign.eval.suite import ImageSet

LONGEST = 255  # bytes of a file name on common file systems
Shape = tuple[int, int, int]  # images per prompt, their height and width


@dataclass(frozen=True)
class Layout:
    """How images are checked and written for an official script."""

    check: Callable[[PromptBatch, Shape], None]  # ValueError for what the script would misread
    write: Callable[[Path, PromptBatch, int, Tensor], None]  # the images [K,3,H,W] of prompt i


# The official folders ----------------------------------------------------------------------------


def _check_t2i_compbench(prompts: PromptBatch, shape: Shape) -> None:
    for prompt in prompts.prompts:
        if signs := [sign for sign in "_/\0" if sign in prompt]:
            raise ValueError(
                f"the prompt {prompt!r} has a {signs[0]!r}, which T2I-CompBench's file names "
                "cannot contain. Remove it."
            )
        _check_length(f"{prompt}_000000.png")


def _write_t2i_compbench(folder: Path, prompts: PromptBatch, index: int, images: Tensor) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    for number, image in enumerate(images, index * len(images)):
        path = folder / "samples" / f"{prompts.prompts[index]}_{number:06}.png"
        path.write_bytes(png(image))


def _check_dpg_bench(prompts: PromptBatch, shape: Shape) -> None:
    count, height, width = shape
    if count not in (1, 4) or height != width:
        raise ValueError(
            f"{count} images of {height}x{width} per prompt. DPG-Bench cuts squares out of a 2x2 "
            "grid: give 4 square images per prompt, or 1 (--pic-num 1)."
        )
    items = [metadata.get("item_id") for metadata in prompts.metadata]
    for index, item in enumerate(items):
        if not isinstance(item, str) or not item or set(item) & set("./\0"):
            raise ValueError(
                f"the metadata's item_id is {item!r}. It must be the name of the prompt's file in "
                "DPG-Bench without .txt, which has neither '.' nor '/'."
            )
        if item in items[:index]:
            raise ValueError(f"two prompts have the item_id {item!r}. Give each its own.")
        _check_length(f"{item}.png")


def _write_dpg_bench(folder: Path, prompts: PromptBatch, index: int, images: Tensor) -> None:
    rows = [torch.cat(list(pair), dim=2) for pair in images.split(2)]  # [3,H,2W] each
    path = folder / f"{prompts.metadata[index]['item_id']}.png"
    path.write_bytes(png(torch.cat(rows, dim=1)))


def _check_geneval(prompts: PromptBatch, shape: Shape) -> None:
    for index, metadata in enumerate(prompts.metadata):
        if not isinstance(metadata.get("tag"), str):
            raise ValueError(f"prompt {index}: metadata {str(metadata)[:80]!r} has no text `tag`")
    GenEval.check_prompts(prompts.prompts, prompts.metadata)


def _write_geneval(folder: Path, prompts: PromptBatch, index: int, images: Tensor) -> None:
    row = {**prompts.metadata[index], "prompt": prompts.prompts[index]}
    target = folder / f"{index:05}" / "samples"
    target.mkdir(parents=True)
    (target.parent / "metadata.jsonl").write_text(json.dumps(row))
    for number, image in enumerate(images):
        (target / f"{number:05}.png").write_bytes(png(image))


def _check_length(name: str) -> None:
    if len(name.encode()) > LONGEST:
        raise ValueError(
            f"the name {name[:60]!r}... has more than {LONGEST} bytes, too many for a file. "
            "Shorten the prompt or its item_id; the official script could not write it either."
        )


LAYOUTS: Mapping[str, Layout] = {
    "geneval": Layout(_check_geneval, _write_geneval),
    "t2i_compbench": Layout(_check_t2i_compbench, _write_t2i_compbench),
    "dpg_bench": Layout(_check_dpg_bench, _write_dpg_bench),
}


# The folders of an evaluation --------------------------------------------------------------------


class Export:
    """The layout folder of a model's images, and <benchmark>.json next to it, which records them.

    A complete folder is not written again, because official scripts write into it.
    """

    def __init__(self, output: Path, model: str, images: ImageSet, store: Store) -> None:
        self.folder = output / "layouts" / model / images.name
        self.record = self.folder.with_name(f"{images.name}.json")
        self.images, self.store = images, store
        self.content = {"layout": images.layout, **store.settings}

    def check(self) -> bool:
        """Whether the folder is there; StoreError if it holds other images, or more or fewer."""
        return check_record(self.folder, self.record, self.content, whole=True) is not None

    def write(self) -> None:
        """Write the folder, unless it is there; StoreError if the store lacks an image."""
        if self.check():
            return
        write_record(self.record, self.content)
        with replacing(self.folder) as part:
            part.mkdir()
            for index in range(len(self.images.prompts)):
                write = LAYOUTS[self.images.layout or ""].write
                write(part, self.images.prompts, index, self._load(index))

    def _load(self, prompt: int) -> Tensor:  # [K,3,H,W]
        images = [self.store.load((prompt, copy)) for copy in range(self.images.copies)]
        complete = [image for image in images if image is not None]  # NaN images have no file
        if len(complete) < len(images):
            raise StoreError(
                f"{self.folder} is not written: {self.store.folder} has no readable image of "
                f"prompt {prompt} ({self.images.prompts.prompts[prompt]!r}). If it was not finite, "
                "another `model.dtype` may help; if its file is broken, delete that. Then run this "
                "again."
            )
        return torch.stack(complete)
