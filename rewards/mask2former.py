"""GenEval's detector without mmdet: a Mask2Former of transformers, with post-processing of mmdet's.

Legend: B images of H x W pixels; Q queries, C = 80 classes, K instances of one image.
The weights are Meta's own, which transformers serves; the official script uses mmdet's retraining
of the same architecture. Scores differ, most of all about the 0.9 that counting asks for, so what
is measured with this detector is to be called "GenEval (HF detector)". See docs/rewards/geneval.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import interpolate, normalize, pad
from transformers import AutoConfig, Mask2FormerForUniversalSegmentation

from flowalign.backbone.placement import Placement
from flowalign.backbone.pretrained import load_complete
from flowalign.rewards.geneval import MASK2FORMER
from flowalign.rewards.geneval_judge import COLORS, NAMES
from flowalign.rewards.options import Count, Device, OpenClip, Pretrained, located
from flowalign.system.images import to_uint8
from flowalign.system.packages import require
from flowalign.types import Detections

try:  # one set of pixels, whether torchvision is installed or not
    from transformers.models.mask2former import Mask2FormerImageProcessorPil as ImageProcessor
except ImportError:  # transformers 4: the one without "Fast" is numpy's
    from transformers import Mask2FormerImageProcessor as ImageProcessor

DETECTOR_SIZE = (800, 1333)  # of the official detector's test pipeline
DIVISOR = 32  # images are padded to a multiple of it, at the right and the bottom
PROMPT_TEMPLATES = (
    "a photo of a {color} {thing}",
    "a photo of a {color}-colored {thing}",
    "a photo of a {color} object",
)
OUTSIDE_GREY = 0x99  # every channel of #999, the grey that hides what is not the object
TOP = 100  # (query, class) pairs that become instances, as in mmdet


def _check_size(size: Sequence[int]) -> Sequence[int]:
    if len(size) != 2 or not DIVISOR <= size[0] <= size[1]:
        raise ValueError(f"give a shortest and a longest edge, such as {list(DETECTOR_SIZE)}")
    return size


def _check_clip_weights(pretrained: str) -> str:
    if _is_path(pretrained) and not Path(pretrained).expanduser().is_file():
        raise ValueError("there is no such file")
    return pretrained


def _is_path(pretrained: str) -> bool:
    return "/" in pretrained or pretrained.endswith((".safetensors", ".pt", ".pth", ".bin"))


# a tag of open_clip, or the path of a state dict
OpenClipWeights = Annotated[str, Field(min_length=1), AfterValidator(_check_clip_weights)]


class Mask2Former:
    """Detector of GenEval's 80 classes; an open_clip model names colours, box by box.

    model: a Hub id or folder of a Mask2Former for COCO instances, with 80 labels, which are taken
        by index (`NAMES`).
    size: shortest edge that an image is resized to, and longest edge that it may get, in pixels.
        (The model's own preprocessor has 384 x 384, which misses small objects.)
    clip, clip_pretrained: the model that names colours, see `ClipColors`. dtype: of the network
    alone.
    batch_size: images a forward pass; it changes no result beyond rounding.
    device: None = the GPU if there is one. offload: the weights of both models lie on the CPU
        between calls of the reward.
    `name` says which models answered. Raises ValueError for a model that is no Mask2Former with 80
    labels or lacks weights, OSError where there is nothing to load, ImportError without scipy
    (which transformers needs for this model) or open_clip.
    """

    classes, palette = NAMES, COLORS

    def __init__(
        self,
        model: Pretrained = MASK2FORMER,
        *,
        size: Annotated[Sequence[int], AfterValidator(_check_size)] = DETECTOR_SIZE,
        clip: OpenClip = "ViT-L-14",
        clip_pretrained: OpenClipWeights = "openai",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        batch_size: Count = 8,
        device: Device = None,
        offload: bool = False,
    ) -> None:
        self.batch_size, (self.shortest, self.longest) = batch_size, size
        self.dtype = getattr(torch, dtype)
        self.colors = ClipColors(clip, clip_pretrained, device=device, offload=offload)
        self.processor, self.network = _load(model, self.dtype)
        self.placement = Placement(self.network, device, offload)
        self.placements = (self.placement, self.colors.placement)
        commit = getattr(self.network.config, "_commit_hash", None)
        at = f"{located(model)[0]}@{commit}" if commit else model
        self.name = (
            f"mask2former {at} at {self.shortest}/{self.longest} px, {dtype}; "
            f"colours by {self.colors.name}"
        )

    @staticmethod
    def packages(**options: Any) -> tuple[str, ...]:
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
        """The Detections of each picture uint8 [H,W,3]; all pictures have one size."""
        inputs = self.processor(
            pictures,
            size={"shortest_edge": self.shortest, "longest_edge": self.longest},
            size_divisor=0,  # the processor would stretch to a multiple; mmdet and Meta pad
            return_tensors="pt",
            input_data_format="channels_last",
        )["pixel_values"]
        height, width = inputs.shape[-2:]
        padded = pad(inputs, (0, -width % DIVISOR, 0, -height % DIVISOR))  # 0 = the mean colour
        sizes = padded.shape[-2:], (height, width), pictures[0].shape[:2]
        with self.placement:
            output = self.network(pixel_values=padded.to(self.placement.device, self.dtype))
        logits = zip(output.class_queries_logits, output.masks_queries_logits, strict=True)
        return [
            self._named(picture, instances(classes, masks, *sizes))
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
class Instances:
    """K objects of one image, by class: labels [K] in [0,C), scores [K] in [0,1], boxes [K,4] as
    x1, y1, x2, y2 in pixels, right and bottom exclusive, masks K x bool [y2 - y1, x2 - x1]."""

    labels: np.ndarray
    scores: np.ndarray
    boxes: np.ndarray
    masks: list[np.ndarray]


def instances(
    class_logits: Tensor,
    mask_logits: Tensor,
    padded: Sequence[int],
    resized: Sequence[int],
    image: Sequence[int],
    top: int = TOP,
) -> Instances:
    """The objects that class logits [Q,C+1] and mask logits [Q,h,w] of one image stand for.

    padded, resized, image: (height, width) of what the network saw, of the image in it (upper
    left), and of the image.
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
            "the detector answered NaN or infinity; with `dtype` float16, try bfloat16."
        )
    chance = class_logits.softmax(-1)[:, :-1]
    pairs = chance.flatten().topk(min(top, chance.numel())).indices
    queries = pairs // chance.shape[1]
    labels = pairs % chance.shape[1]
    used, row = queries.unique(return_inverse=True)
    height, width = resized
    masks = interpolate(mask_logits[used][None], tuple(padded), mode="bilinear")
    masks = interpolate(masks[..., :height, :width], tuple(image), mode="bilinear")[0]
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
    boxes = np.zeros((len(inside), 4), int)
    crops = []
    for box, mask in zip(boxes, inside.cpu().numpy(), strict=True):
        x, y = (mask.any(axis).nonzero()[0] for axis in (0, 1))
        if len(x):
            box[:] = x[0], y[0], x[-1] + 1, y[-1] + 1
        x1, y1, x2, y2 = box
        crops.append(mask[y1:y2, x1:x2].copy())
    return boxes, crops


def _load(model: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(image processor, network), its labels and weights checked."""
    folder, at = located(model)
    config: Any = AutoConfig.from_pretrained(folder, **at)
    if config.model_type != "mask2former" or config.num_labels != len(NAMES):
        raise ValueError(
            f"`model` {model!r} is a {config.model_type} with {config.num_labels} labels; GenEval "
            f"needs a mask2former with the {len(NAMES)} things of COCO, such as {MASK2FORMER}."
        )
    kind = Mask2FormerForUniversalSegmentation
    network = load_complete(kind, folder, config=config, dtype=dtype, **at)
    return ImageProcessor.from_pretrained(folder, **at), network.requires_grad_(False).eval()


# Colours -----------------------------------------------------------------------------------------


class ClipColors:
    """Names the colour of objects, with an open_clip model.

    architecture, pretrained: as open_clip names them; pretrained may also be a local state dict
        (.safetensors, or .pt without pickled code), which counts as OpenAI's weights: they need
        QuickGELU. (open_clip 3 warns, but computes wrongly, where "ViT-L-14" gets them.) GenEval's
        are "ViT-L-14", "openai".
    device, offload: as in `flowalign.backbone.placement.Placement`. `name` says which model
    answers. Raises ImportError without open_clip, and what that raises for an unknown model.
    """

    def __init__(
        self,
        architecture: OpenClip = "ViT-L-14",
        pretrained: OpenClipWeights = "openai",
        *,
        device: Device = None,
        offload: bool = False,
    ) -> None:
        library = require("open_clip", "GenEval's colours are named with")
        weights, gelu = _open_clip_weights(library, architecture, pretrained)
        model, _, self.preprocess = library.create_model_and_transforms(
            architecture, pretrained=weights, force_quick_gelu=gelu, device="cpu"
        )
        self.model = model.float()
        self.placement = Placement(self.model, device, offload)
        self.tokenizer = library.get_tokenizer(architecture)
        self.name = f"open_clip {library.__version__} {architecture} {pretrained}"
        self.classifier = cache(self._classifier)

    @torch.no_grad()
    def color(self, pixels: np.ndarray, mask: np.ndarray, thing: str) -> str:
        """One of COLORS for uint8 pixels [h,w,3] of a box, and the mask [h,w] of the thing in it.

        CLIP's preprocessing cuts the ends off an elongated box, as in the official script.
        """
        masked = np.where(mask[..., None], pixels, np.uint8(OUTSIDE_GREY))
        inputs = self.preprocess(Image.fromarray(masked))[None]
        with self.placement:
            vector = self.model.encode_image(inputs.to(self.placement.device)).float()
            return COLORS[int((normalize(vector, dim=-1) @ self.classifier(thing).T).argmax())]

    @torch.no_grad()
    def _classifier(self, thing: str) -> Tensor:
        """Unit vectors [10,D], one a colour: the mean over the templates."""
        texts = [t.format(color=color, thing=thing) for color in COLORS for t in PROMPT_TEMPLATES]
        with self.placement:
            tokens = self.tokenizer(texts).to(self.placement.device)
            vectors = normalize(self.model.encode_text(tokens).float(), dim=-1)
        return normalize(vectors.view(len(COLORS), len(PROMPT_TEMPLATES), -1).mean(1), dim=-1)

    def of_boxes(
        self,
        pixels: np.ndarray,
        boxes: Mapping[str, Sequence[Sequence[float]]],
        masks: Mapping[str, Sequence[np.ndarray]],
    ) -> Callable[[str, int], str]:
        """(class, index of its box) -> colour, for one image: computed when called, once a box.

        pixels: uint8 [H,W,3]; boxes {class: [[x1, y1, x2, y2, score], ...]} with right and bottom
        exclusive; masks {class: [bool [y2 - y1, x2 - x1], ...]}.
        """

        @cache
        def color(thing: str, index: int) -> str:
            x1, y1, x2, y2 = map(int, boxes[thing][index][:4])
            return self.color(pixels[y1:y2, x1:x2], masks[thing][index], thing)

        return color


def _open_clip_weights(library: Any, architecture: str, pretrained: str) -> tuple[str, bool]:
    """What open_clip has to load, and whether these weights need QuickGELU."""
    if _is_path(pretrained):
        return str(Path(pretrained).expanduser()), True
    tag = library.get_pretrained_cfg(architecture, pretrained)
    return pretrained, bool(tag.get("quick_gelu", False))
