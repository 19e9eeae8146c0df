"""Tensors as safetensors files whose bytes depend on nothing but their content, and a digest of
them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 8  # bytes of the number that a file begins with, and a multiple of them is its head


def save_tensors(tensors: Mapping[str, Tensor], path: Path, head: Mapping[str, str]) -> None:
    """Write a safetensors file. head: the entries of its `__metadata__`.

    safetensors writes those entries in an order that differs from call to call; here they are
    sorted, so the same content has the same bytes.
    """
    from safetensors.torch import save as to_bytes

    data = to_bytes(dict(tensors), metadata=dict(head))
    start = SIZE + int.from_bytes(data[:SIZE], "little")
    entries = json.loads(data[SIZE:start])
    text = json.dumps(entries | {"__metadata__": dict(sorted(head.items()))}, separators=(",", ":"))
    text += " " * (-len(text) % SIZE)  # as safetensors aligns its tensors
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(SIZE, "little") + text.encode())
        file.write(memoryview(data)[start:])


def digest_tensors(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """SHA-256 of tensors on the CPU, with their names, dtypes and shapes, after a text."""
    import torch

    total = hashlib.sha256(about.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
