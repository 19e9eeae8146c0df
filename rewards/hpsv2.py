"""HPS v2 (2306.09341): how much people would prefer an image for its prompt; v2.1 by default."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from torch import Tensor

from flowalign.rewards import clip
from flowalign.rewards.base import VIT_H, Cost
from flowalign.rewards.options import Count, Device, Divisor, OpenClip, TextCache
from flowalign.rewards.preference import Preference
from flowalign.rewards.weights import WeightsFile, fit_weights, read_weights
from flowalign.system.packages import require

FILES = {"v2.1": "xswu/HPSv2/HPS_v2.1_compressed.pt", "v2.0": "xswu/HPSv2/HPS_v2_compressed.pt"}


class HPSv2(Preference):
    """Reward: cos(text, image) / normalizer of a CLIP ViT-H/14 that was tuned to preferences.

    Source: tgxs002/HPSv2, hpsv2/img_score.py, whose default version is v2.0. Like there: the long
    side becomes 224 pixels, black bars fill the square, and the scale of the logits is left out.
    Unlike there: float32 throughout, where the original runs under CUDA's autocast.
    version: "v2.1" or "v2.0". weights: the path of its file (or owner/repository/file on the Hub),
        if not the published one of that version. architecture: open_clip's name of the model.
    normalizer: 1, the value is the cosine, about .2 to .35. (Tables may print 100 * cosine.)
    offload: the weights lie on the CPU between calls. text_cache: prompts whose vectors are kept.
    Raises ImportError without open_clip, OSError without the file, ValueError where it is another.
    """

    name = "hpsv2"
    licence = "Apache-2.0"
    cost, downloads = Cost(VIT_H), {"xswu/HPSv2": 3.9}

    def __init__(
        self,
        version: Literal["v2.1", "v2.0"] = "v2.1",
        weights: WeightsFile | None = None,
        architecture: OpenClip = "ViT-H-14",
        *,
        normalizer: Divisor = 1.0,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
        text_cache: TextCache = clip.TEXT_CACHE,
    ) -> None:
        computing = {"device": device, "batch_size": batch_size, "offload": offload}
        file = weights or FILES[version]
        self.clip = OpenClipTowers(architecture, file, **computing, text_cache=text_cache)
        super().__init__(normalizer, model=self.clip.name)

    @classmethod
    def packages(cls, **options: Any) -> tuple[str, ...]:
        """What it imports."""
        return ("open_clip",)


class OpenClipTowers(clip.TwoTowers):
    """An open_clip model from a file of its weights; images are fitted with bars, not cropped.

    architecture: a name that open_clip knows. file: `flowalign.rewards.weights.read_weights`.
    computing: device, batch_size, offload and text_cache, as in `TwoTowers`.
    """

    def __init__(self, architecture: str, file: str, **computing: Any) -> None:
        open_clip = require("open_clip", "reward hpsv2 needs")
        self.name = f"open_clip {open_clip.__version__} {architecture}, {file}"
        config = open_clip.get_model_config(architecture)  # None for a name that it does not know
        if config is None:
            raise ValueError(f"open_clip has no architecture {architecture!r}; HPS v2 is ViT-H-14.")
        weights = read_weights(file)  # before the large model, as the likelier to be missing
        self.model = open_clip.CLIP(**config)
        fit_weights(self.model, weights, file)
        self.tokenizer = open_clip.get_tokenizer(architecture)
        self.size = int(config["vision_cfg"]["image_size"])
        self.pixels = clip.clip_processor(self.size)
        super().__init__(self.model, config["embed_dim"], **computing)

    def _encode_images(self, pictures: list[np.ndarray]) -> Tensor:
        squares = [clip.letterbox(picture, self.size) for picture in pictures]
        return self.model.encode_image(clip.pixel_values(self.pixels, squares).to(self.device))

    def _encode_texts(self, prompts: list[str]) -> Tensor:
        return self.model.encode_text(self.tokenizer(prompts).to(self.device))
