"""LoRAs onto a transformer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from flowalign.backbone.adapters.files import AdapterError, Lora, read_lora


@contextmanager
def several_adapters() -> Iterator[None]:
    """Inside the `with`, peft does not warn that a model has several adapters."""
    with warnings.catch_warnings():  # of peft: several adapters are what we want
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        yield


def put_lora(core: nn.Module, name: str, source: str | Path | Lora) -> dict[str, Tensor]:
    """Load a saved LoRA onto a transformer under a name, and make it active; returns its weights.

    Raises AdapterError for one that does not fit this transformer, HubError for one that cannot be
    had.
    """
    lora = read_lora(source)
    _check_fits(core, lora.weights, source if isinstance(source, (str, Path)) else lora.file)
    with several_adapters():
        core.load_lora_adapter(  # pyright: ignore[reportCallIssue] (of diffusers' mixin)
            dict(lora.weights), prefix=None, adapter_name=name, metadata=lora.metadata
        )
    return lora.weights


def _check_fits(core: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Raise AdapterError unless the model has every layer of a LoRA, in its size."""
    layers = dict(core.named_modules())
    for key, value in weights.items():
        name, half = key.removesuffix(".weight").rsplit(".lora_", 1)
        if name not in layers or {"base_layer", "lora_A", "lora_B"} & set(name.split(".")):
            raise AdapterError(f"{source} adapts {name}, and the model has no such layer")
        layer = layers[name]
        if isinstance(layer, LoraLayer):  # it has another adapter already
            layer = layer.get_base_layer()
        if isinstance(layer, nn.Conv2d):
            side, size = ("in_channels", "out_channels")[half == "B"], layer.kernel_size
        elif hasattr(layer, "in_features") and hasattr(layer, "out_features"):
            side, size = ("in_features", "out_features")[half == "B"], ()
        else:
            raise AdapterError(f"{source} adapts {name}, a {type(layer).__name__}: peft cannot")
        axis, rest = (1, size) if half == "A" else (0, (1,) * len(size))
        if (own := value.shape[axis]) != getattr(layer, side):
            raise AdapterError(
                f"{source} adapts {name} with {side} = {own}, and the model's has "
                f"{getattr(layer, side)}"
            )
        if value.shape[2:] != rest:
            shape = list(value.shape)
            raise AdapterError(f"{source} adapts {name}, a {type(layer).__name__}, with {shape}")
