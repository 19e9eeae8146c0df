"""How the models' cards on the Hub say that public models are sampled."""

from __future__ import annotations

from pathlib import Path

CARDS: dict[str, tuple[int, float]] = {  # name of the repository -> (steps, guidance)
    "stable-diffusion-3.5-medium": (40, 4.5),
    "stable-diffusion-3.5-large": (28, 3.5),
    "stable-diffusion-3.5-large-turbo": (4, 1.0),  # the card's 0 means none, as 1 does
    "stable-diffusion-3-medium-diffusers": (28, 7.0),
    "flux.1-dev": (50, 3.5),
    "flux.1-krea-dev": (28, 4.5),
    "flux.1-schnell": (4, 1.0),
    "flux.2-dev": (50, 4.0),
    "flux.2-klein-4b": (4, 1.0),
    "flux.2-klein-9b": (4, 1.0),
    "flux.2-klein-base-4b": (50, 4.0),
    "flux.2-klein-base-9b": (50, 4.0),
    "qwen-image": (50, 4.0),
    "qwen-image-2512": (50, 4.0),
    "sana_1600m_1024px_bf16_diffusers": (20, 4.5),
    "sana1.5_1.6b_1024px_diffusers": (20, 4.5),
    "sana1.5_4.8b_1024px_diffusers": (20, 4.5),
    "z-image": (50, 5.0),
    "z-image-turbo": (8, 1.0),  # its 9 are of diffusers' grid before 0.39; the last did nothing
}


def card_of(model: str) -> tuple[int, float] | None:
    """(steps, guidance) of a Hub id, or of a folder that is called like the repository; None = not
    known."""
    return CARDS.get(Path(model).name.lower())
