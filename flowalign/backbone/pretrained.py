"""Models of transformers and diffusers whose files hold all their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class WeightsError(ValueError):
    """Files that lack weights of a model, or have them in other shapes."""


def load_complete(kind: Any, source: str | Path, **options: Any) -> Any:
    """`kind.from_pretrained(source, **options)`, a model of transformers or diffusers, of
    safetensors files only.

    The libraries fill weights that are missing with random numbers; here WeightsError names the
    first. Tied weights count once, and buffers of integers, such as position ids, are made by the
    model itself. Raises OSError where there is nothing to load.
    """
    if kind.__module__.startswith("transformers."):  # whose own error names no weight
        options["ignore_mismatched_sizes"] = True
    options |= {"use_safetensors": True, "output_loading_info": True}
    try:
        model, report = kind.from_pretrained(source, **options)
    except (ValueError, RuntimeError) as error:  # diffusers' of a shape, without the part
        reason = str(error).strip().partition(". ")[0]
        raise WeightsError(f"the {kind.__name__} in {source} does not load: {reason}") from error
    buffers = dict(model.named_buffers())
    missing = [
        name
        for name in sorted(report["missing_keys"])
        if name not in buffers or buffers[name].is_floating_point()
    ]
    reshaped = sorted(name for name, *_ in report["mismatched_keys"])
    for names, fault in ((missing, "lack"), (reshaped, "have in other shapes")):
        if names:
            raise WeightsError(
                f"the files of the {type(model).__name__} in {source} {fault} {len(names)} of its "
                f"weights: {', '.join(names[:3])}. Download them again."
            )
    return model
