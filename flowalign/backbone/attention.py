"""The attention backend of `model.attention`, by diffusers' own switch."""

from __future__ import annotations

from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch import nn

from flowalign.system.packages import hint, installed


def has_backends(transformer: nn.Module) -> bool:
    """Whether the switch reaches a layer of this model; others have torch's SDPA alone."""
    processors = (getattr(module, "processor", None) for module in transformer.modules())
    return any(hasattr(processor, "_attention_backend") for processor in processors)


def unavailable(name: str) -> str | None:
    """Why a backend cannot be used here, without a model; None if it can. One that is downloaded
    from the Hub (its name ends with _hub) is not asked for."""
    possible = [backend.value for backend in AttentionBackendName]
    if name not in possible:
        return f"want one of {', '.join(possible)}."
    if name.endswith("_hub"):
        return None
    if name == "xformers" and not installed(name):
        return f"xformers is not installed. {hint(name)}"
    try:
        with attention_backend(name):
            return None
    except (RuntimeError, ValueError, ImportError) as error:
        return str(error).strip().splitlines()[0]
