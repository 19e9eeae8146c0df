"""What the built-in rewards cost an image, and what they download: the one table of it.

Operations are 2 x weights x tokens of a forward pass at the reward's own image size; nothing here
was measured on a GPU. Seconds of OCR are docs/rewards/ocr.md's, on one thread of a CPU. Sizes are
those of the files, from parameter counts in the dtype that is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowalign import rewards


@dataclass(frozen=True)
class Cost:
    """flops of an image on the device; seconds of an image on one CPU thread; files {name: GB}."""

    flops: float = 0.0
    seconds: float = 0.0
    files: Mapping[str, float] | None = None


VIT_H = 2 * 632e6 * 257  # CLIP ViT-H/14 at 224 pixels
VIT_L = 2 * 304e6 * 257  # CLIP ViT-L/14 at 224 pixels
# Swin-S: 313 G multiply-adds at 800 pixels (arXiv 2112.01527, table 1), and a crop or two of CLIP
MASK2FORMER = 2 * 313e9 + 2 * VIT_L
COSTS = {
    "aesthetic": Cost(VIT_L, files={"openai/clip-vit-large-patch14": 1.7}),
    "clipscore": Cost(VIT_L, files={"openai/clip-vit-large-patch14": 1.7}),
    "hpsv2": Cost(VIT_H, files={"xswu/HPSv2": 3.9}),
    "imagereward": Cost(VIT_L, files={"THUDM/ImageReward": 1.8}),
    "ocr": Cost(seconds=0.306),
    "pickscore": Cost(VIT_H, files={"yuvalkirstain/PickScore_v1": 3.9}),
    "geneval": Cost(
        MASK2FORMER,
        files={
            "facebook/mask2former-swin-small-coco-instance": 0.28,
            "open_clip ViT-L-14 (openai)": 0.93,
        },
    ),
}
FREE = Cost()  # the tiny models ship with the package and cost next to nothing


def of_reward(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Cost | None]]:
    """(name, cost) of every reward that it is made of; None where the cost is not known."""
    for part, given in rewards.leaves(name, options):
        own = (given.get("model"), given.get("detector"))
        if "tiny" in own or (part == "geneval" and own == (None, None)):
            yield part, FREE
        elif part == "ocr" and given.get("engine", "rapidocr") == "rapidocr":
            side = 736 if given.get("limit_type", "min") == "min" else given["limit_side_len"]
            scale = min(1.0, (side / 736) ** 2)  # detection dominates, and grows with the pixels
            yield part, Cost(seconds=COSTS["ocr"].seconds * scale / given.get("workers", 1))
        else:
            known = all(given.get(key) is None for key in ("model", "clip", "engine"))
            yield part, COSTS.get(part) if known or part == "geneval" else None
