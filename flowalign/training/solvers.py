"""Solvers of higher order for rollouts without noise, through diffusers' schedulers.

All step along the backbone's own noise levels sigmas [T+1], from 1 to 0, so the model's shift is
kept. Their last step, to sigma = 0, is an Euler step: the second derivative would be divided by 0.

| name | order | forward passes | method |
|---|---|---|---|
| euler | 1 | T | x + (sigma_next - sigma) v; `flowalign.sde.transition`, no scheduler |
| heun | 2 | 2T - 1 | Karras et al. (2206.00364), algorithm 1: the mean slope of both ends |
| dpm2 | 2 | T | DPM-Solver++(2M), midpoint (2211.01095): x0 of this step and the one before |

`dpm2` is what DiffusionNFT's code samples with (2509.16117): there the first step, the second (its
extrapolation from sigma = 1 is 0) and the last are Euler steps, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchHeunDiscreteScheduler
from torch import Tensor


def _heun(sigmas: Tensor) -> Any:
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(len(sigmas) - 1)
    # every level but the first and 0 comes twice: the end of a step, and the start of the next
    scheduler.sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])
    return scheduler


def _dpm2(sigmas: Tensor) -> Any:
    scheduler = DPMSolverMultistepScheduler(
        solver_order=2,
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        final_sigmas_type="zero",
    )
    # in place of set_timesteps, whose levels these would replace, and which warns under numpy 2
    scheduler.num_inference_steps = len(sigmas) - 1
    scheduler.sigmas, scheduler.timesteps = sigmas, 1000 * sigmas[:-1]
    return scheduler


SCHEDULERS: dict[str, Callable[[Tensor], Any]] = {"heun": _heun, "dpm2": _dpm2}


def forwards(solver: str, steps: int, taken: int | None = None) -> int:
    """Forward passes of the first `taken` of so many steps, the last of which ends at sigma = 0;
    None = of all."""
    taken = steps if taken is None else taken
    return 2 * taken - (taken == steps) if solver == "heun" else taken


class Solver:
    """One batch on its way along sigmas [T+1]. It has a state, so every batch needs its own.

    Neither scheduler takes noise levels as they are: `set_timesteps` computes a schedule of its
    own. So they are set from outside; of the schedulers' `timesteps` only the number counts.
    """

    def __init__(self, name: str, sigmas: Tensor) -> None:
        self.name, self.sigmas = name, sigmas.float().cpu()
        self.scheduler = SCHEDULERS[name](self.sigmas)
        self.scheduler.set_begin_index(0)  # counts its steps, and looks no timestep up

    def levels(self, step: int) -> list[float]:
        """The noise levels at which a step asks for the velocity, in order."""
        last = step == len(self.sigmas) - 2
        return self.sigmas[step : step + (2 if self.name == "heun" and not last else 1)].tolist()

    def advance(self, x: Tensor, velocity: Tensor) -> Tensor:
        """x [B,C,h,w], float32, at the next noise level of `levels`; after the last one of a step
        that is the step's result. velocity [B,C,h,w], at x."""
        return self.scheduler.step(velocity, 0.0, x, return_dict=False)[0]
