"""Images as 8-bit pixels and back: what files, engines and the wire hold."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and its subfolders, sorted; empty if there is no such folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)


def read_image(path: Path) -> Image.Image:
    """A file as an RGB image, as its EXIF turns it. Raises ValueError, with its name, for one that
    is no image."""
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except OSError as error:
        raise ValueError(f"{path} is not readable as an image ({error})") from error


def pixels_of(file: bytes) -> Tensor:
    """The image [3,H,W] in [0,1] of a PNG file, as its EXIF turns it."""
    pixels = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB"))
    return to_float(torch.from_numpy(pixels).permute(2, 0, 1))


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
