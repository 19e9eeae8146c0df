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

GenEval's is in `flowalign.eval.geneval_folder`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowalign.pictures import png
from flowalign.types import PromptBatch

LONGEST = 255  # bytes of a file's name


def write_layout(
    name: str, folder: str | Path, prompts: PromptBatch, images: Sequence[Tensor]
) -> list[Path]:
    """Write the images of P prompts, each [K,3,H,W] in [0,1]; returns the files, in order.

    name: a key of LAYOUTS. dpg_bench takes the name of an item from the metadata `item_id`.
    Raises ValueError, before anything is written, for a name that the official scripts would read
    otherwise, for images that do not fit, and for a folder that holds files already.
    """
    if name not in LAYOUTS:
        raise ValueError(f"no layout {name!r}; possible: {', '.join(LAYOUTS)}. Use one of them.")
    if len(prompts) != len(images):
        raise ValueError(f"{len(prompts)} prompts, but images of {len(images)}; give one each.")
    if len(counts := {len(each) for each in images}) > 1:
        raise ValueError(
            f"the prompts have {sorted(counts)} images. The official scores are means over files, "
            "so give each as many."
        )
    files = LAYOUTS[name](prompts, images)
    twice = [path for path, count in Counter(path for path, _ in files).items() if count > 1]
    if twice:
        raise ValueError(f"two prompts would be written to {twice[0]!r}. Give each its own name.")
    for path, _ in files:
        if len(Path(path).name.encode()) > LONGEST:
            raise ValueError(
                f"the name {path[:60]!r}... has more than {LONGEST} bytes, which a file cannot "
                "have. Shorten the prompt; the official script cannot write it, either."
            )
    target = Path(folder) / Path(files[0][0]).parent if files else Path(folder)
    if target.is_dir() and any(target.iterdir()):
        raise ValueError(
            f"{target} is not empty, and the official script reads all that is there. Give a new "
            "folder."
        )
    target.mkdir(parents=True, exist_ok=True)
    written = [Path(folder) / path for path, _ in files]
    for path, (_, image) in zip(written, files, strict=True):
        path.write_bytes(png(image))
    return written


def _t2i_compbench(prompts: PromptBatch, images: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    for prompt in prompts.prompts:
        for sign in ("_", "/", "\0"):
            if sign in prompt:
                raise ValueError(
                    f"the prompt {prompt!r} has a {sign!r}, which T2I-CompBench's names cannot "
                    "hold. Take it out."
                )
    pairs = [(p, image) for p, own in zip(prompts.prompts, images, strict=True) for image in own]
    return [(f"samples/{prompt}_{i:06}.png", image) for i, (prompt, image) in enumerate(pairs)]


def _dpg_bench(prompts: PromptBatch, images: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    found = []
    for metadata, own in zip(prompts.metadata, images, strict=True):
        item = metadata.get("item_id")
        if not isinstance(item, str) or not item or set(item) & set("./\0"):
            raise ValueError(
                f"the metadata's item_id is {item!r}; want the name of the prompt's file in "
                "DPG-Bench without .txt, which has neither '.' nor '/'."
            )
        count, _, height, width = own.shape
        if count not in (1, 4) or height != width:
            raise ValueError(
                f"{item}: {count} images of {height}x{width}. DPG-Bench cuts squares out of a 2x2 "
                "grid: give 4 square images a prompt, or 1 (--pic-num 1)."
            )
        rows = [torch.cat(list(pair), dim=2) for pair in own.split(2)]
        found.append((f"{item}.png", torch.cat(rows, dim=1)))
    return found


LAYOUTS: Mapping[str, Callable[[PromptBatch, Sequence[Tensor]], list[tuple[str, Tensor]]]] = {
    "t2i_compbench": _t2i_compbench,
    "dpg_bench": _dpg_bench,
}
