"""Models that map images and texts into one space, for the rewards that compare the two.

Legend: B images, P prompts, D the width of that space.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flowalign.backbone.placement import Placement
from flowalign.rewards.preprocess import batches

TEXT_CACHE = 4096  # prompts whose vectors are kept: 16 MB at D = 1024


class TwoTowers:
    """An image tower and a text tower; a subclass says how they are called.

    device: where they compute, None = the GPU if there is one. batch_size: images a forward pass;
    texts are encoded one by one. offload: `flowalign.backbone.placement.Placement`. text_cache: how
    many prompts' vectors are kept, on the CPU; the least recently used go first.
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
        self._text_vector = lru_cache(text_cache)(self._encode_text)

    @torch.no_grad()
    def image_features(self, images: Tensor) -> Tensor:
        """Unit vectors [B,D], float32, of images [B,3,H,W] in [0,1].

        The images pass through the preprocessing as 8-bit pixels, as files would. Raises ValueError
        for pixels that are NaN or infinite.
        """
        parts = [torch.empty(0, self.width, device=self.device)]
        with self.placement:
            for pictures in batches(images, self.batch_size):
                parts.append(normalize(self._encode_images(pictures), dim=-1))
        return torch.cat(parts)

    @torch.no_grad()
    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors [P,D], float32. Kept vectors are reused; a prompt too long is cut. A vector
        depends on its prompt alone, to the bit: not on what else is asked, or was before."""
        with self.placement:
            vectors = [torch.empty(0, self.width), *(self._text_vector(p)[None] for p in prompts)]
            return torch.cat(vectors).to(self.device)

    def cosine(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """cos(image, its prompt) [B], on the CPU, of images [B,3,H,W] and their B prompts."""
        with self.placement:  # offloaded weights are moved once for both towers
            return (self.image_features(images) * self.text_features(prompts)).sum(-1).cpu()

    def _encode_text(self, prompt: str) -> Tensor:
        # alone: the last bits of a row depend on the size of its batch, and which prompts are new
        # together depends on what was kept, so that a resumed run would score otherwise
        return normalize(self._encode_texts([prompt]), dim=-1)[0].cpu()

    def _encode_images(self, pictures: list[np.ndarray]) -> Tensor:
        """uint8 pictures [H,W,3] -> [b,D], of any length."""
        raise NotImplementedError

    def _encode_texts(self, prompts: list[str]) -> Tensor:
        """Prompts -> [p,D], of any length."""
        raise NotImplementedError
