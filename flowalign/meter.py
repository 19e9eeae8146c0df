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

LOWER = frozenset({F.linear, F.conv2d, torch.matmul, torch.bmm, torch.baddbmm, torch.addmm})
UPPER = frozenset({F.layer_norm, F.group_norm, F.softmax, torch.softmax})
"""What autocast computes in its own dtype, and in float32 (on CUDA; on a CPU the norms are not)."""


class Meter(TorchDispatchMode):
    """Inside its `with`: bytes that are alive now, their peak, and floating-point operations.

    Tensors made before do not count. What a kernel takes for itself (cuDNN's workspace, a GEMM's
    scratch) is not seen.
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
            size = rounded(storage.nbytes()) if counts else 0
            self._alive[key] = size
            self.now += size
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


class As(TorchFunctionMode):
    """What `meta` cannot know: the attention kernel of a device type, and its autocast.

    dtype: autocast's, or None. PyTorch on `meta` would write attention out as matrix products; a
    GPU takes flash attention (float32: the memory-efficient kernel), a CPU its own flash kernel.
    """

    def __init__(self, device_type: str, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.device_type, self.dtype = device_type, dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is None:
            given = [*args[:3], *(kwargs[k] for k in ("query", "key", "value")[len(args) :])]
            return self._attention(*self._cast(given, self.dtype))
        if self.dtype and func in LOWER:
            args, kwargs = self._cast(args, self.dtype), self._cast(kwargs, self.dtype)
        elif self.dtype and func in UPPER and self.device_type == "cuda":
            args, kwargs = self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        return func(*args, **kwargs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ops = torch.ops.aten
        if self.device_type == "cpu":
            return ops._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
        if query.dtype == torch.float32:
            grad = torch.is_grad_enabled() and query.requires_grad
            return ops._scaled_dot_product_efficient_attention(query, key, value, None, grad)[0]
        return ops._scaled_dot_product_flash_attention(query, key, value)[0]

    @staticmethod
    def _cast(values: Any, dtype: torch.dtype | None) -> Any:
        def to(value: Any) -> Any:
            known = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if known and dtype else value

        if isinstance(values, dict):
            return {name: to(value) for name, value in values.items()}
        return tuple(to(value) for value in values)


def measure(call: Callable[[], object], device_type: str, dtype: torch.dtype | None) -> Meter:
    """What `call` holds at most and computes, as a device of that type would."""
    with As(device_type, dtype), Meter() as meter:
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
