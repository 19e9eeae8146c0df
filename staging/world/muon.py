"""Muon (https://kellerjordan.github.io/posts/muon) in float32 and over stacks of equal shapes.

torch.optim.Muon multiplies in bfloat16, matrix by matrix: on a CPU without bfloat16 it takes five
times as long as the rest of an update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as published


def orthogonal(gradients: Tensor, steps: int = 4) -> Tensor:
    """The nearest (semi-)orthogonal matrices to [N,rows,columns], about, by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    x = gradients.mT if gradients.shape[-2] > gradients.shape[-1] else gradients
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.mT if gradients.shape[-2] > gradients.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, at the size of AdamW's updates (2502.16982, eq. 4)."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[tuple[nn.Parameter, torch.Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append((p, p.grad))
            for shape, same in shapes.items():
                updates = []
                for p, grad in same:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(grad, 1 - group["momentum"])
                    updates.append(grad.lerp(state["momentum"], group["momentum"]))
                size = 0.2 * max(shape) ** 0.5
                for (p, _), update in zip(same, orthogonal(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * size)


def beside_adamw(
    blocks: list[nn.Parameter], model: nn.Module, lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for these matrices, AdamW for the other weights of a model."""
    chosen = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(blocks, lr=lr),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]
