"""Frozen models: on which device their weights lie, and a fingerprint that tells which they are."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from flowalign.system.devices import resolve

FINGERPRINT_VALUES = 64  # values of each weight that go into a fingerprint


class Placement:
    """Keeps a frozen model where it is needed: `with placement:` around every forward pass.

    device: where it computes, resolved here (`flowalign.system.devices.resolve`); None = this
    thread's accelerator if there is one. offload: between calls the weights lie on the CPU, and a
    GPU holds none of them. Each outermost `with` copies all of them over, so give a call many
    images. They are frozen, so nothing is copied back. Calls may nest and come from several
    threads; the last one out clears the device.
    The model is set to eval mode, and its parameters ask for no gradients.
    """

    def __init__(
        self, model: nn.Module, device: str | torch.device | None = None, offload: bool = False
    ) -> None:
        self.device = resolve(device)
        model.requires_grad_(False).eval().to("cpu" if offload else self.device)
        # every parameter and buffer, with the module and the name that it hangs on
        self._weights: list[tuple[nn.Module, str, Tensor]] = []
        if offload:
            self._weights = [
                (owner, name, tensor)
                for owner in model.modules()
                for tensors in (owner.named_parameters, owner.named_buffers)
                for name, tensor in tensors(recurse=False, remove_duplicate=False)
            ]
        self._inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Placement:
        with self._lock, ExitStack() as stack:
            if self._inside == 0:
                stack.callback(self._to_host)  # out of memory half-way: leave nothing behind
                self._to_device()
            stack.pop_all()
            self._inside += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._to_host()

    def _to_device(self) -> None:
        copies: dict[int, Tensor] = {}  # by the original: weights that are tied stay tied
        for owner, name, host in self._weights:
            if id(host) not in copies:
                copy = host.detach().to(self.device)
                if isinstance(host, nn.Parameter):  # a module takes nothing else in its place
                    copy = nn.Parameter(copy, requires_grad=False)
                copies[id(host)] = copy
            setattr(owner, name, copies[id(host)])

    def _to_host(self) -> None:
        for owner, name, host in self._weights:
            setattr(owner, name, host)  # torch keeps the freed memory for this process


def fingerprint(modules: Iterable[nn.Module]) -> str:
    """SHA-256 of the first values of every weight: in a moment, what tells a model from one that
    was trained on in the same folder. Adapters of peft do not count."""
    digest = hashlib.sha256()
    for module in modules:
        for name, weight in module.named_parameters():
            if ".lora_" in name:
                continue
            name = name.replace(".base_layer.", ".")  # what peft calls a layer with an adapter
            first = weight.detach().flatten()[:FINGERPRINT_VALUES].float().cpu()
            digest.update(f"{name} {list(weight.shape)}".encode() + first.numpy().tobytes())
    return digest.hexdigest()
