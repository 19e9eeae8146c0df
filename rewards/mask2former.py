"""GenEval's detector without mmdet: a Mask2Former of transformers, with post-processing of mmdet's.

Legend: B images of H x W pixels; Q queries, C = 80 classes, K instances of one image.
The weights are Meta's own, which transformers serves; the official script uses mmdet's retraining
of the same architecture. Scores differ, most of all about the 0.9 that counting asks for, so what
is measured with this detector is to be called "GenEval (HF detector)". See docs/rewards/geneval.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor
from torch.nn.functional import interpolate, pad

from flowalign.backbone.placement import Placement
from flowalign.rewards import weights
from flowalign.rewards.clip_colors import ClipColors, OpenClipWeights
from flowalign.rewards.geneval_judge import NAMES
from flowalign.rewards.options import Count, Device, OpenClip, Pretrained
from flowalign.system.images import to_uint8
from flowalign.types import Detections

MODEL = "facebook/mask2former-swin-small-coco-instance"
SIZE = (800, 1333)  # of the official detector's test pipeline
DIVISOR = 32  # images are padded to a multiple of it, at the right and the bottom
TOP = 100  # (query, class) pairs that become instances, as in mmdet


def _check_size(size: Sequence[int]) -> Sequence[int]:
    if len(size) != 2 or not DIVISOR <= size[0] <= size[1]:
        raise ValueError(f"give a shortest and a longest edge, such as {list(SIZE)}")
    return size


class Mask2Former:
    """Detector of GenEval's 80 classes; colours are asked of an open_clip model, box by box.

    model, revision: a Hub id or folder of a Mask2Former for COCO instances, with 80 labels, which
        are taken by index (`geneval_names`).
    size: shortest edge that an image is resized to, and longest edge that it may get, in pixels.
        (The model's own preprocessor says 384 x 384, with which small objects are missed.)
    clip, clip_pretrained, clip_quick_gelu: who names colours, see `ClipColors`.
    dtype: of the network, "float32", "bfloat16" or "float16"; what follows it is float32. CLIP is
        always float32. batch_size: images a forward pass; it changes no result beyond rounding.
    device: None = the GPU if there is one. offload: the weights of both models lie on the CPU
        between calls of the reward.
    `name` says which models answered. Raises ValueError for a model that is no Mask2Former with 80
    labels or lacks weights, OSError where there is nothing to load, ImportError without scipy
    (which transformers needs for this model) or open_clip.
    """

    def __init__(
        self,
        model: Pretrained = MODEL,
        *,
        revision: str | None = None,
        size: Annotated[Sequence[int], AfterValidator(_check_size)] = SIZE,
        clip: OpenClip = "ViT-L-14",
        clip_pretrained: OpenClipWeights = "openai",
        clip_quick_gelu: bool | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        batch_size: Count = 8,
        device: Device = None,
        offload: bool = False,
    ) -> None:
        self.batch_size, self.dtype = batch_size, getattr(torch, dtype)
        self.shortest, self.longest = size
        self.colors = ClipColors(
            clip, clip_pretrained, quick_gelu=clip_quick_gelu, device=device, offload=offload
        )
        folder = str(Path(model).expanduser())
        self.processor, self.network = _load(folder, revision, self.dtype)
        self.placement = Placement(self.network, device, offload)
        self.placements = (self.placement, self.colors.placement)
        commit = getattr(self.network.config, "_commit_hash", None) or revision
        at = f"@{commit}" if commit else ""
        self.name = (
            f"mask2former {model}{at} at {self.shortest}/{self.longest} px, {dtype}; "
            f"colours by {self.colors.name}"
        )

    @staticmethod
    def packages(**options: Any) -> tuple[str, ...]:
        """What it imports; scipy by way of transformers."""
        return ("open_clip", "scipy")

    def __call__(self, images: Tensor) -> list[Detections]:
        """images [B,3,H,W] in [0,1] -> B Detections, raw: K boxes, most with a score near 0.

        Images pass as 8-bit pixels, as files would. Raises ValueError for pixels that are NaN or
        infinite, and where the network's answer is.
        """
        detections = []
        for start in range(0, len(images), self.batch_size):
            batch = images[start : start + self.batch_size]
            detections += self._detect([to_uint8(image) for image in batch])
        return detections

    @torch.no_grad()
    def _detect(self, pictures: list[np.ndarray]) -> list[Detections]:
        """One Detections a picture; the pictures, uint8 [H,W,3], are of one size."""
        inputs = self.processor(
            pictures,
            size={"shortest_edge": self.shortest, "longest_edge": self.longest},
            size_divisor=0,  # the processor would stretch to a multiple; mmdet and Meta pad
            return_tensors="pt",
            input_data_format="channels_last",
        )["pixel_values"]
        height, width = inputs.shape[-2:]
        padded = pad(inputs, (0, -width % DIVISOR, 0, -height % DIVISOR))  # 0 = the mean colour
        frame = Frame(padded.shape[-2:], (height, width), pictures[0].shape[:2])
        with self.placement:
            output = self.network(pixel_values=padded.to(self.placement.device, self.dtype))
        logits = zip(output.class_queries_logits, output.masks_queries_logits, strict=True)
        return [
            self._named(picture, instances(classes, masks, frame))
            for picture, (classes, masks) in zip(pictures, logits, strict=True)
        ]

    def _named(self, pixels: np.ndarray, objects: Instances) -> Detections:
        """Instances by GenEval's class names, with the callable that tells their colours."""
        boxes: dict[str, list[list[float]]] = {}
        masks: dict[str, list[np.ndarray]] = {}
        for row, label in enumerate(objects.labels):
            box = [*map(float, objects.boxes[row]), float(objects.scores[row])]
            boxes.setdefault(NAMES[label], []).append(box)
            masks.setdefault(NAMES[label], []).append(objects.masks[row])
        return Detections(boxes, self.colors.of_boxes(pixels, boxes, masks))


@dataclass(frozen=True)
class Frame:
    """(height, width) of what the network saw, of the image in it (upper left), of the image."""

    padded: Sequence[int]
    resized: Sequence[int]
    image: Sequence[int]


@dataclass(frozen=True)
class Instances:
    """K objects of one image, by class: labels [K] in [0,C), scores [K] in [0,1], boxes [K,4] as
    x1, y1, x2, y2 in pixels, right and bottom exclusive, masks K x bool [y2 - y1, x2 - x1]."""

    labels: np.ndarray
    scores: np.ndarray
    boxes: np.ndarray
    masks: list[np.ndarray]


def instances(class_logits: Tensor, mask_logits: Tensor, frame: Frame, top: int = TOP) -> Instances:
    """The objects that class logits [Q,C+1] and mask logits [Q,h,w] of one image stand for.

    The `top` (query, class) pairs of the highest class probability, the last class meaning "no
    object"; a query may stand for several. Mask: its logits enlarged to the padded size, freed of
    the padding, brought to the image's size (both bilinear), above 0. Score: class probability
    times the mean of the mask's probabilities over its own pixels. Box: tight, with right and
    bottom one past the last pixel. Pairs with an empty mask are left out (mmdet gives them 0).
    As mmdet 2.x does it (Mask2FormerHead.simple_test, MaskFormerFusionHead.instance_postprocess,
    mask2bbox). Raises ValueError for logits that are NaN or infinite.
    """
    class_logits, mask_logits = class_logits.float(), mask_logits.float()
    if not bool(class_logits.isfinite().all() and mask_logits.isfinite().all()):
        raise ValueError(
            "the detector answered NaN or infinity. If `dtype` is float16, use bfloat16 or float32."
        )
    chance = class_logits.softmax(-1)[:, :-1]
    pairs = chance.flatten().topk(min(top, chance.numel())).indices
    queries, labels = pairs // chance.shape[1], pairs % chance.shape[1]
    used, row = queries.unique(return_inverse=True)
    height, width = frame.resized
    masks = interpolate(mask_logits[used][None], tuple(frame.padded), mode="bilinear")
    masks = interpolate(masks[..., :height, :width], tuple(frame.image), mode="bilinear")[0]
    inside = masks > 0
    certainty = (masks.sigmoid() * inside).sum((1, 2)) / inside.sum((1, 2)).clamp(min=1)
    scores = chance[queries, labels] * certainty[row]
    labels, scores, row = (tensor.cpu().numpy() for tensor in (labels, scores, row))
    boxes, crops = tight(inside)
    kept = [k for k in np.lexsort((row, labels)) if crops[row[k]].size]
    return Instances(labels[kept], scores[kept], boxes[row[kept]], [crops[row[k]] for k in kept])


def tight(inside: Tensor) -> tuple[np.ndarray, list[np.ndarray]]:
    """Boxes [N,4] of masks [N,H,W], right and bottom exclusive (all 0 of an empty mask), and the
    masks within them."""
    columns, rows = inside.any(1).cpu().numpy(), inside.any(2).cpu().numpy()
    masks, filled = inside.cpu().numpy(), columns.any(1)
    x1, y1 = columns.argmax(1), rows.argmax(1)
    x2 = (columns.shape[1] - columns[:, ::-1].argmax(1)) * filled
    y2 = (rows.shape[1] - rows[:, ::-1].argmax(1)) * filled
    boxes = np.stack([x1, y1, x2, y2], 1)
    crops = [
        mask[top:bottom, left:right].copy()
        for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True)
    ]
    return boxes, crops


def _load(model: str, revision: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """(image processor, network) of a Hub id or folder, its labels and weights checked."""
    from transformers import AutoConfig, Mask2FormerForUniversalSegmentation

    try:  # one set of pixels, whether torchvision is installed or not
        from transformers.models.mask2former import Mask2FormerImageProcessorPil as Processor
    except ImportError:  # transformers 4: the one without "Fast" is numpy's
        from transformers import Mask2FormerImageProcessor as Processor

    at: dict[str, Any] = {"revision": revision} if revision else {}
    config: Any = AutoConfig.from_pretrained(model, **at)
    if config.model_type != "mask2former" or config.num_labels != len(NAMES):
        raise ValueError(
            f"`model` {model!r} is a {config.model_type} with {config.num_labels} labels; GenEval "
            f"needs a mask2former with the {len(NAMES)} things of COCO, such as {MODEL}."
        )
    network, report = weights.from_safetensors(
        Mask2FormerForUniversalSegmentation,
        model,
        config=config,
        dtype=dtype,
        output_loading_info=True,
        **at,
    )
    missing = sorted(dict(network.named_parameters()).keys() & set(report["missing_keys"]))
    if missing:
        raise ValueError(f"`model` {model!r} lacks {len(missing)} weights, such as {missing[0]}.")
    return Processor.from_pretrained(model, **at), network.requires_grad_(False).eval()
