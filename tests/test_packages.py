"""The name of the distribution, and the commands that install extras."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flowalign.system import packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {"open_clip": "open-clip-torch", "paddle": "paddlepaddle"}  # where pip has another name


def test_the_distribution_and_its_extras_are_those_of_the_project() -> None:
    assert PROJECT["name"] == packages.DISTRIBUTION
    extras = PROJECT["optional-dependencies"]
    for module, extra in packages.EXTRAS.items():
        names = [re.split(r"[<>=\[]", text)[0] for text in extras[extra]]
        assert NAMES.get(module, module) in names, module
    everything = [text for listed in extras.values() for text in listed]
    assert not any(re.match(r"flowalign\b(?!-t2i)", text) for text in everything)


def test_an_extra_is_installed_from_the_checkout_or_by_name(monkeypatch, tmp_path: Path) -> None:
    assert packages.install_command("uvicorn") == f"pip install -e '{ROOT}[serve]'"
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    assert packages.install_command("open_clip") == "pip install 'flowalign-t2i[clip]'"
    assert packages.install_command("hpsv3") == "pip install hpsv3==1.0.0"


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not packages.installed("wandb")
    with pytest.raises(packages.MissingPackage, match=r"wandb.*\[wandb\]"):
        packages.require("wandb", "this needs")
