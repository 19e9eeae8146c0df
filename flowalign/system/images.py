"""Images as 8-bit pixels and back: what files, engines and the wire hold."""

from __future__ import annotations

import base64
import io
import logging
import os
import re
import zlib
from collections.abc import Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowalign.system.files import by_number

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif",
    ".jp2", ".ppm", ".tga",
)  # fmt: skip
UNREADABLE_SUFFIXES = (
    ".heic", ".heif", ".jxl", ".svg", ".psd", ".exr", ".dng", ".cr2", ".nef", ".arw", ".raw",
)  # fmt: skip
HIDDEN = (".", "__MACOSX")  # first letters of names that a system, an archive or a notebook adds


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and its subfolders, links included, in the order of their numbers,
    without those that are HIDDEN. Empty if there is no such folder. Images in unreadable formats
    are named in the log."""
    files = []
    seen = {}
    for parent, folders, names in os.walk(folder, followlinks=True):
        new = seen.setdefault(os.path.realpath(parent), parent) == parent  # no link back
        folders[:] = sorted(name for name in folders if new and not name.startswith(HIDDEN))
        files += [Path(parent, n) for n in names if new and not n.startswith(HIDDEN)]
    files.sort()
    if skipped := [path.name for path in files if path.suffix.lower() in UNREADABLE_SUFFIXES]:
        warn_once(f"{folder}: images of these formats are not read: {', '.join(skipped[:12])}.")
    return sorted((path for path in files if path.suffix.lower() in IMAGE_SUFFIXES), key=by_number)


@cache
def warn_once(text: str) -> None:
    """Log a warning, if this process has not logged it before."""
    log.warning(text)


def in_order(files: Sequence[Path]) -> Sequence[Path]:
    """Files of `image_files` that belong to a list by their order. Raises ValueError where it is
    not clear: names with several numbers that have another order as text, and 1.png beside 01.png.
    """
    columns = zip_longest(*(re.findall("[0-9]+", file.stem) for file in files))
    several = sum(len(set(column)) > 1 for column in columns) > 1
    by_text = sorted(files)
    tied = len({str(by_number(file)) for file in files}) < len(files)
    if tied or (several and list(files) != by_text):
        orders = [", ".join(file.name for file in order[:4]) for order in (files, by_text)]
        raise ValueError(
            f"{files[0].parent}: two orders are possible, by numbers ({orders[0]} ...) and as text "
            f"({orders[1]} ...). Name the files 0001, 0002, ..., or give a list."
        )
    return files


def read_image(path: Path) -> Image.Image:
    """Read a file as an RGB image (`as_rgb`). Raises ValueError, with its name, if it is not an
    image."""
    try:
        with Image.open(path) as image:
            return as_rgb(image)
    except Exception as error:  # PIL raises whatever its decoders do
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no image that can be read ({reason}).") from error


def as_rgb(image: Image.Image) -> Image.Image:
    """An image with 8 bits a channel, turned as its EXIF says. Raises ValueError for pixels without
    a known range, and for transparent ones, whose colour is not seen."""
    deep = image.mode.startswith("I;16") or image.mode == "I" and image.format == "PNG"
    if image.mode in ("I", "F") and not deep:
        raise ValueError(f"the range of its pixels (mode {image.mode}) is not known; save 8 bits")
    image = ImageOps.exif_transpose(image)
    if deep:  # convert() would cut values at 255
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode.endswith(("A", "a")) or "transparency" in image.info:
        if image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
            raise ValueError("it has transparent pixels; lay it over a background")
    return image.convert("RGB")


def pixels_of(file: bytes) -> Tensor:
    """The image [3,H,W] in [0,1] of a file (`as_rgb`)."""
    return stacked(Image.open(io.BytesIO(file)))[0]


def png_base64(image: Image.Image) -> str:
    """An image as a PNG file in base64: lossless."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_type=zlib.Z_RLE)  # half the time, and as small for photographs
    return base64.b64encode(file.getvalue()).decode("ascii")


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
        else to_float(torch.from_numpy(np.array(as_rgb(image))).permute(2, 0, 1))
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
