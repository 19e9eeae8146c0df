"""Losses on clean images: NFT, and the surrogate likelihoods of AWM. Pure tensors.

B elements, each one (image, noise level): x_sigma = (1 - sigma) x0 + sigma eps, whose velocity is
the target eps - x0. The image that a velocity v predicts is x_sigma - sigma v; it is off by
sigma (target - v), so that no loss here needs x_sigma itself.
"""

from __future__ import annotations

from torch import Tensor

from flowalign import sde

MODES = ("all", "positive_only", "negative_only", "binary", "one_only")
WEIGHTINGS = ("ghuber", "uniform", "t", "t2", "huber")
TINY = 1e-10  # keeps the roots of AWM's weightings differentiable at an error of 0


def chosen_advantage(advantage: Tensor, mode: str) -> Tensor:
    """The advantages [B] that NFT learns from; see `nft.adv_mode`.

    all            as they are
    positive_only  those below 0 become 0
    negative_only  those above 0 become 0
    binary         their sign
    one_only       1 above 0, else 0
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; take one of {', '.join(MODES)}")
    if mode == "all":
        return advantage
    if mode == "binary":
        return advantage.sign()
    if mode == "one_only":
        return (advantage > 0).to(advantage.dtype)
    return advantage.clamp(min=0) if mode == "positive_only" else advantage.clamp(max=0)


def optimality(advantage: Tensor, limit: float) -> Tensor:
    """DiffusionNFT's r [B] in 0..1: A / (2 limit) + 1/2, the probability that an image is optimal.
    0.5 for an advantage of 0."""
    return (advantage / (2 * limit) + 0.5).clamp(0, 1)


def nft_loss(
    velocity: Tensor, old: Tensor, target: Tensor, sigma: Tensor, r: Tensor, *, beta: float
) -> Tensor:
    """The loss [B] of DiffusionNFT (2509.16117, eq. 5 and section 3.3), as its code has it.

        v+ = beta v + (1 - beta) v_old        v- = (1 + beta) v_old - beta v
        loss = (r L(v+) + (1 - r) L(v-)) / beta
        L(v) = mean |x0(v) - x0|^2 / w,   w = max(mean |x0(v) - x0|_1, 1e-5), without gradient

    velocity, old, target [B,C,h,w]; sigma, r [B]; means are over C, h, w. Only velocity carries
    gradient. Where v = v_old both branches agree, and the gradient is (2 r - 1) times that of L:
    matching the images, weighted by their advantages. The authors' code divides by beta, which the
    paper's eq. 5 does not: so the size of a step does not depend on beta there. It also multiplies
    by the limit of the advantages, which the caller does. It computes w in float64; here it has the
    dtype of the velocity.
    """
    old = old.detach().to(velocity.dtype)
    target = target.detach().to(velocity.dtype)
    positive = beta * velocity + (1 - beta) * old
    negative = (1 + beta) * old - beta * velocity
    r = r.to(velocity.dtype)
    good, bad = (_x0_error(v, target, sigma) for v in (positive, negative))
    return (r * good + (1 - r) * bad) / beta


def _x0_error(velocity: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """L [B]: the squared error of the predicted image over its mean absolute error."""
    error = sigma.to(velocity.dtype)[:, None, None, None] * (target - velocity)
    scale = sde.image_mean(error.detach().abs()).clamp_min(1e-5)
    return sde.image_mean(error**2) / scale


def awm_log_prob(
    velocity: Tensor, target: Tensor, sigma: Tensor, *, weighting: str, power: float = 0.25
) -> Tensor:
    """The surrogate log-likelihood [B] of AWM (2509.25050): minus the matching error, weighted.

    m = mean |v - target|^2 over C, h, w, and t = sigma:
        uniform  -m           (the paper's choice)
        t, t2    -t m, -t^2 m
        huber    -t (sqrt(m + 1e-10) - 1e-5)
        ghuber   -t ((m + 1e-10)^power - 1e-10^power) / power   (the default of the authors' code)
    Departure: the code computes in float64 and stores float32; here it has the velocity's dtype,
    so that a ratio is exactly 1 where the weights are those that sampled.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"unknown weighting {weighting!r}; take one of {', '.join(WEIGHTINGS)}")
    error = sde.image_mean((velocity - target.detach().to(velocity.dtype)) ** 2)
    t = sigma.to(error.dtype)
    if weighting == "uniform":
        return -error
    if weighting in ("t", "t2"):
        return -(t if weighting == "t" else t**2) * error
    if weighting == "huber":
        return -t * ((error + TINY).sqrt() - TINY**0.5)
    return -t * ((error + TINY) ** power - TINY**power) / power
