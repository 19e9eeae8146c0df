"""LoRAs on a transformer: how they get there, and how they compute.

The base is frozen in `model.dtype`. The trained adapter keeps float32 weights ("masters"), as a
step of Adam is lost in 16 bits; its products have the base's dtype. There is no autocast, so that
rollout, labels, update, evaluation and sampling compute alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from flowalign.backbone.adapters import AdapterError, Lora, read_lora
from flowalign.backbone.conversion import looks_like, taking_lora
from flowalign.backbone.shapes import public


@contextmanager
def several_adapters() -> Iterator[None]:
    """Inside the `with`, peft does not warn that a model has several adapters, or that the name of
    an adapted layer (proj_out) ends those of others: the weights say which are adapted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="While injecting the PEFT adapters, an incons")
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        yield


def put_lora(core: nn.Module, name: str, source: str | Path | Lora) -> dict[str, Tensor]:
    """Load a saved LoRA onto a transformer under a name, and make it active; returns its weights.

    Raises AdapterError for one that does not fit this transformer, HubError for one that cannot be
    had.
    """
    lora = read_lora(source)
    if reason := misfit(core, lora):
        raise AdapterError(f"{lora.file} {reason}")
    with several_adapters():
        core.load_lora_adapter(  # pyright: ignore[reportCallIssue] (of diffusers' mixin)
            dict(lora.weights), prefix=None, adapter_name=name, metadata=lora.metadata
        )
    return lora.weights


def other_base(lora: Lora, model: str, core: nn.Module | None) -> str | None:
    """Why a LoRA is of another base than a model: its layers or sizes do not fit, or it names
    another public model. Any other name, such as a folder, may stand for the same base. core: the
    model's transformer; None = its shapes are not known. None where nothing speaks against it."""
    if lora.base != model and {lora.base, model} <= public().keys():
        return f"was trained on {lora.base!r}"
    return misfit(core, lora) if core else None


def misfit(core: nn.Module, lora: Lora) -> str | None:
    """What a LoRA adapts, and what a transformer has in its place; None where it fits."""
    layers = taking_lora(core)
    looks = looks_like(lora.ranks)
    for layer, rank in lora.ranks.items():
        down, up = (tuple(lora.weights[f"{layer}.lora_{half}.weight"].shape) for half in "AB")
        if not (there := layers.get(layer)):
            return f"adapts {layer} with {down}, {up}, and the model has no such layer{looks}"
        base = there.get_base_layer() if isinstance(there, LoraLayer) else there
        if isinstance(base, nn.Conv2d):
            expected = (rank, base.in_channels, *base.kernel_size), (base.out_channels, rank, 1, 1)
        else:
            expected = (rank, base.in_features), (base.out_features, rank)
        if expected != (down, up):
            has = f"such a layer with {expected[0]}, {expected[1]}"
            return f"adapts {layer} with {down}, {up}, and the model has {has}{looks}"
    return None


def adapted_layers(core: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that have one of these names, or one of these ends of a name after
    a dot. An end may also be that of what takes no LoRA, such as a list of layers."""
    ends = tuple(f".{target}" for target in targets)
    linear = (n for n, m in taking_lora(core).items() if not isinstance(m, nn.Conv2d))
    return [name for name in linear if f".{name}".endswith(ends)]


class CastingLinear(nn.Linear):
    """A linear layer without bias that computes in the dtype of its input, whatever its weight's.

    The gradient passes the cast: it is computed in the input's dtype and accumulated in the
    weight's.
    """

    def forward(self, input: Tensor) -> Tensor:
        # one product of two matrices: for more dimensions torch takes another kernel, with other
        # last bits, where the weight has no gradient
        rows = input.reshape(-1, input.shape[-1])
        product = nn.functional.linear(rows, self.weight.to(input.dtype))
        return product.view(*input.shape[:-1], -1)


def lora_layers(model: nn.Module) -> Iterator[LoraLayer]:
    return (module for module in model.modules() if isinstance(module, LoraLayer))


def compute_in_the_bases_dtype(model: nn.Module, name: str) -> None:
    """Let adapter `name` compute in the dtype of its layers' inputs.

    peft would cast each input to the adapter's dtype and the product back. Only adapters of linear
    layers change.
    """
    for layer in lora_layers(model):
        halves = [half for half in (layer.lora_A, layer.lora_B) if name in half]
        if not halves or not all(type(half[name]) is nn.Linear for half in halves):
            continue
        layer.cast_input_dtype_enabled = False
        for half in halves:
            # the parameter stays the same
            half[name].__class__ = CastingLinear  # pyright: ignore[reportAttributeAccessIssue]
