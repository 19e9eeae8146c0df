"""What rewards with one model and a published score have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from flowalign.rewards.base import RewardBase
from flowalign.types import Metadata, Scores


class Preference(RewardBase):
    """Base of rewards with value = raw / normalizer; a subclass computes `raw`.

    normalizer: sets the scale of the value only. parts: "raw", the score before division.
    source: what else the scores depend on, such as the model, for `describe`.
    """

    def __init__(self, normalizer: float, **source: str) -> None:
        self.normalizer, self.source = normalizer, source

    def raw(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """The published score [B], on the CPU, of images [B,3,H,W] in [0,1] and their prompts."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What the scores depend on."""
        return {"name": self.name, **self.source, "normalizer": self.normalizer}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """images [B,3,H,W] in [0,1] and their B prompts -> Scores of B, on the CPU.

        Raises ValueError for pixels that are NaN or infinite (`flowalign.rewards.score` masks).
        """
        raw = self.raw(images, prompts)
        return Scores.of(raw / self.normalizer, raw=raw)


class Head(nn.Module):
    """width -> 1024 -> 128 -> 64 -> 16 -> 1, linear layers only: [B,width] -> [B].

    Source: christophschuhmann/improved-aesthetic-predictor (MLP). ImageReward's is the same.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # Dropout does nothing here, but it counts in the weights' names: layers.{0,2,4,6,7}.
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors [B,width] -> [B]."""
        return self.layers(vectors).squeeze(-1)
