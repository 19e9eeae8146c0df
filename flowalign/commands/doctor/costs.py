"""What the built-in rewards cost an image, and what they download: the one table of it.

Operations are 2 x weights x tokens of a forward pass at the reward's own image size; nothing here
was measured on a GPU. Seconds of OCR are docs/rewards/ocr.md's, on one thread of a CPU. Sizes are
those of the files, from parameter counts in the dtype that is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowalign import rewards
from flowalign.config.schema import RewardConfig


@dataclass(frozen=True)
class Cost:
    """flops of an image on the device, in float32; seconds of an image on one CPU thread; files
    {name: GB}, which are downloaded."""

    flops: float = 0.0
    seconds: float = 0.0
    files: Mapping[str, float] = field(default_factory=dict)


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
OWN = {"model", "weights", "architecture", "limit_side_len", "limit_type", "rec_width", "upscale"}
WITHOUT_FILES = {"diversity", "ocr", "remote", "vlm"}  # PaddleOCR's are a few MB
FREE = Cost()  # the tiny models ship with the package and cost next to nothing


def files_of(reward: RewardConfig) -> Iterator[tuple[str, Mapping[str, float] | None]]:
    """(name, {file: GB}) of every reward that it is made of; None where they are not known.

    A reward of the user's own has files only if its options name a model.
    """
    for name, options in rewards.leaves(reward.name, reward.options, imports=False):
        cost = _cost(name, options)
        own = name not in rewards.REWARDS and not OWN & options.keys()
        yield name, {} if own or name in WITHOUT_FILES else cost and cost.files


def of_reward(reward: RewardConfig) -> Iterator[tuple[str, Cost | None]]:
    """(name, cost) of every reward that it is made of; None where the cost is not known."""
    for name, options in rewards.leaves(reward.name, reward.options, imports=False):
        yield name, _cost(name, options)


def _cost(name: str, options: Mapping[str, Any]) -> Cost | None:
    if "tiny" in (options.get("model"), options.get("detector", "tiny" * (name == "geneval"))):
        return FREE
    if OWN & options.keys():  # another model than the table's, or another image size
        return None
    cost = COSTS.get(name)
    return cost and replace(cost, seconds=cost.seconds / options.get("workers", 1))
