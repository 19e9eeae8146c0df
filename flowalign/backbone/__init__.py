"""The base model with its named adapters: text -> velocity -> pixels."""

from flowalign.backbone.base import DTYPES, Backbone, put_lora
from flowalign.backbone.sd3 import ModelError, load_pipeline, resolve, scheduler_sigmas

__all__ = [
    "DTYPES",
    "Backbone",
    "ModelError",
    "load_pipeline",
    "put_lora",
    "resolve",
    "scheduler_sigmas",
]
