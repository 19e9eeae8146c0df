"""Rewards with one CLIP: preference scores, CLIPScore, the aesthetic predictor; and with features
of any encoder: similarity to images that you have, and diversity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from flowalign.rewards.base import CLIP_L, KEPT_H, KEPT_L, VIT_H, VIT_L, Cost, RewardBase
from flowalign.rewards.clip import (
    CLIP_LARGE,
    Clip,
    ClipModel,
    ImageEncoder,
    TwoTowers,
    clip_processor,
    float_values,
    image_encoder,
    letterbox,
)
from flowalign.rewards.options import Count, Device, Divisor, OpenClip, hub_files, hub_texts
from flowalign.rewards.weights import WeightsFile, fit_weights, hub_file, read_weights
from flowalign.system.images import image_files, read_image, stacked
from flowalign.system.packages import require
from flowalign.types import Metadata, Scores

PICKSCORE = "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HPS = "xswu/HPSv2/HPS_v2.1_compressed.pt"
AESTHETIC_HEAD = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"


class Preference(RewardBase):
    """Base of rewards with value = raw / normalizer.

    normalizer: sets the scale of the value only. parts: "raw", the score before division.
    device, batch_size, offload: where its networks compute, images a forward pass, and whether the
    weights lie on the CPU between calls. source: what else the scores depend on.
    """

    clip: TwoTowers
    differentiable = True

    def __init__(self, normalizer: float, **source: str) -> None:
        self.normalizer = normalizer
        self.settings = {**source, "normalizer": normalizer}

    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """The published score [B], on the CPU, of images [B,3,H,W] in [0,1] and their prompts."""
        return self.clip.scale * self.clip.cosine(images, prompts)

    def resize_factor(self, height: int, width: int) -> float:
        pixels = getattr(self, "pixels", None) or self.clip.pixels
        return (pixels.size.get("shortest_edge") or min(height, width)) / min(height, width)

    def with_gradient(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        return self._raw_with_gradient(images, prompts) / self.normalizer

    def _raw_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """`raw` [B] of images with a gradient."""
        vectors, texts = self.clip.with_gradient(images), self.clip.text_features(prompts)
        return self.clip.scale * (vectors * texts).sum(-1)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU.

        Raises ValueError for pixels that are NaN or infinite (`flowalign.rewards.score` masks).
        """
        raw = self.raw(images, prompts)
        return Scores.of(raw / self.normalizer, raw=raw)


class ClipScore(Preference):
    """CLIPScore (2104.08718): exp(logit_scale) * cos(text, image) / normalizer, about 0 to 1.

    The published model has exp(logit_scale) = 100, so raw is 100 * cos: transformers'
    `logits_per_image`, as in Flow-GRPO (flow_grpo/clip_scorer.py). The paper's CLIPScore is
    2.5 * max(cos, 0) of ViT-B/32, which is another number. Flow-GRPO resizes float pixels
    bilinearly; here they are resized bicubically at 8 bits, as CLIP was trained.
    model: None = the published one. normalizer: None = Flow-GRPO's, 30; raw is about 15 to 40.
    """

    name = "clipscore"
    cost = Cost(VIT_L, kept=KEPT_L)
    downloads = CLIP_L
    # its processor, the normalizer
    published: tuple[str, str | None, float] = (CLIP_LARGE, None, 30.0)
    reads = {"model": (CLIP_LARGE, hub_files)}

    def __init__(
        self,
        model: ClipModel | None = None,
        *,
        normalizer: Divisor | None = None,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
    ) -> None:
        published, processor, usual = self.published
        model = model or published
        if not model.startswith(published):
            processor = model
        self.clip = Clip(model, processor, device, batch_size, offload)
        super().__init__(normalizer or usual, model=model)


class PickScore(ClipScore):
    """PickScore (2305.01569): exp(logit_scale) * cos(text, image) / normalizer, about 0 to 1.

    The published model takes its image processor and tokenizer from another; any other has its own.
    normalizer: None = Flow-GRPO's, 26 (pickscore_scorer.py), about .83 there. Papers print raw.
    """

    name = "pickscore"
    cost = Cost(VIT_H, kept=KEPT_H)
    downloads = {PICKSCORE: 3.9}
    published = PICKSCORE, PICKSCORE_PROCESSOR, 26.0
    reads = {"model": (PICKSCORE, hub_files), "its own": (PICKSCORE_PROCESSOR, hub_texts)}


class HPSv2(Preference):
    """Reward: cos(text, image) / normalizer of a CLIP ViT-H/14 that was tuned to preferences.

    Source: tgxs002/HPSv2, hpsv2/img_score.py, whose default version is v2.0. Like there: the long
    side becomes 224 pixels, black bars fill the square, and the scale of the logits is left out.
    Unlike there: float32 throughout, where the original runs under CUDA's autocast.
    weights: a path, or owner/repository/file on the Hub, by default v2.1; v2.0 is
        xswu/HPSv2/HPS_v2_compressed.pt. architecture: open_clip's name of the model.
    normalizer: 1, the value is the cosine, about .2 to .35. (Tables may print 100 * cosine.)
    Raises ImportError without open_clip, OSError without the file, ValueError where it is another.
    """

    name = "hpsv2"
    licence = "Apache-2.0"
    imports = ("open_clip",)
    cost = Cost(VIT_H, kept=KEPT_H)
    downloads = {"xswu/HPSv2": 3.9}
    reads = {"weights": (HPS, hub_file)}

    def __init__(
        self,
        weights: WeightsFile = HPS,
        architecture: OpenClip = "ViT-H-14",
        *,
        normalizer: Divisor = 1.0,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
    ) -> None:
        self.clip = OpenClipTowers(architecture, weights, device, batch_size, offload)
        super().__init__(normalizer, model=self.clip.name)


class OpenClipTowers(TwoTowers):
    """An open_clip model from a file of its weights; images are fitted with bars, not cropped.

    architecture: a name that open_clip knows. The rest is as for `read_weights` and `TwoTowers`.
    """

    def __init__(self, architecture: str, file: str, *computing: Any) -> None:
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
        self.pixels = clip_processor(self.size)
        super().__init__(self.model, *computing)

    def _encode_images(self, pictures: list[np.ndarray]) -> Tensor:
        return super()._encode_images([letterbox(picture, self.size) for picture in pictures])

    def _float_values(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        left, top = (max(height, width) - width) // 2, (max(height, width) - height) // 2
        bars = (left, max(height, width) - width - left, top, max(height, width) - height - top)
        return float_values(self.pixels, pad(images, bars))

    def _encode(self, values: Tensor) -> Tensor:
        return self.model.encode_image(values)

    def _encode_texts(self, prompts: list[str]) -> Tensor:
        return self.model.encode_text(self.tokenizer(prompts).to(self.device))


class Aesthetic(Preference):
    """LAION's aesthetic predictor, v2: a linear head on CLIP's unit image vector, / normalizer.

    Source: christophschuhmann/improved-aesthetic-predictor, as Flow-GRPO uses it
    (flow_grpo/aesthetic_scorer.py), which leaves the value undivided. The prompt is not used.
    head: its file, .pth or .safetensors, or owner/repository/file on the Hub. The default is TRL's
        copy of sac+logos+ava1-l14-linearMSE.pth (its checksum: docs/rewards/preference.md).
    normalizer: 10, the end of the scale that people rated on; raw is about 1 to 10.
    Raises OSError where a file cannot be had, ValueError where it holds no head for this model.
    """

    name = "aesthetic"
    cost = Cost(VIT_L, kept=KEPT_L)
    downloads = CLIP_L
    reads = {"model": (CLIP_LARGE, hub_files), "head": (AESTHETIC_HEAD, hub_file)}

    def __init__(
        self,
        model: ClipModel = CLIP_LARGE,
        head: WeightsFile = AESTHETIC_HEAD,
        *,
        normalizer: Divisor = 10.0,
        device: Device = None,
        batch_size: Count = 64,
        offload: bool = False,
    ) -> None:
        weights = read_weights(head)  # before the large model, as the likelier to be wrong
        clip = Clip(model, None, device, batch_size, offload)
        width = clip.model.visual_projection.out_features
        self.clip = clip
        self.head = Head(width).requires_grad_(False).eval()
        fit_weights(self.head, weights, head)
        super().__init__(normalizer, model=model, head=head)

    @torch.no_grad()
    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """The rating [B]; the head has a million weights and stays on the CPU."""
        return self.head(self.clip.image_features(images).cpu())

    def _raw_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.head(self.clip.with_gradient(images).cpu())


class Head(nn.Module):
    """width -> 1024 -> 128 -> 64 -> 16 -> 1, linear layers only: [B,width] -> [B].

    Source: christophschuhmann/improved-aesthetic-predictor (MLP). ImageReward's is the same.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # Dropout does nothing here, but it counts in the weights' names: layers.{0,2,4,6,7}.
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors [B,width] -> [B]."""
        return self.layers(vectors).squeeze(-1)


def vendi(vectors: Tensor) -> float:
    """The Vendi score of unit vectors [n,D]: exp(-sum of e ln e) over the eigenvalues e of K / n,
    where K are their cosines (Friedman and Dieng 2022, arXiv 2210.02410, with the cosine kernel).

    How many different images there are: 1 for equal ones, n for orthogonal ones.
    """
    vectors = vectors.double()
    eigenvalues = torch.linalg.eigvalsh(vectors @ vectors.T / len(vectors))
    return float(torch.special.entr(eigenvalues.clamp(min=0)).sum().exp())  # rounding: -1e-17


def _with_images(folder: str) -> str:
    if not image_files(Path(folder).expanduser()):
        raise ValueError(f"there are no images in a folder {folder}")
    return folder


class Encoded(RewardBase):
    """Base of rewards that compare image features. model: a CLIP ("tiny", a folder, a Hub id), a
    DINOv2, or package.module:function, [B,3,H,W] -> [B,D]."""

    downloads = CLIP_L
    reads = {"model": (CLIP_LARGE, hub_files)}

    def __init__(self, model: ImageEncoder = CLIP_LARGE, *, device: Device = None) -> None:
        name, self.features = image_encoder(model, device)
        self.settings = {"model": name}

    def vectors(self, images: Tensor) -> Tensor:
        """Unit vectors [B,D], float32, on the CPU, of images [B,3,H,W] in [0,1]."""
        return normalize(self.features(images).float().cpu(), dim=1)


class Similarity(Encoded):
    """Reward: mean cosine of an image to the images of a folder, such as those of a brand's style;
    0 where it is negative.

    With a CLIP it is DreamBooth's CLIP-I, with a DINO its DINO score (2208.12242, section 4.1). The
    prompt is ignored, so alone this reward favours the image nearest to all of them. `product` with
    another reward asks for both.
    images: a folder; subfolders count. Each image passes through the encoder at its own size.
    """

    name = "similarity"
    cost = Cost(VIT_L)

    def __init__(
        self,
        images: Annotated[str, AfterValidator(_with_images)],
        *,
        model: ImageEncoder = CLIP_LARGE,
        device: Device = None,
    ) -> None:
        super().__init__(model, device=device)
        files = image_files(Path(images).expanduser())
        vectors = [self.vectors(stacked(read_image(file))) for file in files]
        self.center = torch.cat(vectors).mean(0)  # the mean cosine is the product with it
        self.settings = {"images": images, "count": len(files), **self.settings}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return Scores.of((self.vectors(images) @ self.center).clamp(min=0))


class Diversity(Encoded):
    """Groupwise reward in [0,2]: 1 - mean cosine of an image to the others of its prompt.

    The cosine is of image features. The mean over the images of a prompt is their mean pairwise
    distance; the part "vendi" is their Vendi score, the same for all of them.
    An image that has no other of its prompt is invalid. Use it against collapse, as a small part of
    a `weighted` sum: alone it rewards noise.
    """

    name = "diversity"
    groupwise = True
    columns = ("vendi",)
    averaged = False

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        if len(images) < 2:
            raise ValueError("one image alone has no diversity; sample more copies of a prompt.")
        vectors = self.vectors(images)
        cosines = (vectors @ vectors.T).fill_diagonal_(0)
        distances = 1 - cosines.sum(1) / (len(images) - 1)
        return Scores.of(distances, vendi=torch.full_like(distances, vendi(vectors)))
