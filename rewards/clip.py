"""Image and text vectors: models with two towers, DINOv2, and preprocessing by PIL at 8 bits.

Legend: B images, P prompts, D the width of the common space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize
from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPModel

from flowalign.backbone.placement import Placement
from flowalign.backbone.pretrained import load_complete
from flowalign.backbone.tiny import PREFERENCE
from flowalign.rewards import load
from flowalign.rewards.options import check_model, located
from flowalign.system.images import to_uint8

try:  # the same pixels, whether torchvision is installed or not
    from transformers.models.clip import CLIPImageProcessorPil as ImageProcessor
except ImportError:  # transformers 4: the one without "Fast" is PIL's
    from transformers import CLIPImageProcessor as ImageProcessor

TEXT_CACHE = 4096  # prompts whose vectors are kept on the CPU: 16 MB at D = 1024
CONTEXT = 77  # tokens of CLIP's text tower; longer prompts are cut
CLIP_LARGE = "openai/clip-vit-large-patch14"
# "tiny" (trained on the tiny world), or a `Pretrained` with a transformers CLIPModel
ClipModel = Annotated[
    str, AfterValidator(lambda name: name if name == "tiny" else check_model(name))
]
# a CLIP as above, a DINOv2, or package.module:function, images [B,3,H,W] in [0,1] -> vectors [B,D]
ImageEncoder = Annotated[
    str,
    AfterValidator(
        lambda name: name if name == "tiny" or load_features(name) else check_model(name)
    ),
]


# Pixels ------------------------------------------------------------------------------------------


def clip_processor(size: int) -> Any:
    """CLIP's own preprocessing: short side to `size`, bicubic; centre crop; CLIP's mean and std."""
    crop = {"height": size, "width": size}
    return ImageProcessor(size={"shortest_edge": size}, crop_size=crop)  # the rest is its default


def pixel_batches(images: Tensor, batch_size: int) -> Iterator[list[np.ndarray]]:
    """images [B,3,H,W] in [0,1] as lists of uint8 [H,W,3]; ValueError for NaN and infinity."""
    for chunk in images.split(batch_size):
        yield [to_uint8(image) for image in chunk]


def pixel_values(processor: Any, pictures: list[np.ndarray]) -> Tensor:
    """The input that a processor makes of uint8 pictures [H,W,3]: float32 [b,3,h,w]."""
    inputs = processor(pictures, return_tensors="pt", input_data_format="channels_last")
    return inputs["pixel_values"]


def float_values(processor: Any, images: Tensor) -> Tensor:
    """The input as by `pixel_values`, of images [B,3,H,W] in [0,1] and with a gradient: the short
    side to the size of the crop, bicubic; centre crop; mean and std. The pixels are not rounded to
    8 bits, so they are up to 1 / 255 off."""
    crop = processor.crop_size
    height, width = crop["height"], crop["width"]
    size = processor.size.get("shortest_edge", min(height, width))
    scale = size / min(images.shape[-2:])
    shape = [int(round(side * scale, 6)) for side in images.shape[-2:]]
    resized = interpolate(images, shape, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (shape[0] - height) // 2, (shape[1] - width) // 2
    middle = resized[..., top : top + height, left : left + width]
    mean, std = (
        middle.new_tensor(v)[:, None, None] for v in (processor.image_mean, processor.image_std)
    )
    return (middle - mean) / std


def letterbox(picture: np.ndarray, size: int) -> np.ndarray:
    """uint8 [H,W,3] -> [size,size,3]: long side to `size`, bicubic, black bars on both sides.

    HPSv2's preprocessing (its open_clip/transform.py, ResizeMaxSize), which leaves out the bars
    where the long side has that size already; here a picture is always square.
    """
    height, width = picture.shape[:2]
    scale = size / max(height, width)
    high, wide = round(height * scale), round(width * scale)
    canvas = np.zeros((size, size, 3), np.uint8)
    top, left = (size - high) // 2, (size - wide) // 2
    resized = Image.fromarray(picture).resize((wide, high), Image.Resampling.BICUBIC)
    canvas[top : top + high, left : left + wide] = np.asarray(resized)
    return canvas


# Vectors -----------------------------------------------------------------------------------------


class TwoTowers:
    """An image tower and a text tower; a subclass has the code that calls them.

    device: where they compute, None = the GPU if there is one. batch_size: images a
    forward pass; texts are encoded one by one. offload: `flowalign.backbone.placement.Placement`.
    """

    name: str  # which model answers
    pixels: Any  # its image processor
    scale = 1.0  # times the cosine, in training

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device | None = None,
        batch_size: int = 64,
        offload: bool = False,
    ) -> None:
        self.placement = Placement(model, device, offload)
        self.device = self.placement.device
        self.batch_size = batch_size
        self._text_vector = lru_cache(TEXT_CACHE)(self._encode_text)

    @torch.no_grad()
    def image_features(self, images: Tensor) -> Tensor:
        """Unit vectors [B,D], float32, of images [B,3,H,W] in [0,1].

        The images pass through the preprocessing as 8-bit pixels, as files would. Raises ValueError
        for pixels that are NaN or infinite.
        """
        with self.placement:
            pictures = pixel_batches(images, self.batch_size)
            return torch.cat([normalize(self._encode_images(part), dim=-1) for part in pictures])

    def with_gradient(self, images: Tensor) -> Tensor:
        """The vectors as by `image_features`, with a gradient and without rounding to 8 bits."""
        with self.placement:
            return normalize(self._encode(self._float_values(images.to(self.device))), dim=-1)

    @torch.no_grad()
    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors [P,D], float32. Kept vectors are reused; a prompt too long is cut. A vector
        depends on its prompt alone, to the bit: not on other prompts, now or before."""
        with self.placement:
            return torch.stack(list(map(self._text_vector, prompts))).to(self.device)

    def cosine(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """cos(image, its prompt) [B], on the CPU, of images [B,3,H,W] and their B prompts."""
        with self.placement:  # offloaded weights are moved once for both towers
            return (self.image_features(images) * self.text_features(prompts)).sum(-1).cpu()

    def _encode_text(self, prompt: str) -> Tensor:
        # alone: the last bits of a row depend on the size of its batch, and which prompts are new
        # together depends on what was kept, so that a resumed run would score otherwise
        return normalize(self._encode_texts([prompt]), dim=-1)[0].cpu()

    def _encode_images(self, pictures: list[np.ndarray]) -> Tensor:
        """uint8 pictures [H,W,3] -> [b,D], of any length."""
        return self._encode(pixel_values(self.pixels, pictures).to(self.device))

    def _float_values(self, images: Tensor) -> Tensor:
        return float_values(self.pixels, images)

    def _encode(self, values: Tensor) -> Tensor:
        """Preprocessed pixels [b,3,h,w] -> [b,D], of any length."""
        raise NotImplementedError

    def _encode_texts(self, prompts: list[str]) -> Tensor:
        """Prompts -> [p,D], of any length."""
        raise NotImplementedError


class Clip(TwoTowers):
    """A CLIPModel with its image processor and tokenizer.

    model, processor: a `ClipModel`; processor None = the model's own. computing: device, batch_size
    and offload, as in `TwoTowers`. Raises OSError where there is nothing to load.
    """

    def __init__(self, model: str, processor: str | None = None, *computing: Any) -> None:
        self.name = model
        name, at = _located(model)
        self.model = load_complete(CLIPModel, name, **at).float()
        source, at_source = _located(processor or model)
        self.pixels = ImageProcessor.from_pretrained(source, **at_source)
        self.tokenizer = AutoTokenizer.from_pretrained(source, **at_source)
        positions = self.model.text_model.embeddings.position_embedding.num_embeddings
        self.context = min(CONTEXT, positions, self.tokenizer.model_max_length)  # often 1e30
        self.scale = float(self.model.logit_scale.detach().exp())
        super().__init__(self.model, *computing)

    def _encode(self, values: Tensor) -> Tensor:
        return _pooled(self.model.get_image_features(values))

    def _encode_texts(self, prompts: list[str]) -> Tensor:
        tokens = self.tokenizer(
            prompts, padding=True, truncation=True, max_length=self.context, return_tensors="pt"
        )
        ids, mask = tokens["input_ids"].to(self.device), tokens["attention_mask"].to(self.device)
        return _pooled(self.model.get_text_features(ids, attention_mask=mask))


class Dino(TwoTowers):
    """DINOv2 with its image processor: the class token after the last norm. Without a text tower.

    The arguments are as for `Clip`.
    """

    def __init__(self, model: str, *computing: Any) -> None:
        self.name = model
        name, at = _located(model)
        self.model: Any = load_complete(AutoModel, name, **at).float()
        self.pixels = ImageProcessor.from_pretrained(name, **at)
        super().__init__(self.model, *computing)

    def _encode(self, values: Tensor) -> Tensor:
        return self.model(values).pooler_output


def load_features(model: str) -> Callable[[Tensor], Tensor] | None:
    """The function that an `ImageEncoder` names; None = a model. ValueError if there is none."""
    return load(model, "features") if ":" in model else None


@lru_cache(1)  # of the judges of several benchmarks
def image_encoder(model: str, *computing: Any) -> tuple[str, Callable[[Tensor], Tensor]]:
    """(its name, images [B,3,H,W] in [0,1] -> vectors [B,D]) of an `ImageEncoder`. The vectors of a
    model are unit vectors. computing: as for `Clip`. Raises OSError where nothing can be loaded."""
    if features := load_features(model):
        return model, features
    name, at = _located(model)
    is_clip = AutoConfig.from_pretrained(name, **at).model_type == "clip"
    encoder = Clip(model, None, *computing) if is_clip else Dino(model, *computing)
    return model, encoder.image_features


def _located(model: str) -> tuple[str, dict[str, Any]]:
    return (str(PREFERENCE), {}) if model == "tiny" else located(model)


def _pooled(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output  # transformers 4 or 5
