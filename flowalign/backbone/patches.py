"""Latents as tokens: 2x2 latents are one token, with its channels together."""

from __future__ import annotations

from torch import Tensor

from flowalign.backbone.family import Family


def packed(x: Tensor) -> Tensor:
    """[B,C,h,w] -> [B, h/2 * w/2, 4C], row by row; in a token the channels come first."""
    b, c, h, w = x.shape
    tokens = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tokens.reshape(b, h * w // 4, 4 * c)


def unpacked(tokens: Tensor, like: Tensor) -> Tensor:
    """What `packed` made of latents of the shape of `like` [B,C,h,w]."""
    b, c, h, w = like.shape
    return tokens.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)


class PackedFamily(Family):
    """A family whose transformer takes latents as such tokens."""

    @property
    def channels(self) -> int:
        """C of a latent; a token has four latents."""
        return self.core.config.in_channels // 4

    def velocity(self, output: Tensor, x: Tensor) -> Tensor:
        """Tokens -> v [B,C,h,w]."""
        return unpacked(output, x).float()
