"""Packages that only some runs need, and the commands that install them.

The distribution is `flowalign-t2i`; the import name and the command are `flowalign`. On PyPI
`flowalign` is another project, a sequence aligner of the same import name and command: install one
of the two. This module imports the standard library only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

DISTRIBUTION = "flowalign-t2i"
EXTRAS = {
    "open_clip": "clip",
    "scipy": "clip",
    "paddleocr": "paddle",
    "paddle": "paddle",
    "xformers": "gpu",
    "bitsandbytes": "gpu",
    "fastapi": "serve",
    "uvicorn": "serve",
    "torchvision": "vision",
    "wandb": "wandb",
}
"""Import name -> the extra of pyproject.toml that has it."""
INSTALL_NAMES = {"rapidocr": "rapidocr onnxruntime"}
"""Import name -> what pip is asked for, for packages that no extra has."""
CHECKOUT = Path(__file__).resolve().parents[2]  # of a checkout; else site-packages


class MissingPackage(ImportError):
    """A package that is not usable here; the text says who needs it and how to install it."""


def require(module: str, why: str) -> Any:
    """Import a module, or raise MissingPackage. why: who needs it, such as "reward hpsv2 needs"."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        text = f"{why} {module}, which is not usable here ({error}). {hint(module)}"
        raise MissingPackage(text, name=module) from error


def installed(module: str) -> bool:
    """Whether the module can be found, without importing it."""
    try:
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None  # a mere folder of the name has none
    except ValueError:  # it is there, and has no spec
        return True


def hint(module: str) -> str:
    """A sentence that says how to install a package of EXTRAS or OTHERS; in a checkout, from its
    folder."""
    if module not in EXTRAS:
        return f"Run `pip install {INSTALL_NAMES.get(module, module)}`."
    source = f"-e '{CHECKOUT}" if (CHECKOUT / "pyproject.toml").is_file() else f"'{DISTRIBUTION}"
    return f"Run `pip install {source}[{EXTRAS[module]}]'`."


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Entry points of a group, from the packages on sys.path, whose metadata is read once."""
    return _entry_points(group, tuple(sys.path))


@functools.lru_cache
def _entry_points(group: str, path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=group)
