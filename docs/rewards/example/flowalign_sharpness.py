"""How sharp an image is: the mean size of its gradient. A worked example of a reward plugin."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowalign.types import Scores


class Sharpness:
    """Reward in [0,1]: min(1, mean absolute difference of neighbouring pixels * scale).

    parts: "raw", the mean difference itself.
    """

    name = "sharpness"

    def __init__(self, scale: float = 10.0) -> None:
        self.check_options(scale)
        self.scale = scale

    @staticmethod
    def check_options(scale: float = 10.0) -> None:
        """Called before any model is loaded, so that a typo costs nobody an hour."""
        if not scale > 0:
            raise ValueError(f"`scale` of reward sharpness is {scale!r}; give a number above 0.")

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] -> Scores of B; raise or give NaN for what cannot be judged."""
        grey = images.float().mean(1)
        across, down = grey.diff(dim=2).abs().mean((1, 2)), grey.diff(dim=1).abs().mean((1, 2))
        raw = (across + down) / 2
        return Scores.of((raw * self.scale).clamp(max=1), raw=raw)
