"""diffusers' pipelines, with the number of prompt tokens of a training."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers

from flowalign.backbone.loading import family_of, pipeline_name, resolve

if TYPE_CHECKING:
    from flowalign.backbone.adapters.files import Lora

LENGTH = "max_sequence_length"


def text_length(model: str, lora: str | Path | Lora | None) -> int | None:
    """Tokens of a prompt: those of the LoRA's training if its file says so, else those of the tiny
    model, else None = diffusers' default. Raises HubError or AdapterError for a LoRA that cannot be
    read."""
    from flowalign.backbone.adapters.files import read_lora
    from flowalign.backbone.tiny import MODEL, T5_LENGTH

    own = T5_LENGTH if resolve(model) == str(MODEL) else None
    return (read_lora(lora, newest=True).text_length if lora else None) or own


def pipeline_class(model: str, length: int | None, **hub: Any) -> type[Any]:
    """The class in diffusers of a model's pipeline, or one like it whose prompts have `length`
    tokens by default. hub: see `pipeline_name`. Raises ModelError for a pipeline of no family.

    diffusers has that number only in the defaults of two methods. The class has the name of its
    parent, which `save_pretrained` writes: what is saved is an ordinary pipeline.
    """
    parent = getattr(diffusers, family_of(pipeline_name(model, **hub)).pipeline)
    if length in (None, default_length(parent)):
        return parent
    methods = {
        name: _with_length(getattr(parent, name), length) for name in ("__call__", "encode_prompt")
    }
    return type(parent.__name__, (parent,), {**methods, "__doc__": parent.__doc__})


def default_length(pipeline: type[Any]) -> int:
    """Tokens of a prompt in a call of a pipeline, unless it says otherwise."""
    return inspect.signature(pipeline.__call__).parameters[LENGTH].default


def _with_length(method: Any, length: int) -> Any:
    """The method, with another default of `max_sequence_length`."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def wrapper(*args: Any, **kw: Any) -> Any:
        if LENGTH not in signature.bind_partial(*args, **kw).arguments:
            kw[LENGTH] = length
        return method(*args, **kw)

    return wrapper
