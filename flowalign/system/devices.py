"""Devices with their index, and a stream for a thread that works in parallel to the caller.

"cuda" without an index means the current device of the thread that uses it, and in a new thread
that is device 0 on every rank. So a device is resolved once, in the thread that builds on it.
"""

from __future__ import annotations

import torch


def current() -> torch.device | None:
    """The accelerator of this thread, with its index; None on a machine without one."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_stream().device


def resolve(device: str | torch.device | None = None) -> torch.device:
    """A device with its index: None = this thread's accelerator, or the CPU where there is none;
    "cuda" = this thread's; "cuda:1" and the CPU as they are."""
    if device is not None:
        device = torch.device(device)
        if device.type == "cpu" or device.index is not None:
            return device
    here = current()
    if device is None:
        return here or torch.device("cpu")
    return here if here and here.type == device.type else device


class SideStream:
    """A stream for a second thread on the same device as the thread that makes this, so that
    neither waits for the other's kernels. Does nothing without an accelerator that is in use."""

    def __init__(self) -> None:
        self.device = current() if _in_use() else None
        self.stream = torch.Stream(device=self.device) if self.device else None

    def record(self) -> torch.Event | None:
        """Return an event after all work that the caller has started. The caller calls this."""
        return torch.accelerator.current_stream(self.device).record_event() if self.stream else None

    def activate(self) -> None:
        """Make this thread use the device and the stream. The second thread calls this once."""
        if self.device and self.stream:
            torch.get_device_module(self.device).set_device(self.device)
            torch.accelerator.set_stream(self.stream)

    def wait(self, event: torch.Event | None) -> None:
        """Let the work that the second thread starts from now on run after the event."""
        if self.stream and event:
            self.stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait for all that the second thread has started, so that others may use its results and
        free its inputs."""
        if self.stream:
            self.stream.synchronize()


def _in_use() -> bool:
    # not `current()`: to ask for the current device initialises it, which takes memory
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = torch.get_device_module(kind) if kind else None
    return hasattr(module, "set_device") and getattr(module, "is_initialized", lambda: True)()
