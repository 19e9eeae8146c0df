"""What is checked of the options that rewards with models have in common. Loads nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from flowalign.adapters.hub import HubAddress


def check_common(
    owner: str,
    *,
    normalizer: float = 1.0,
    batch_size: int = 1,
    text_cache: int = 0,
    offload: bool = False,
    device: str | torch.device | None = None,
    **others: Any,
) -> None:
    """Raise ValueError for a value that cannot work; others are the owner's own to check.

    owner: for the message, such as "reward clipscore".
    """
    if not _is_number(normalizer) or not math.isfinite(normalizer) or normalizer <= 0:
        raise ValueError(
            f"`normalizer` of {owner} is {normalizer!r}; it divides the score, so give a "
            "number above 0."
        )
    if not _is_count(batch_size) or batch_size < 1:
        raise ValueError(f"`batch_size` of {owner} is {batch_size!r}; use 1 or more images.")
    if not _is_count(text_cache) or text_cache < 0:
        raise ValueError(
            f"`text_cache` of {owner} is {text_cache!r}; give how many prompts to keep, 0 for none."
        )
    if not isinstance(offload, bool):
        raise ValueError(f"`offload` of {owner} is {offload!r}; use true or false.")
    try:
        torch.device(device or "cpu")
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"`device` of {owner} is {device!r}; use cpu, cuda, cuda:1 and the like, or "
            f"leave it out ({str(error).splitlines()[0]})."
        ) from error


def check_pretrained(name: str, option: str, possible: str) -> None:
    """Raise ValueError for what is neither the folder of a pretrained model nor a Hub id.

    possible: what the option takes, for the message.
    """
    folder = Path(name).expanduser() if isinstance(name, str) else None
    if folder is None:
        seen = f"it is a {type(name).__name__}, not text"
    elif folder.is_dir() and not any(folder.glob("*config.json")):
        seen = f"folder {folder} holds no config.json"
    elif not folder.is_dir() and HubAddress.parse(name) != HubAddress(name):
        seen = "there is no such folder, and it is no Hub id"
    else:
        return
    raise ValueError(f"`{option}` {name!r}: {seen}. Give {possible}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
