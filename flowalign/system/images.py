"""Images as 8-bit pixels and back: what files, engines and the wire hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def to_uint8(image: Tensor) -> np.ndarray:
    """One image [3,H,W] in [0,1], RGB -> uint8 [H,W,3]. Raises ValueError for NaN or infinity."""
    if not bool(torch.isfinite(image).all()):
        raise ValueError("the image has pixels that are NaN or infinite.")
    # rounded to the nearest of 256 values, as diffusers does; a plain cast would cut and darken
    pixels = (image.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return pixels.permute(1, 2, 0).cpu().contiguous().numpy()


def stacked(images: Tensor | Image.Image | Sequence[Tensor | Image.Image]) -> Tensor:
    """[B,3,H,W] in [0,1] of images of one size: tensors [3,H,W], or PIL's, at 8 bits, also one."""
    if isinstance(images, Tensor):
        return images
    images = [images] if isinstance(images, Image.Image) else images
    tensors = [
        image
        if isinstance(image, Tensor)
        else to_float(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))
        for image in images
    ]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise ValueError(f"the images have several sizes: {[list(t.shape) for t in tensors]}.")
    return torch.stack(tensors) if tensors else torch.empty(0, 3, 1, 1)


def to_float(pixels: Tensor) -> Tensor:
    """uint8 [B,3,H,W] -> float32 in [0,1]; `to_uint8` of it gives the same pixels back."""
    return pixels.to(torch.float32, copy=True).div_(255)  # in place: half the memory


def eight_bits(images: Tensor) -> Tensor:
    """Images in [0,1] rounded to 8 bits a channel, as files hold them, still as floats.

    Pixels that are NaN or infinite stay so.
    """
    return ((images.clamp(0, 1) * 255).round() / 255).where(images.isfinite(), images)
