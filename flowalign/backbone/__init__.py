"""The base model with its named adapters: text -> velocity -> pixels."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowalign.backbone.base import DTYPES, Backbone
    from flowalign.backbone.family import Family, ModelError
    from flowalign.backbone.loading import (
        families,
        family_of,
        load_pipeline,
        pipeline_name,
        resolve_model,
    )
    from flowalign.backbone.lora import put_lora

__all__ = [
    "DTYPES",
    "Backbone",
    "Family",
    "ModelError",
    "families",
    "family_of",
    "load_pipeline",
    "pipeline_name",
    "put_lora",
    "resolve_model",
]
MODULES = {"DTYPES": "base", "Backbone": "base", "Family": "family", "ModelError": "family"}


def __getattr__(name: str) -> Any:
    """The names of `__all__`, imported when they are first asked for: the tiny world's prompts, a
    package beside them, are read without diffusers and peft."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = MODULES.get(name, "lora" if name == "put_lora" else "loading")
    return getattr(import_module(f"{__name__}.{module}"), name)
