"""What a piece of code would hold and compute, read off tensors that have a shape but no data.

On the `meta` device every operation runs as shapes only: a model of billions of weights passes in
a second, on any machine. The meter watches the storages that come and go, as the allocator of a
device would, so that what autograd saves is counted by what it does and not by a formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

BLOCK = 512  # bytes: the CUDA allocator's unit


class Meter(TorchDispatchMode):
    """Inside its `with`: bytes that are alive now, their peak, and floating-point operations.

    Tensors made before do not count, unless they go (fp8 weights, while they are 16-bit ones): then
    there is as much room. What a kernel takes for itself (cuDNN's workspace, a GEMM's scratch) is
    not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):  # of before, unless it is known
            self._know(tensor, counts=False)
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count:
            self.flops += count(*args, **kwargs, out_val=out)
        for tensor in _tensors(out):
            self._know(tensor, counts=True)
        self.peak = max(self.peak, self.now)
        return out

    def _know(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = rounded(storage.nbytes())
            self.now += self._alive[key] if counts else 0
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


class As(TorchFunctionMode):
    """What `meta` cannot know: the attention kernel of a device type.

    PyTorch on `meta` would write attention out as matrix products; a GPU takes flash attention
    (float32: the memory-efficient kernel), a CPU its own flash kernel.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is None:
            given = [*args[:3], *(kwargs[k] for k in ("query", "key", "value")[len(args) :])]
            return self._attention(*given)
        return func(*args, **kwargs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ops = torch.ops.aten
        if self.device_type == "cpu":
            return ops._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
        if query.dtype == torch.float32:
            grad = torch.is_grad_enabled() and query.requires_grad
            return ops._scaled_dot_product_efficient_attention(query, key, value, None, grad)[0]
        return ops._scaled_dot_product_flash_attention(query, key, value)[0]


def measure(call: Callable[[], object], device_type: str) -> Meter:
    """What `call` holds at most and computes, as a device of that type would."""
    with As(device_type), Meter() as meter:
        call()
    return meter


def size_of(*modules: nn.Module) -> int:
    """Bytes of all weights and buffers."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
    return size(found.values())


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors that share nothing."""
    return sum(rounded(t.numel() * t.element_size()) for t in tensors)


def rounded(size: int) -> int:
    """Bytes as an allocator gives them."""
    return -(-size // BLOCK) * BLOCK


def _tensors(tree: Any) -> Iterator[Tensor]:
    """(torch's own tree_leaves is several times slower, and this runs at every operation.)"""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
