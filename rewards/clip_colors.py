"""GenEval's colour of an object: which of ten colours a CLIP finds on its masked crop.

The rules of djghosh13/geneval@af4902f, `evaluation/evaluate_images.py`. Two departures: all is
computed in float32, where the official script lets CUDA use float16; and each crop has a forward
pass of its own, so that its colour cannot depend on what else is in the image or the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import normalize

from flowalign.backbone.placement import Placement
from flowalign.rewards.geneval_judge import COLORS
from flowalign.rewards.options import Device, OpenClip
from flowalign.system.packages import require

TEMPLATES = (
    "a photo of a {color} {thing}",
    "a photo of a {color}-colored {thing}",
    "a photo of a {color} object",
)
OUTSIDE = 0x99  # every channel of #999, the grey that hides what is not the object


def _check_weights(pretrained: str) -> str:
    if _is_path(pretrained) and not Path(pretrained).expanduser().is_file():
        raise ValueError("there is no such file")
    return pretrained


def _is_path(pretrained: str) -> bool:
    return "/" in pretrained or pretrained.endswith((".safetensors", ".pt", ".pth", ".bin"))


# a tag of open_clip, or the path of a state dict
OpenClipWeights = Annotated[str, Field(min_length=1), AfterValidator(_check_weights)]


class ClipColors:
    """Names the colour of objects, with an open_clip model.

    architecture, pretrained: as open_clip names them; pretrained may also be a local state dict
        (.safetensors, or .pt without pickled code). GenEval's are "ViT-L-14", "openai".
    quick_gelu: None = as the tag's model was trained; a local file counts as OpenAI's weights,
        which need it. (open_clip 3 warns, but computes wrongly, where "ViT-L-14" gets them.)
    device, offload: as in `flowalign.backbone.placement.Placement`. `name` says which model
    answers. Raises ImportError without open_clip, ValueError for a model that it does not know.
    """

    def __init__(
        self,
        architecture: OpenClip = "ViT-L-14",
        pretrained: OpenClipWeights = "openai",
        *,
        quick_gelu: bool | None = None,
        device: Device = None,
        offload: bool = False,
    ) -> None:
        library = require("open_clip", "GenEval's colours are named with")
        weights, gelu = _weights(library, architecture, pretrained)
        model, _, self.preprocess = library.create_model_and_transforms(
            architecture,
            pretrained=weights,
            force_quick_gelu=gelu if quick_gelu is None else quick_gelu,
            device="cpu",
        )
        self.model = model.float()
        self.placement = Placement(self.model, device, offload)
        self.tokenizer = library.get_tokenizer(architecture)
        self.name = f"open_clip {library.__version__} {architecture} {pretrained}"
        self._classifiers: dict[str, Tensor] = {}

    @torch.no_grad()
    def color(self, pixels: np.ndarray, mask: np.ndarray, thing: str) -> str:
        """One of COLORS for uint8 pixels [h,w,3] of a box, and the mask [h,w] of the thing in it.

        CLIP's preprocessing cuts the ends off an elongated box, as in the official script.
        """
        masked = np.where(mask[..., None], pixels, np.uint8(OUTSIDE))
        inputs = self.preprocess(Image.fromarray(masked))[None]
        with self.placement:
            vector = self.model.encode_image(inputs.to(self.placement.device)).float()
            return COLORS[int((normalize(vector, dim=-1) @ self.classifier(thing).T).argmax())]

    @torch.no_grad()
    def classifier(self, thing: str) -> Tensor:
        """Unit vectors [10,D], one a colour: the mean over the templates; computed once a thing."""
        if thing not in self._classifiers:
            texts = [t.format(color=color, thing=thing) for color in COLORS for t in TEMPLATES]
            with self.placement:
                tokens = self.tokenizer(texts).to(self.placement.device)
                vectors = normalize(self.model.encode_text(tokens).float(), dim=-1)
            mean = vectors.view(len(COLORS), len(TEMPLATES), -1).mean(1)
            self._classifiers[thing] = normalize(mean, dim=-1)
        return self._classifiers[thing]

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


def _weights(library: Any, architecture: str, pretrained: str) -> tuple[str, bool]:
    """What open_clip is asked to load, and whether these weights need QuickGELU."""
    if architecture not in library.list_models():
        raise ValueError(f"`clip`: open_clip has no architecture {architecture!r}.")
    if _is_path(pretrained):
        return str(Path(pretrained).expanduser()), True
    tag = library.get_pretrained_cfg(architecture, pretrained)
    if not tag:
        tags = library.list_pretrained_tags_by_model(architecture)
        raise ValueError(f"`clip_pretrained`: {pretrained!r} is none of open_clip's {tags}.")
    return pretrained, bool(tag.get("quick_gelu", False))
