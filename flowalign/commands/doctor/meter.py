"""Peak memory and FLOPs of a piece of code, measured on tensors without data.

On PyTorch's `meta` device an operation computes shapes only, so a model of billions of weights runs
in a second on any machine. The meter follows every storage from allocation to release, as a
device's allocator does. What autograd saves is therefore counted, and needs no formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

BLOCK = 512  # bytes, the unit of the CUDA allocator


class Pass(NamedTuple):
    """What a call holds at most, in bytes, and computes."""

    peak: int
    flops: float


class Meter(TorchDispatchMode):
    """Inside its `with`: bytes allocated now, their peak, and floating-point operations.

    Tensors from before the `with` do not count. If one is released inside (the 16-bit copy of fp8
    weights), its bytes are subtracted. Workspaces of kernels are not counted, except in a GPU's
    convolution: cuDNN copies its input to put the channels last (measured on an H100: 1030 MiB for
    an input of 1024).
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.now = self.peak = self.flops = 0
        self._sizes: dict[int, int] = {}  # address of a storage -> bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):  # an unknown input is from before the `with`
            self._track(tensor, counts=False)
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count:
            self.flops += count(*args, **kwargs, out_val=out)
        for tensor in _tensors(out):
            self._track(tensor, counts=True)
        workspace = 0
        if self.device_type == "cuda" and func._overloadpacket is torch.ops.aten.convolution:
            workspace = rounded(args[0].nbytes)
        self.peak = max(self.peak, self.now + workspace)
        return out

    def _track(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = rounded(storage.nbytes())
            self.now += self._sizes[key] if counts else 0
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class DeviceAttention(TorchFunctionMode):
    """The attention kernel of a device type, on `meta`.

    By itself `meta` writes attention out as matrix products and holds the full matrix. A GPU takes
    flash attention (in float32 or with a mask the memory-efficient kernel), a CPU its own flash
    kernel.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        query, key, value, mask = map(arguments.get, names)
        assert query is not None and key is not None
        if mask is not None:  # added to the scores; a mask of truth values becomes one of numbers
            mask = mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
        ops = torch.ops.aten
        if self.device_type == "cpu":
            flash = ops._scaled_dot_product_flash_attention_for_cpu
            return flash(query, key, value, attn_mask=mask)[0]
        if query.dtype == torch.float32 or mask is not None:
            grad = torch.is_grad_enabled() and query.requires_grad
            return ops._scaled_dot_product_efficient_attention(query, key, value, mask, grad)[0]
        return ops._scaled_dot_product_flash_attention(query, key, value)[0]


def measure(call: Callable[[], object], device_type: str) -> Pass:
    """Run `call` on meta tensors; returns its peak and FLOPs on a device of that type."""
    with DeviceAttention(device_type), Meter(device_type) as meter:
        call()
    return Pass(meter.peak, meter.flops)


def measure_blocks(call: Callable[[], object], device_type: str, *modules: nn.Module) -> Pass:
    """Measure a call like `measure`, but faster. In a run of four or more equal blocks of the
    modules, two blocks run, and then three; every further block costs as much as the third."""
    every = (part for module in modules for part in module.modules())
    lists = [blocks for blocks in every if isinstance(blocks, nn.ModuleList)]
    groups = (list(group) for blocks in lists for _, group in groupby(blocks, _shapes))
    runs = [group for group in groups if len(group) > 3]

    def measured(longer: int | None = None) -> Pass:
        dropped = {id(m) for n, run in enumerate(runs) for m in run[3 if n == longer else 2 :]}
        whole = [(blocks, blocks._modules) for blocks in lists]
        try:
            for blocks, every in whole:
                left = (block for block in every.values() if id(block) not in dropped)
                blocks._modules = {str(index): block for index, block in enumerate(left)}
            return measure(call, device_type)
        finally:
            for blocks, every in whole:
                blocks._modules = every

    first = peak, flops = measured()
    for number, run in enumerate(runs):
        more = measured(number)
        peak += (len(run) - 2) * (more.peak - first.peak)
        flops += (len(run) - 2) * (more.flops - first.flops)
    return Pass(peak, flops)


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return type(module), [(n, p.shape, p.dtype) for n, p in module.named_parameters()]


def size_of(*modules: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared ones count once."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return size({id(tensor): tensor for tensor in tensors}.values())


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors that share no storage."""
    return sum(rounded(tensor.nbytes) for tensor in tensors)


def rounded(size: int) -> int:
    """Bytes that the CUDA allocator takes for `size` bytes."""
    return -(-size // BLOCK) * BLOCK


def _tensors(tree: Any) -> Iterator[Tensor]:
    # runs at every operation: torch's tree_leaves is several times slower
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
