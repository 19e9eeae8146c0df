"""diffusers' Stable Diffusion 3 pipeline, with the number of T5 tokens of a training."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers

if TYPE_CHECKING:
    from flowalign.adapters.files import Lora

DIFFUSERS_LENGTH = 256  # T5 tokens of a prompt by diffusers' default


def text_length(model: str, lora: str | Path | Lora | None) -> int:
    """T5 tokens of a prompt: those of the LoRA's training if its file says so, else those of the
    tiny model, else diffusers' default. Raises HubError or AdapterError for a LoRA that cannot be
    read."""
    from flowalign.adapters.files import read_lora
    from flowalign.backbone import resolve
    from flowalign.tiny import MODEL, T5_LENGTH

    own = T5_LENGTH if resolve(model) == str(MODEL) else DIFFUSERS_LENGTH
    return (read_lora(lora, newest=True).text_length if lora else None) or own


def pipeline_class(length: int) -> type[diffusers.StableDiffusion3Pipeline]:
    """diffusers' class, or one like it whose prompts have `length` T5 tokens by default.

    diffusers has that number only in the defaults of two methods. The class has the name of its
    parent, which `save_pretrained` writes: what is saved is an ordinary pipeline.
    """
    parent = diffusers.StableDiffusion3Pipeline
    if length == DIFFUSERS_LENGTH:
        return parent
    methods = {
        name: _with_length(getattr(parent, name), length) for name in ("__call__", "encode_prompt")
    }
    return type(parent.__name__, (parent,), {**methods, "__doc__": parent.__doc__})


def _with_length(method: Any, length: int) -> Any:
    """The method, with another default of `max_sequence_length`."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def wrapper(*args: Any, **kw: Any) -> Any:
        if "max_sequence_length" not in signature.bind_partial(*args, **kw).arguments:
            kw["max_sequence_length"] = length
        return method(*args, **kw)

    return wrapper
