"""The noise levels that a pipeline's scheduler steps along."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from flowalign.backbone.errors import ModelError


def scheduler_sigmas(
    scheduler: Any, steps: int, mu: float | None, *, even_grid: bool = False
) -> Tensor:
    """The schedule [T+1], float32, from 1 down to 0, as a diffusers scheduler gives it to its
    pipeline. The scheduler is not changed. mu: its dynamic shift (None = it has a fixed one).
    even_grid: the pipeline gives it the levels linspace(1, 1/T, T) to shift.

    Raises ModelError for a scheduler that a rollout cannot follow: rollouts take Euler steps
    between these noise levels, and the model's timestep is sigma * 1000.
    """

    def refusal(problem: str) -> ModelError:
        return ModelError(
            f"the model's scheduler {problem}, and rollouts take Euler steps of a flow from sigma "
            "1 to 0. Give the model a FlowMatchEulerDiscreteScheduler "
            "(scheduler/scheduler_config.json)."
        )

    config = scheduler.config
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise refusal(f"is a {type(scheduler).__name__}")
    supported = {"invert_sigmas": False, "stochastic_sampling": False, "num_train_timesteps": 1000}
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise refusal(f"has {key} = {config[key]!r}, where {value!r} is supported")
    changed = copy.deepcopy(scheduler)  # set_timesteps changes its state
    if even_grid:
        changed.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)
    else:
        changed.set_timesteps(steps, mu=mu)
    sigmas = torch.as_tensor(changed.sigmas, dtype=torch.float32, device="cpu")
    if sigmas[0] != 1 or sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()):
        raise refusal(f"gives the noise levels {sigmas.tolist()}, not from 1 to 0")
    return sigmas
