"""Runs that give the same bits whenever they are repeated (`train.deterministic`).

On a CPU every run does. On a GPU some backward passes, that of attention among them, sum in
whatever order their threads finish, unless torch is set to its slower deterministic algorithms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flowalign.config import TrainingStage

# torch's own backends, which follow its switch (it then avoids cuDNN's attention). The kernels of
# other packages (flash-attn, xformers, sage) do not know of it.
ATTENTION = (None, "native", "_native_math", "_native_flash", "_native_efficient")
# torch's message (aten/src/ATen/Context.cpp, alertNotDeterministic)
UNDETERMINED = re.compile(r"^(.+?) does not have a deterministic implementation")
WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS: the two that torch's reproducibility notes allow


def problems(config: TrainingStage) -> Iterator[str]:
    """What would make runs differ, or make torch raise in the middle of one."""
    if not config.train.deterministic:
        return
    if config.model.attention not in ATTENTION:
        yield (
            f"model.attention: the backward pass of {config.model.attention!r} is not the same "
            "twice, and train.deterministic asks for that. Use null (torch's own attention, which "
            "obeys), or train.deterministic=false."
        )
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if torch.cuda.is_available() and workspace not in WORKSPACES:
        yield (
            f"train.deterministic: CUBLAS_WORKSPACE_CONFIG is {workspace!r} in this environment, "
            "and matrix products on the GPU may then vary. Start the run with "
            f"CUBLAS_WORKSPACE_CONFIG={WORKSPACES[0]}."
        )


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """If `on`: inside the `with`, an operation without a deterministic form raises; outside, that
    is a TrainingError that names it. The switches are global to the process; they are put back
    afterwards."""
    if not on:
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    was = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False  # benchmark picks kernels by their speed
    try:
        yield
    except RuntimeError as error:
        operation = UNDETERMINED.match(str(error))
        if operation is None:
            raise
        from flowalign.training.algorithm import TrainingError  # only now: it imports diffusers

        raise TrainingError(
            f"train.deterministic: {operation[1]} has no deterministic form on this device, so two "
            "runs could differ. Say train.deterministic=false; or leave out the model, reward or "
            "model.attention that calls it."
        ) from error
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warned)
        cudnn.deterministic, cudnn.benchmark = before
