"""A second kind of device on a machine without one: `second:0` and `second:1`.

Their memory and their arithmetic are the CPU's, and all else is a GPU's: an operation refuses
operands of the CPU or of the other index; a thread has a current device, and a new thread begins at
0; generators belong to a device; memory that one stream wrote is refused to another that has not
waited for it. So a test on `second:1` finds what a test on the CPU cannot: a tensor that was made
on the wrong device, a device without an index, a missing wait. It does not find what only real
kernels show (speed, memory, other rounding).

torch lends its key PrivateUse1 to one such kind; second_device.cpp has what it wants in C++. (Its
Python backend has one device, and a thread no current one: autograd refuses index 1.) It is there
for the whole process once `install` was called: tests run it in a process of their own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

NAME = "second"
SOURCE = Path(__file__).with_name("second_device.cpp")
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


COUNT = 2


def install() -> None:
    """Make the devices known to torch, in this process, for good."""
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, Module)


def pytest_configure() -> None:
    """As a plugin, `pytest -p second_device`: every run is on `second:1`, as on rank 1 of two."""
    install()
    torch.accelerator.set_device_index(1)
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{NAME}:1"  # accelerate does not know such devices


class Module:
    """What torch asks of torch.second, as of torch.cuda."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return COUNT

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def set_device(device: int | str | torch.device) -> None:
        torch.accelerator.set_device_index(device)

    @staticmethod
    def get_rng_state(device: int | str | torch.device = NAME) -> Tensor:
        return torch.ops.second.get_rng_state(_index(device))

    @staticmethod
    def set_rng_state(state: Tensor, device: int | str | torch.device = NAME) -> None:
        torch.ops.second.set_rng_state(state, _index(device))

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for index in range(COUNT):
            torch.ops.second.manual_seed(seed, index)

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _index(device: int | str | torch.device) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def library() -> Path:
    """The compiled source, from the last time if neither it nor torch has changed."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    found = Path(tempfile.gettempdir()) / f"flowalign_second_device_{os.getuid()}_{key}.so"
    if found.exists():
        return found
    assert COMPILER, "a C++ compiler is needed"
    root = Path(torch.__file__).parent
    part = found.with_suffix(f".{os.getpid()}")
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden"]
    paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    libraries = ["-ltorch_cpu", "-lc10"]
    subprocess.run([COMPILER, *flags, *paths, str(SOURCE), "-o", str(part), *libraries], check=True)
    os.replace(part, found)
    return found
