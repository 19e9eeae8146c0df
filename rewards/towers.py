"""Models that put images and texts into one space: what the rewards that compare them share.

Legend: B images, P prompts, D the width of that space.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flowalign.frozen import Placement
from flowalign.rewards.preprocess import batches
from flowalign.rewards.recent import Recent

TEXT_CACHE = 4096  # prompts whose vectors are kept: 16 MB at D = 1024


class TwoTowers:
    """An image tower and a text tower; a subclass says how they are called.

    device: where they compute, None = the GPU if there is one. batch_size: images or prompts a
    forward pass; it changes no result. offload: `flowalign.frozen.Placement`. text_cache:
    how many prompts' vectors are kept, on the CPU; the least recently used go first.
    """

    def __init__(
        self,
        model: nn.Module,
        width: int,
        device: str | torch.device | None = None,
        batch_size: int = 64,
        offload: bool = False,
        text_cache: int = TEXT_CACHE,
    ) -> None:
        self.placement = Placement(model, device, offload)
        self.device = self.placement.device
        self.width = width  # D
        self.batch_size = batch_size
        self._texts: Recent[Tensor] = Recent(text_cache)

    @torch.no_grad()
    def image_features(self, images: Tensor) -> Tensor:
        """Unit vectors [B,D], float32, of images [B,3,H,W] in [0,1].

        They pass as 8-bit pixels through the preprocessing, as files would. Raises ValueError for
        pixels that are NaN or infinite.
        """
        parts = [torch.empty(0, self.width, device=self.device)]
        with self.placement:
            for some in batches(images, self.batch_size):
                parts.append(normalize(self._see(some), dim=-1))
        return torch.cat(parts)

    @torch.no_grad()
    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors [P,D], float32. A prompt that is known is not encoded; too long is cut."""
        vectors = self._texts.get(prompts, self._encode)
        empty = torch.empty(0, self.width)
        return (torch.stack(vectors) if vectors else empty).to(self.device)

    def cosine(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """cos(image, its prompt) [B], on the CPU, of images [B,3,H,W] and their B prompts."""
        with self.placement:  # once for both towers
            seen, read = self.image_features(images), self.text_features(prompts)
        return (seen * read).sum(-1).cpu()

    def _encode(self, prompts: list[str]) -> list[Tensor]:
        vectors = []
        with self.placement:
            for start in range(0, len(prompts), self.batch_size):
                found = self._read(prompts[start : start + self.batch_size])
                vectors += normalize(found, dim=-1).cpu().unbind()
        return vectors

    def _see(self, pictures: list[np.ndarray]) -> Tensor:
        """uint8 pictures [H,W,3] -> [b,D], of any length."""
        raise NotImplementedError

    def _read(self, prompts: list[str]) -> Tensor:
        """Prompts -> [p,D], of any length."""
        raise NotImplementedError
