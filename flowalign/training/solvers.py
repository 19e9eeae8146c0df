"""A solver of second order for rollouts without noise, through diffusers' scheduler.

`dpm2` is DPM-Solver++(2M), midpoint (2211.01095): it extrapolates x0 from this step and the one
before, at one forward pass a step, as `euler` has. DiffusionNFT's code samples with it
(2509.16117). It steps along the backbone's own noise levels, from 1 to 0, so the model's shift is
kept. The first step, the second (its extrapolation from sigma = 1 is 0) and the last (the second
derivative would be divided by 0) are Euler steps.
"""

from __future__ import annotations

from diffusers import DPMSolverMultistepScheduler
from torch import Tensor


class Dpm2:
    """The solver of one batch along sigmas [T+1]. It has state, so every batch needs a new one."""

    def __init__(self, sigmas: Tensor) -> None:
        sigmas = sigmas.float().cpu()
        self.scheduler = DPMSolverMultistepScheduler(
            solver_order=2,
            algorithm_type="dpmsolver++",
            solver_type="midpoint",
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            final_sigmas_type="zero",
        )
        # in place of set_timesteps, which computes other levels and warns under numpy 2
        self.scheduler.num_inference_steps = len(sigmas) - 1
        self.scheduler.sigmas = sigmas
        self.scheduler.timesteps = 1000 * sigmas[:-1]
        self.scheduler.set_begin_index(0)  # it counts steps and does not look up timesteps

    def advance(self, x: Tensor, velocity: Tensor) -> Tensor:
        """x [B,C,h,w], float32, at the next noise level. velocity [B,C,h,w], at x."""
        return self.scheduler.step(velocity, 0.0, x, return_dict=False)[0]  # type: ignore[arg-type]
