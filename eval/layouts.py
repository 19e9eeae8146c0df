"""Folders of images as the official scripts of T2I-CompBench and DPG-Bench read them.

`t2i_compbench` (Karine-Huang/T2I-CompBench, GORS_finetune/inference_eval.py and the evaluations):
FOLDER/samples/<prompt>_<number>.png, six digits, counted over all images; officially 10 a prompt.
The evaluations take the prompt from the name up to its first "_", the number from what follows the
last, and read every file that is there.

`dpg_bench` (TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py): FOLDER/<item>.png, one file a
prompt, whose square images lie in a 2x2 grid in reading order (`--pic-num 4`), or the one image
itself (`--pic-num 1`). <item> is the prompt's file without .txt, which is the `item_id` of
dpg_bench.csv; the script takes it from the name up to its first ".". `--resolution` is the side of
one image.

`geneval` (djghosh13/geneval): FOLDER/00000/metadata.jsonl and FOLDER/00000/samples/00000.png; see
`flowalign.eval.geneval_folder`, which also reads and scores such a folder.

A folder appears by one rename, when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.eval import geneval_folder
from flowalign.eval.store import Store, StoreError, another_run, appear, differences, recorded
from flowalign.eval.suite import ImageSet
from flowalign.pictures import png
from flowalign.types import PromptBatch

LONGEST = 255  # bytes of a file's name

Shape = tuple[int, int, int]
"""Images of a prompt, their height and width."""


@dataclass(frozen=True)
class Layout:
    """check: ValueError for prompts, and a shape, that the official scripts would misread. write:
    the images [K,3,H,W] of the prompt at a place of its set into a folder."""

    check: Callable[[PromptBatch, Shape], None]
    write: Callable[[Path, PromptBatch, int, Tensor], None]


def check_layout(name: str, prompts: PromptBatch, shape: Shape) -> None:
    """Raise ValueError for a name that is no key of LAYOUTS, and for prompts, metadata or a shape
    of their images that the official scripts would read otherwise, or not at all."""
    if name not in LAYOUTS:
        raise ValueError(f"no layout {name!r}; possible: {', '.join(LAYOUTS)}. Use one of them.")
    LAYOUTS[name].check(prompts, shape)


def write_layout(
    name: str, folder: str | Path, prompts: PromptBatch, images: Iterable[Tensor]
) -> None:
    """Write the images of P prompts, each [K,3,H,W] in [0,1], one prompt at a time.

    images may be lazy: no more than one prompt's are held. Raises ValueError as `check_layout` does
    and for images that do not fit together; then there is no folder. So does a folder that is there
    already, and not empty: the official scripts read all that they find.
    """
    folder, rest = Path(folder), iter(images)
    first = list(islice(rest, 1))
    if not first or not len(prompts):
        raise ValueError(f"{len(prompts)} prompts and no images; give some of both.")
    shape = _shape(first[0])
    check_layout(name, prompts, shape)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty, and the official scripts read all that is there. Give a new "
            "folder."
        )
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # what a kill left
    part.mkdir(parents=True)
    try:
        for place, own in enumerate(_alike(_all(first, rest), shape, len(prompts))):
            LAYOUTS[name].write(part, prompts, place, own)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _all(first: list[Tensor], rest: Iterator[Tensor]) -> Iterator[Tensor]:
    """One after the other. The first is not held on to, as `chain` would: they are large."""
    yield first.pop()
    yield from rest


def _shape(images: Tensor) -> Shape:
    count, _, height, width = images.shape
    return count, height, width


def _alike(images: Iterable[Tensor], shape: Shape, count: int) -> Iterator[Tensor]:
    """The same, if there are so many and all have that shape."""
    number = 0
    for number, own in enumerate(images, 1):
        if (seen := _shape(own)) != shape:
            raise ValueError(
                f"prompt {number - 1} has {_images(seen)}, and the first {_images(shape)}. The "
                "official scores are means over files, so give each as many, of one size."
            )
        if not bool(own.isfinite().all()):
            raise ValueError(
                f"an image of prompt {number - 1} has pixels that are NaN or infinite."
            )
        if number <= count:
            yield own
    if number != count:
        raise ValueError(f"{count} prompts, but images of {number}; give one each.")


def _images(shape: Shape) -> str:
    return f"{shape[0]} images of {shape[1]}x{shape[2]}"


# The official folders ----------------------------------------------------------------------------


def _t2i_compbench(prompts: PromptBatch, shape: Shape) -> None:
    for prompt in prompts.prompts:
        for sign in ("_", "/", "\0"):
            if sign in prompt:
                raise ValueError(
                    f"the prompt {prompt!r} has a {sign!r}, which T2I-CompBench's names cannot "
                    "hold. Take it out."
                )
        _check_length(f"{prompt}_000000.png")


def _write_t2i_compbench(folder: Path, prompts: PromptBatch, place: int, images: Tensor) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    for number, image in enumerate(images, place * len(images)):
        path = folder / "samples" / f"{prompts.prompts[place]}_{number:06}.png"
        path.write_bytes(png(image))


def _dpg_bench(prompts: PromptBatch, shape: Shape) -> None:
    count, height, width = shape
    if count not in (1, 4) or height != width:
        raise ValueError(
            f"{_images(shape)} a prompt. DPG-Bench cuts squares out of a 2x2 grid: give 4 square "
            "images a prompt, or 1 (--pic-num 1)."
        )
    items = [metadata.get("item_id") for metadata in prompts.metadata]
    for item in items:
        if not isinstance(item, str) or not item or set(item) & set("./\0"):
            raise ValueError(
                f"the metadata's item_id is {item!r}; want the name of the prompt's file in "
                "DPG-Bench without .txt, which has neither '.' nor '/'."
            )
        _check_length(f"{item}.png")
    if twice := [item for item, seen in Counter(items).items() if seen > 1]:
        raise ValueError(f"two prompts have the item_id {twice[0]!r}. Give each its own.")


def _write_dpg_bench(folder: Path, prompts: PromptBatch, place: int, images: Tensor) -> None:
    rows = [torch.cat(list(pair), dim=2) for pair in images.split(2)]
    path = folder / f"{prompts.metadata[place]['item_id']}.png"
    path.write_bytes(png(torch.cat(rows, dim=1)))


def _geneval(prompts: PromptBatch, shape: Shape) -> None:
    for place in range(len(prompts)):
        geneval_folder.check_metadata(_line(prompts, place), f"prompt {place}")


def _write_geneval(folder: Path, prompts: PromptBatch, place: int, images: Tensor) -> None:
    geneval_folder.write(folder, [_line(prompts, place)], images[None], first=place)


def _line(prompts: PromptBatch, place: int) -> dict[str, Any]:
    """A line of GenEval's evaluation_metadata.jsonl."""
    return {**prompts.metadata[place], "prompt": prompts.prompts[place]}


def _check_length(name: str) -> None:
    if len(name.encode()) > LONGEST:
        raise ValueError(
            f"the name {name[:60]!r}... has more than {LONGEST} bytes, which a file cannot have. "
            "Shorten it; the official script cannot write it, either."
        )


LAYOUTS: Mapping[str, Layout] = {
    "geneval": Layout(_geneval, _write_geneval),
    "t2i_compbench": Layout(_t2i_compbench, _write_t2i_compbench),
    "dpg_bench": Layout(_dpg_bench, _write_dpg_bench),
}


# Of an evaluation --------------------------------------------------------------------------------


class Export:
    """The layout folder of a model's images: <output>/layouts/<model>/<benchmark>.

    What lies beside it as <benchmark>.json says which images it holds; the folder itself is left
    alone once it is there, as official scripts write into it.
    """

    def __init__(self, output: Path, model: str, images: ImageSet, store: Store) -> None:
        self.folder = output / "layouts" / model / images.name
        self.record = self.folder.with_name(f"{images.name}.json")
        self.of, self.store = images, store
        self.content = {"layout": images.layout, **store.images}

    def check(self) -> None:
        """StoreError if the folder holds other images, or those of more or fewer prompts."""
        theirs = recorded(self.folder, self.record)
        if theirs is None or theirs == self.content:
            return
        found = differences(theirs, self.content)
        counts = [len(each["prompts"]) for each in (theirs, self.content)]
        found = found or [f"there were {counts[0]} prompts there, and are {counts[1]} here"]
        raise another_run(self.folder, found)

    def write(self) -> bool:
        """Write the folder from the store, unless it is there; whether it was written.

        Raises StoreError where an image is missing, as one that is not finite is.
        """
        assert self.of.layout
        if recorded(self.folder, self.record) is not None:
            return False
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        appear(self.record, json.dumps(self.content, indent=1).encode())
        images = map(self._images, range(len(self.of.prompts)))
        write_layout(self.of.layout, self.folder, self.of.prompts, images)
        return True

    def _images(self, place: int) -> Tensor:
        """[K,3,H,W]."""
        found = [self.store.load((place, copy)) for copy in range(self.of.images)]
        known = [image for image in found if image is not None]
        if len(known) < len(found):
            raise StoreError(
                f"{self.folder} is not written: {self.store.folder} has no readable image of "
                f"prompt {place} ({self.of.prompts.prompts[place]!r}). If it was not finite, "
                "another `model.dtype` may help; if its file is broken, delete that. Then run this "
                "again."
            )
        return torch.stack(known)
