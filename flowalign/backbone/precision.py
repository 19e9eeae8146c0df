"""How an adapter computes on its base: float32 weights, the base's arithmetic.

The base is frozen in `model.dtype`. The adapter that is trained keeps float32 weights ("masters"),
since a step of Adam is lost in 16 bits; its products are those of the base's dtype. Nothing is
under autocast, so rollout, labels, update, evaluation and sampling compute alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


class CastingLinear(nn.Linear):
    """A linear layer without bias that computes in the dtype of its input, whatever its weight's.

    The gradient goes back through the cast: it is computed in the input's dtype, and accumulated in
    the weight's. One matrix product for all rows: left to itself, torch takes another kernel, with
    other last bits, where the weight asks for no gradient.
    """

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        product = nn.functional.linear(rows, self.weight.to(input.dtype))
        return product.view(*input.shape[:-1], -1)


def lora_layers(model: nn.Module) -> Iterator[LoraLayer]:
    """The layers of a model that have adapters, in order."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            yield module


def compute_in_the_bases_dtype(model: nn.Module, name: str) -> None:
    """Let adapter `name` compute in the dtype of its layers' inputs.

    peft would cast each input to the adapter's dtype and the product back. Adapters of other layers
    than linear ones (a convolution) stay as peft has them.
    """
    for layer in lora_layers(model):
        halves = [half[name] for half in (layer.lora_A, layer.lora_B) if name in half]
        if not halves or not all(type(half) is nn.Linear for half in halves):
            continue
        layer.cast_input_dtype_enabled = False
        for half, linear in zip((layer.lora_A, layer.lora_B), halves, strict=True):
            half[name] = _casting(linear)  # pyright: ignore[reportArgumentType]


def _casting(linear: nn.Module) -> CastingLinear:
    """The same weight (the parameter itself) in a layer that casts it."""
    assert isinstance(linear, nn.Linear) and linear.bias is None
    with torch.device("meta"):
        found = CastingLinear(linear.in_features, linear.out_features, bias=False)
    found.weight = linear.weight
    return found
