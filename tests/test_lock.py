"""One name, one set of versions and of extras: pyproject.toml, the lock, setup.sh, Dockerfile, and
the commands that a message advises."""

import re
import sys
from pathlib import Path

import documents
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flowalign.system import packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = documents.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_has_a_version_of_every_dependency() -> None:
    versions, extras = locked(), PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["dev"], *extras["serve"], *extras["docs"]]
    own = canonicalize_name(PROJECT["name"])
    requirements = [Requirement(text) for text in [*wanted, *extras["clip"]]]
    checked = 0
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in ("torch", own):  # its builds differ by machine; the extras of this project
            continue
        assert name in versions, f"{name} is not in requirements.lock: make lock"
        assert requirement.specifier.contains(versions[name]), f"{requirement}: make lock"
        checked += 1
    assert checked > 30 and not {"torch", "torchvision", own} & versions.keys()


def test_the_image_has_the_torch_that_setup_installs_and_extras_that_exist() -> None:
    setup = (ROOT / "scripts/setup.sh").read_text()
    torch = re.search(r"FLOWALIGN_TORCH:-(torch==[\d.]+)\}", setup)
    assert torch and f"{torch[1]} " in DOCKERFILE
    minor = int(torch[1].split(".")[1])
    assert f"torchvision==0.{minor + 15}." in DOCKERFILE  # the pairs that PyTorch releases
    extras = re.search(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert extras and set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()


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
    assert packages.hint("uvicorn") == f"Run `pip install -e '{ROOT}[serve]'`."
    monkeypatch.setattr(packages, "CHECKOUT", tmp_path)
    assert packages.hint("open_clip") == "Run `pip install 'flowalign-t2i[clip]'`."
    assert packages.hint("rapidocr") == "Run `pip install rapidocr onnxruntime`."


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not packages.installed("wandb")
    with pytest.raises(packages.MissingPackage, match=r"wandb.*\[wandb\]"):
        packages.require("wandb", "this needs")
