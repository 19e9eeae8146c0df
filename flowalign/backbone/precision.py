"""How an adapter computes on its base: float32 weights, the base's arithmetic.

The base is frozen in `model.dtype`. The trained adapter keeps float32 weights ("masters"), as a
step of Adam is lost in 16 bits; its products have the base's dtype. There is no autocast, so that
rollout, labels, update, evaluation and sampling compute alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


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
    """The layers of a model that have adapters, in order."""
    return (module for module in model.modules() if isinstance(module, LoraLayer))


def compute_in_the_bases_dtype(model: nn.Module, name: str) -> None:
    """Let adapter `name` compute in the dtype of its layers' inputs.

    peft would cast each input to the adapter's dtype and the product back. Only adapters of linear
    layers change; those of a convolution stay as in peft.
    """
    for layer in lora_layers(model):
        halves = [half[name] for half in (layer.lora_A, layer.lora_B) if name in half]
        if not halves or not all(type(half) is nn.Linear for half in halves):
            continue
        layer.cast_input_dtype_enabled = False
        for half, linear in zip((layer.lora_A, layer.lora_B), halves, strict=True):
            assert isinstance(linear, nn.Linear) and linear.bias is None
            with torch.device("meta"):
                casting = CastingLinear(linear.in_features, linear.out_features, bias=False)
            casting.weight = linear.weight  # the parameter itself
            half[name] = casting  # pyright: ignore[reportArgumentType]
