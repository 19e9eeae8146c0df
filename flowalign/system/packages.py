"""Packages that only some runs need, the commands that install them, and what this one is called.

The distribution is `flowalign-t2i`; the import name and the command are `flowalign`. On PyPI
`flowalign` is another project, a sequence aligner that brings the same import name and command.
This module imports the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution
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
    "wandb": "wandb",
}
"""Import name -> the extra of pyproject.toml that has it."""
OTHERS = {"rapidocr": "rapidocr onnxruntime", "hpsv3": "hpsv3==1.0.0"}
"""Import name -> what pip is asked for, for packages that no extra has."""
ROOT = Path(__file__).resolve().parents[2]  # of a checkout; else site-packages
# the command, also of past releases, which were named flowalign
OURS = ("flowalign.commands.cli:main", "flowalign.cli:main")


class MissingPackage(ImportError):
    """A package that is not usable here; the text says who needs it and how to install it."""


def require(module: str, why: str) -> Any:
    """The module, or MissingPackage. why: who needs it, such as "reward hpsv2 needs"."""
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
    """The sentence that says how to install a package of EXTRAS or OTHERS."""
    return f"Run `{install_command(module)}`."


def install_command(module: str) -> str:
    """What installs a package of EXTRAS or OTHERS.

    An extra of the distribution that is installed needs no index for the distribution itself: pip
    and uv take the installed one, editable or not. A checkout that is not installed is named by its
    folder.
    """
    if module not in EXTRAS:
        return f"pip install {OTHERS.get(module, module)}"
    extra = f"[{EXTRAS[module]}]"
    ours = _distribution(DISTRIBUTION)
    if ours and ours.read_text("WHEEL"):  # an egg-info that setuptools left in a checkout has none
        return f"pip install '{DISTRIBUTION}{extra}'"
    return f"pip install -e '{ROOT}{extra}'"


def version(distribution: str) -> str:
    """The version of a distribution, or "not installed"."""
    found = _distribution(distribution)
    return found.version if found else "not installed"


def other_project() -> str | None:
    """What is wrong where PyPI's `flowalign` is installed, too: each of the two overwrites or hides
    files of the other. None where it is not."""
    other = _distribution("flowalign")
    if other is None or any(point.value in OURS for point in other.entry_points):
        return None
    return (
        f"another project's package `flowalign` {other.version} is installed in "
        f"{other.locate_file('')}. It has the same import name and command as {DISTRIBUTION}. Run "
        f"`pip uninstall flowalign`, then `pip install --force-reinstall --no-deps {_origin()}`."
    )


def _origin() -> str:
    """What pip is asked for to install this distribution again."""
    if (ROOT / "pyproject.toml").is_file():
        return f"-e '{ROOT}'"
    ours = _distribution(DISTRIBUTION)
    text = ours.read_text("direct_url.json") if ours else None  # none if it came from an index
    return f"'{json.loads(text)['url']}'" if text else DISTRIBUTION


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
