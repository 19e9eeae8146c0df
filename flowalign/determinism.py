"""Runs whose every operation gives the same bits whenever it is repeated (`train.deterministic`).

On a CPU that is so without being asked for. On a GPU some backward passes, that of attention among
them, add up in whatever order their threads finish, unless torch is told to take the slower way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flowalign.config.schema import TrainingStage

ATTENTION = (None, "native", "_native_math", "_native_flash", "_native_efficient")
"""Backends of torch, which follow its switch: among its own it then takes none of cuDNN's. The
kernels of other packages (flash-attn, xformers, sage) do not know of it."""
WORKSPACES = (":4096:8", ":16:8")


def problems(config: TrainingStage) -> Iterator[str]:
    """What would break the promise, or torch's own checks in the midst of the run."""
    if not config.train.deterministic:
        return
    if config.model.attention not in ATTENTION:
        yield (
            f"model.attention: the backward pass of {config.model.attention!r} is not the same "
            "twice, and train.deterministic asks for that. Use null (torch's own attention, which "
            "obeys), or train.deterministic=false."
        )
    told = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if torch.cuda.is_available() and told not in WORKSPACES:
        yield (
            f"train.deterministic: CUBLAS_WORKSPACE_CONFIG is {told!r} in this environment, and "
            "matrix products on the GPU may then vary. Start the run with "
            f"CUBLAS_WORKSPACE_CONFIG={WORKSPACES[0]}."
        )


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """If `on`: inside the `with`, an operation without a deterministic form raises. The switches
    are torch's and the whole process's; they are put back."""
    if not on:
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    was = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warned)
        cudnn.deterministic, cudnn.benchmark = before
