"""Official folders of images: what is written is read as the official scripts read it."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowalign.eval.layouts import LAYOUTS
from flowalign.types import PromptBatch

WORDS = ["a red apple. And a cup", "un café"]
BATCH = PromptBatch(WORDS, ["x"] * 2, [{"item_id": "COCO9"}, {"item_id": "partiprompts1"}])


def pictures(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randint(256, (count, 3, 8, 8)) / 255 for _ in WORDS]


def write(layout: str, folder: Path, batch: PromptBatch, images: list[Tensor]) -> None:
    for index, samples in enumerate(images):
        LAYOUTS[layout].write(folder, batch, index, samples)


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def test_t2i_compbench_reads_prompt_and_order_from_the_names(tmp_path: Path):
    images = pictures(3)
    write("t2i_compbench", tmp_path, BATCH, images)
    names = os.listdir(tmp_path / "samples")  # from here on as BLIP_vqa.py does
    names.sort(key=lambda name: int(name.split("_")[-1].split(".")[0]))
    assert [name.split("_")[0] for name in names] == [WORDS[0]] * 3 + [WORDS[1]] * 3
    assert names[4] == "un café_000004.png"
    for name, expected in zip(names, torch.cat(images), strict=True):
        assert torch.equal(pixels(Image.open(tmp_path / "samples" / name)), expected)


@pytest.mark.parametrize("count", [1, 4])
def test_dpg_bench_cuts_the_images_out_of_a_grid_in_order(tmp_path: Path, count: int):
    images, side = pictures(count), 8
    write("dpg_bench", tmp_path, BATCH, images)
    corners = [(0, 0), (side, 0), (0, side), (side, side)]  # x, y: as compute_dpg_bench.py has them
    assert {name.split(".")[0] for name in os.listdir(tmp_path)} == {"COCO9", "partiprompts1"}
    for item, samples in zip(("COCO9", "partiprompts1"), images, strict=True):
        with Image.open(tmp_path / f"{item}.png") as grid:
            for (x, y), expected in zip(corners, samples, strict=False):
                assert torch.equal(pixels(grid.crop((x, y, x + side, y + side))), expected)


def named(prompts: list[str], *items: object) -> PromptBatch:
    return PromptBatch(prompts, ["x"] * 2, [{"item_id": item} for item in items or ("a", "b")])


@pytest.mark.parametrize(
    ("layout", "batch", "shape", "said"),
    [
        ("geneval", BATCH, (1, 8, 8), "prompt 0: metadata .* has no text `tag`"),
        ("dpg_bench", BATCH, (2, 8, 8), "2 images of 8x8 per prompt"),
        ("dpg_bench", BATCH, (4, 8, 9), "4 images of 8x9 per prompt"),
        ("dpg_bench", named(WORDS, "a.b", "c"), (1, 8, 8), "item_id is 'a.b'"),
        ("dpg_bench", named(WORDS, None, "c"), (1, 8, 8), "item_id is None"),
        ("dpg_bench", named(WORDS, "a", "a"), (1, 8, 8), "two prompts have the item_id 'a'"),
        ("t2i_compbench", named(["a_b", "c"]), (1, 8, 8), "'a_b' has a '_'"),
        ("t2i_compbench", named(["a/b", "c"]), (1, 8, 8), "'a/b' has a '/'"),
        ("t2i_compbench", named(["é" * 130, "c"]), (1, 8, 8), "more than 255 bytes"),
    ],
)
def test_what_the_official_scripts_would_misread_is_refused(
    layout: str, batch: PromptBatch, shape: tuple[int, int, int], said: str
):
    with pytest.raises(ValueError, match=said):
        LAYOUTS[layout].check(batch, shape)
