"""The base model with its named adapters: text -> velocity -> pixels."""

from flowalign.backbone.base import DTYPES, Backbone
from flowalign.backbone.family import Family, ModelError
from flowalign.backbone.loading import families, family_of, load_pipeline, pipeline_name, resolve
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
    "resolve",
]
