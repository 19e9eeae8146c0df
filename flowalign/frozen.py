"""Frozen models: where their weights lie (on a device for good, or only while they work), and
which weights they are."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn

from flowalign.devices import resolve

FEW = 64  # values of each weight that tell a model from another


class Placement:
    """Keeps a frozen model where it is wanted: `with placement:` around every forward pass.

    device: where it computes, resolved here (`flowalign.devices.resolve`); None = this thread's
    accelerator if there is one. offload: between calls the weights lie on the CPU, and a GPU holds
    none of them; each outermost `with` copies them over once (all the weights: give a call many
    images). They are frozen, so nothing is copied back. Calls may nest and come from several
    threads; the last one out clears the device.
    The model is set to eval, and its parameters no longer ask for gradients.
    """

    def __init__(
        self, model: nn.Module, device: str | torch.device | None = None, offload: bool = False
    ) -> None:
        self.device = resolve(device)
        self.offload = offload
        home = torch.device("cpu") if offload else self.device
        model.requires_grad_(False).eval().to(home)
        self._weights = _weights(model) if offload else []
        self._inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Placement:
        with self._lock:
            if self._inside == 0 and self._weights:
                try:
                    self._bring()
                except BaseException:  # out of memory half-way: leave nothing behind
                    self._clear()
                    raise
            self._inside += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._clear()

    def _bring(self) -> None:
        moved: dict[int, Tensor] = {}  # weights that are tied stay tied
        for owner, name, host in self._weights:
            if id(host) not in moved:
                moved[id(host)] = _like(host, host.detach().to(self.device))
            setattr(owner, name, moved[id(host)])

    def _clear(self) -> None:
        for owner, name, host in self._weights:
            setattr(owner, name, host)  # torch keeps the memory for who asks next in this process


def _weights(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer with the module and the name that it hangs on."""
    return [
        (owner, name, tensor)
        for owner in model.modules()
        for own in (owner.named_parameters, owner.named_buffers)
        for name, tensor in own(recurse=False, remove_duplicate=False)
    ]


def _like(host: Tensor, moved: Tensor) -> Tensor:
    """A parameter for a parameter, so that its module takes it; a buffer stays a tensor."""
    return nn.Parameter(moved, requires_grad=False) if isinstance(host, nn.Parameter) else moved


def fingerprint(modules: Iterable[nn.Module | None]) -> str:
    """SHA-256 of the first values of every weight: in a moment, what tells a model from one that
    was trained on in the same folder."""
    found = hashlib.sha256()
    for module in modules:
        for name, weight in module.named_parameters() if module is not None else ():
            first = weight.detach().flatten()[:FEW].float().cpu()
            found.update(f"{name} {list(weight.shape)}".encode() + first.numpy().tobytes())
    return found.hexdigest()
