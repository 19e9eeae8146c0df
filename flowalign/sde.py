"""One sampling step as a Gaussian: schedule, transition, sample, log-probability and KL.

Pure tensors. Shape legend: B images, T steps, latent C x h x w. sigma is the noise level
(1 = noise, 0 = image), x_sigma = (1 - sigma) * x0 + sigma * eps, velocity = eps - x0, and
dt = sigma_next - sigma < 0.

Every result is made of element-wise operations and of sums inside one image, so that the row of
an image does not depend on which images share its batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowalign.types import Gaussian, Schedule

KINDS = ("sde", "cps", "ode")
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def sigmas(
    num_steps: int,
    shift: float = 1.0,
    *,
    terminal: float | None = None,
    num_train_timesteps: int = 1000,
) -> Tensor:
    """The schedule [T+1], float32, from 1 down to 0.

    sigma -> shift * sigma / (1 + (shift - 1) * sigma) on an even grid, as diffusers'
    FlowMatchEulerDiscreteScheduler(shift=shift, shift_terminal=terminal) gives it: the ends of
    the grid are shifted once (in float32), and then the grid, ends included, once more. With
    `terminal`, 1 - sigma is scaled so that the last sigma before 0 is `terminal`.
    """
    if num_steps < 1 or (terminal and num_steps < 2):
        raise ValueError(f"num_steps is {num_steps}; take at least 1, or 2 with a terminal")

    def shifted(grid: Tensor) -> Tensor:
        return shift * grid / (1 + (shift - 1) * grid)

    steps = torch.tensor([num_train_timesteps, 1], dtype=torch.float32)  # as diffusers rounds them
    high, low = (s * num_train_timesteps for s in shifted(steps / num_train_timesteps).tolist())
    stride = (low - high) / max(num_steps - 1, 1)
    grid = high + stride * torch.arange(num_steps, dtype=torch.float64)
    grid = shifted(grid / num_train_timesteps)
    if terminal:  # diffusers' stretch_shift_to_terminal
        grid = 1 - (1 - grid) / ((1 - grid[-1]) / (1 - terminal))
    return torch.cat([grid.float(), torch.zeros(1)])


def transition(
    x: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    noise_level: float,
    kind: str = "sde",
    sigma_max: float | Tensor,
) -> Gaussian:
    """The Gaussian that x [B,C,h,w] at `sigma` moves to at `sigma_next`.

    sigma and sigma_next are numbers or [B], so a batch may mix steps. sigma_max is the second
    point of the schedule: it stands in for sigma = 1 in the denominator of s (nowhere else).

    sde (Flow-GRPO, 2505.05470), noise level a:
        s = a * sqrt(sigma / (1 - sigma)), std = s * sqrt(-dt)
        mean = x * (1 + s^2 / (2 sigma) * dt) + v * (1 + s^2 (1 - sigma) / (2 sigma)) * dt
    cps (coefficients-preserving sampling, 2509.05952), a in [0, 1]:
        std = sigma_next * sin(a pi / 2), x0 = x - sigma v, x1 = x + (1 - sigma) v
        mean = (1 - sigma_next) * x0 + sqrt(sigma_next^2 - std^2) * x1
    ode, and any kind at a = 0: the Euler step x + dt * v, std 0, to the bit.

    Computed in float32, or in float64 where x is float64; the result has that dtype.
    Departure from the published code: that returns s; std here is the transition's own.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; take one of {', '.join(KINDS)}")
    if not 0 <= noise_level <= (1 if kind == "cps" else math.inf):
        raise ValueError(f"noise_level is {noise_level}; take one >= 0 (for cps, <= 1)")
    if x.shape != velocity.shape:
        raise ValueError(f"x {list(x.shape)} and velocity {list(velocity.shape)} differ in shape")
    sigma, sigma_next = _column("sigma", sigma, x), _column("sigma_next", sigma_next, x)
    x, velocity = x.to(sigma.dtype), velocity.to(sigma.dtype)
    dt = sigma_next - sigma
    if kind == "ode" or noise_level == 0:
        return Gaussian(mean=x + dt * velocity, std=torch.zeros_like(dt))
    if not bool(((sigma <= 1) & (dt < 0) & (sigma_next >= 0)).all()):
        raise ValueError(
            "a stochastic step needs 1 >= sigma > sigma_next >= 0, "
            f"got {sigma.flatten().tolist()} -> {sigma_next.flatten().tolist()}"
        )
    if kind == "cps":
        std = sigma_next * math.sin(noise_level * math.pi / 2)
        clean = x - sigma * velocity
        noise = x + (1 - sigma) * velocity
        mean = (1 - sigma_next) * clean + torch.sqrt(sigma_next**2 - std**2) * noise
    else:
        if not 0 <= sigma_max < 1:
            raise ValueError(f"sigma_max is {sigma_max}; take the second point of the schedule")
        capped = torch.where(sigma == 1, float(sigma_max), sigma)  # s is infinite at sigma = 1
        s = noise_level * torch.sqrt(sigma / (1 - capped))
        drift = s**2 / (2 * sigma)
        mean = x * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt
        std = s * torch.sqrt(-dt)
    return Gaussian(mean=mean, std=std)


def scheduled_transition(
    schedule: Schedule, x: Tensor, velocity: Tensor, steps: Tensor, *, noisy: bool = True
) -> Gaussian:
    """The transition at steps [B] of a schedule, from x [B,C,h,w]; if not noisy, the Euler step."""
    sigmas = schedule.sigmas.to(x.device)
    return transition(
        x,
        velocity,
        sigmas[steps],
        sigmas[steps + 1],
        noise_level=schedule.noise_level,
        kind=schedule.kind if noisy else "ode",
        sigma_max=float(sigmas[1]),
    )


def sample(gaussian: Gaussian, noise: Tensor) -> Tensor:
    """mean + std * noise [B,C,h,w]; noise is standard normal, drawn by the caller's generator."""
    return gaussian.mean + gaussian.std * noise.to(gaussian.mean.dtype)


def log_prob(gaussian: Gaussian, x_next: Tensor) -> Tensor:
    """log N(x_next; mean, std^2) [B], the MEAN over C, h, w (Flow-GRPO's convention).

    -(x_next - mean)^2 / (2 std^2) - log std - log sqrt(2 pi), for every kind.
    Departure: for cps the published code gives -mean((x_next - mean)^2), with no variance, which
    is 2 std^2 times ours up to constants. A deterministic transition has no density: ValueError.
    """
    require_noise(gaussian)
    mean, std = gaussian.mean, gaussian.std
    squares = (x_next.to(mean.dtype) - mean) ** 2 / (2 * std**2)
    return -image_mean(squares) - torch.log(std).flatten() - LOG_SQRT_2PI


def kl(p: Gaussian, q: Gaussian) -> Tensor:
    """KL(p || q) [B] of Gaussians of equal std, the MEAN over C, h, w.

    |mean_p - mean_q|^2 / (2 std^2). Between two velocities under the SDE this is Flow-OPD's
    (2605.08063) (-dt) / 2 * (1 / s + s (1 - sigma) / (2 sigma))^2 * |v_p - v_q|^2.
    Departure: Flow-OPD's code divides by 2 s^2 where std^2 = s^2 (-dt), so theirs = ours * (-dt).
    """
    require_noise(p)
    if not bool((p.std == q.std).all()):
        raise ValueError(
            f"kl needs equal std, got {p.std.flatten().tolist()} and {q.std.flatten().tolist()}; "
            "build both transitions from the same sigmas, noise level and kind"
        )
    return image_mean((p.mean - q.mean) ** 2 / (2 * p.std**2))


def _column(name: str, sigma: float | Tensor, x: Tensor) -> Tensor:
    """A number or [B] as [B,1,1,1], in the dtype that x is computed in."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    sigma = torch.as_tensor(sigma)
    if sigma.shape not in ((), (x.shape[0],)):
        raise ValueError(f"{name} must be a number or [{x.shape[0]}], got {list(sigma.shape)}")
    return sigma.to(x.device, dtype).expand(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))


def image_mean(x: Tensor) -> Tensor:
    """The mean of each image, [B,...] -> [B]. One axis at a time: a sum over all at once may be
    split by batch size."""
    while x.ndim > 1:
        x = x.mean(-1)
    return x


def require_noise(gaussian: Gaussian) -> None:
    """ValueError for a transition without noise: it has no density."""
    if not bool((gaussian.std > 0).all()):
        raise ValueError(
            f"std must be positive, got {gaussian.std.flatten().tolist()}: a deterministic "
            "transition (ode, noise_level 0, the last cps step) has no log-probability and no KL; "
            "leave that step out, or use the velocities"
        )
