"""Packages that only some rewards need, imported when such a reward is built."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, install: str, why: str) -> Any:
    """The module, or an ImportError that says why it is needed and how to get it.

    why: "this reward reads text with"; install: what `pip install` is asked for.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{why} {module}, which is not usable here ({error}). Install it: pip install {install}"
        ) from error
