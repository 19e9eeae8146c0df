"""Whether a run compiles its transformer."""

from __future__ import annotations

import logging

from flowalign.backbone.base import Backbone
from flowalign.config import ModelConfig

log = logging.getLogger("flowalign")

# Images that a run has to draw for `auto`: compiling takes 22 to 68 seconds, and saves .4 of an
# image's .8 seconds at 40 steps with CFG (Stable Diffusion 3.5 Medium on an H100; docs/gpu.md)
FEWEST_COMPILED = 500


def compiles(model: ModelConfig, device: str, images: int) -> tuple[bool, str]:
    """Whether a run of so many images on a device ("cuda", "cpu", ...) compiles, and why.

    Nobody has tried compiled blocks of quantized weights here, so `auto` leaves them eager. The
    blocks of all families compile (tests/test_families.py).
    """
    if model.compile != "auto":
        return model.compile, "model.compile"
    if device != "cuda":
        return False, f"auto: on {device}"
    if model.quantization:
        return False, f"auto: {model.quantization} weights"
    if images < FEWEST_COMPILED:
        return False, f"auto: {images} images, fewer than {FEWEST_COMPILED}"
    return True, f"auto: {images:,} images on a GPU"


def compile_blocks(backbone: Backbone, model: ModelConfig, images: int, *, main: bool) -> None:
    """Compile the blocks of a run's transformer, if `compiles` says so. Call it after adapters are
    loaded, because they change the layers. main: whether this process says what was chosen."""
    chosen, why = compiles(model, backbone.device.type, images)
    if chosen:
        backbone.compile()
    if main and (chosen or backbone.device.type == "cuda"):
        log.info("torch.compile: %s (%s)", "yes" if chosen else "no", why)
