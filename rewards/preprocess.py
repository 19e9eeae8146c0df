"""Pixels as CLIP and its kin were trained on them, resized by PIL at 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from flowalign.system.images import to_uint8

try:  # the same pixels, whether torchvision is installed or not
    from transformers.models.clip import CLIPImageProcessorPil as ImageProcessor
except ImportError:  # transformers 4: the one without "Fast" is PIL's
    from transformers import CLIPImageProcessor as ImageProcessor

__all__ = ["ImageProcessor", "batches", "clip_processor", "letterbox", "values"]


def clip_processor(size: int) -> Any:
    """CLIP's own preprocessing: short side to `size`, bicubic; centre crop; CLIP's mean and std."""
    return ImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )  # the rest is its default


def batches(images: Tensor, batch_size: int) -> Iterator[list[np.ndarray]]:
    """images [B,3,H,W] in [0,1] as lists of uint8 [H,W,3]; ValueError for NaN and infinity."""
    for start in range(0, len(images), batch_size):
        yield [to_uint8(image) for image in images[start : start + batch_size]]


def values(processor: Any, pictures: list[np.ndarray]) -> Tensor:
    """The input that a processor makes of uint8 pictures [H,W,3]: float32 [b,3,h,w]."""
    inputs = processor(pictures, return_tensors="pt", input_data_format="channels_last")
    return inputs["pixel_values"]


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
