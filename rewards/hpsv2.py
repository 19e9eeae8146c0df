"""HPS v2 (2306.09341): how much people would prefer an image for its prompt; v2.1 by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowalign.rewards import preprocess
from flowalign.rewards.lazy import require
from flowalign.rewards.options import check_common
from flowalign.rewards.towers import TEXT_CACHE, TwoTowers
from flowalign.rewards.weights import check_file, fit, locate, read
from flowalign.types import Scores

FILES = {
    "v2.1": "xswu/HPSv2/HPS_v2.1_compressed.pt",
    "v2.0": "xswu/HPSv2/HPS_v2_compressed.pt",
}


class HPSv2:
    """Reward: cos(text, image) / normalizer of a CLIP ViT-H/14 that was tuned to preferences.

    Source: tgxs002/HPSv2, hpsv2/img_score.py, whose default version is v2.0. Like there: the long
    side becomes 224 pixels, black bars fill the square, and the scale of the logits is left out.
    Unlike there: float32 throughout, where the original runs under CUDA's autocast.
    version: "v2.1" or "v2.0". weights: the path of its file (or owner/repository/file on the Hub),
        if not the published one of that version. architecture: open_clip's name of the model.
    normalizer: 1, the value is the cosine. (Tables may print 100 * cosine.)
    offload: the weights lie on the CPU between calls. text_cache: prompts whose vectors are kept.
    parts: "raw", the cosine; about .2 to .35.
    Raises ImportError without open_clip, OSError where the file cannot be had, ValueError where it
    is not that of the model, and for an image with pixels that are no numbers.
    """

    name = "hpsv2"

    def __init__(
        self,
        version: str = "v2.1",
        weights: str | None = None,
        architecture: str = "ViT-H-14",
        *,
        normalizer: float = 1.0,
        device: str | torch.device | None = None,
        batch_size: int = 64,
        offload: bool = False,
        text_cache: int = TEXT_CACHE,
    ) -> None:
        shared: dict[str, Any] = {
            "device": device,
            "batch_size": batch_size,
            "offload": offload,
            "text_cache": text_cache,
        }
        self.check_options(version, weights, architecture, normalizer=normalizer, **shared)
        self.clip = OpenClip(architecture, weights or FILES[version], **shared)
        self.normalizer = normalizer

    @staticmethod
    def check_options(
        version: str = "v2.1",
        weights: str | None = None,
        architecture: str = "ViT-H-14",
        **options: Any,
    ) -> None:
        """Raise ValueError for options that cannot work; loads no model."""
        check_common("reward hpsv2", **options)
        if version not in FILES:
            raise ValueError(f"`version` of reward hpsv2 is {version!r}; use one of {list(FILES)}.")
        if not isinstance(architecture, str) or not architecture:
            raise ValueError(
                f"`architecture` of reward hpsv2 is {architecture!r}; give open_clip's name of a "
                "model, such as ViT-H-14."
            )
        if weights is not None:
            check_file(weights, "weights", FILES[version])

    def describe(self) -> dict[str, Any]:
        """What the scores depend on."""
        return {"name": self.name, "model": self.clip.name, "normalizer": self.normalizer}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU."""
        raw = self.clip.cosine(images, prompts)
        return Scores.of(raw / self.normalizer, raw=raw)


class OpenClip(TwoTowers):
    """An open_clip model from a file of its weights; images are fitted with bars, not cropped.

    architecture: a name that open_clip knows. file: `flowalign.rewards.weights.locate`. The rest is
    as in `TwoTowers`.
    """

    def __init__(
        self,
        architecture: str,
        file: str,
        device: str | torch.device | None = None,
        batch_size: int = 64,
        offload: bool = False,
        text_cache: int = TEXT_CACHE,
    ) -> None:
        open_clip = require("open_clip", "'flowalign[clip]'", "reward hpsv2 needs")
        self.name = f"open_clip {open_clip.__version__} {architecture}, {file}"
        config = open_clip.get_model_config(architecture)
        if config is None:
            raise ValueError(
                f"open_clip knows no architecture {architecture!r}; HPS v2 is a ViT-H-14. "
                "open_clip.list_models() has the names."
            )
        path = locate(file)
        found = read(path)
        self.model = open_clip.CLIP(**config)
        fit(self.model, found, path)
        self.tokenizer = open_clip.get_tokenizer(architecture)
        self.size = int(config["vision_cfg"]["image_size"])
        self.pixels = preprocess.clip_processor(self.size)
        super().__init__(self.model, config["embed_dim"], device, batch_size, offload, text_cache)

    def _see(self, pictures: list[np.ndarray]) -> Tensor:
        squares = [preprocess.letterbox(picture, self.size) for picture in pictures]
        return self.model.encode_image(preprocess.values(self.pixels, squares).to(self.device))

    def _read(self, prompts: list[str]) -> Tensor:
        return self.model.encode_text(self.tokenizer(prompts).to(self.device))
