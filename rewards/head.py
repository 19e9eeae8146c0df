"""The small head that the aesthetic predictor and ImageReward put on a vector of their model."""

from __future__ import annotations

from torch import Tensor, nn


class Head(nn.Module):
    """width -> 1024 -> 128 -> 64 -> 16 -> 1, linear layers only: [B,width] -> [B].

    Source: christophschuhmann/improved-aesthetic-predictor, simple_inference.py (MLP); ImageReward
    took it over. The dropout is for training and does nothing here, but it counts in the names of
    the weights: layers.{0,2,4,6,7}.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
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
