"""The name of the distribution, the commands that install extras, and PyPI's other flowalign."""

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


def fake(site: Path, name: str, version: str, entry: str, **files: str) -> None:
    """An installed distribution whose command is `flowalign`."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "WHEEL").write_text("Wheel-Version: 1.0")
    (folder / "entry_points.txt").write_text(f"[console_scripts]\nflowalign = {entry}\n")
    for file, text in files.items():
        (folder / file.replace("_json", ".json")).write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site folder that alone holds distributions."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_the_distribution_and_its_extras_are_those_of_the_project() -> None:
    assert PROJECT["name"] == packages.DISTRIBUTION
    assert PROJECT["scripts"]["flowalign"] == packages.OURS[0]
    extras = PROJECT["optional-dependencies"]
    for module, extra in packages.EXTRAS.items():
        names = [re.split(r"[<>=\[]", text)[0] for text in extras[extra]]
        assert NAMES.get(module, module) in names, module
    everything = [text for listed in extras.values() for text in listed]
    assert not any(re.match(r"flowalign\b(?!-t2i)", text) for text in everything)


def test_an_installed_distribution_is_asked_for_its_extra_by_name(site: Path) -> None:
    fake(site, packages.DISTRIBUTION, "0.1.0", packages.OURS[0])
    assert packages.install_command("open_clip") == "pip install 'flowalign-t2i[clip]'"
    assert packages.install_command("hpsv3") == "pip install hpsv3==1.0.0"


def test_a_checkout_that_is_not_installed_is_named_by_its_folder(site: Path) -> None:
    (site / "flowalign_t2i.egg-info").mkdir()  # of a past build
    (site / "flowalign_t2i.egg-info" / "PKG-INFO").write_text("Name: flowalign-t2i\nVersion: 0.1.0")
    assert packages.install_command("uvicorn") == f"pip install -e '{ROOT}[serve]'"


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not packages.installed("wandb")
    with pytest.raises(packages.MissingPackage, match=r"wandb.*\[wandb\]"):
        packages.require("wandb", "this needs")


def test_another_project_of_the_import_name_is_noticed(site: Path) -> None:
    assert packages.other_project() is None
    fake(site, "flowalign", "0.1.0", packages.OURS[0])  # ours, under the name it once had
    assert packages.other_project() is None


@pytest.mark.parametrize(
    ("root", "files", "source"),
    [
        (ROOT, {}, f"-e '{ROOT}'"),
        (Path("/nowhere"), {}, "flowalign-t2i"),
        (Path("/nowhere"), {"direct_url_json": '{"url": "file:///a.whl"}'}, "'file:///a.whl'"),
    ],
)
def test_the_remedy_installs_this_one_from_where_it_came(
    site: Path, monkeypatch: pytest.MonkeyPatch, root: Path, files: dict[str, str], source: str
) -> None:
    monkeypatch.setattr(packages, "ROOT", root)
    fake(site, "flowalign", "0.11", "flowalign:__main__.main")
    fake(site, packages.DISTRIBUTION, "0.1.0", packages.OURS[0], **files)
    problem = packages.other_project() or ""
    assert "0.11" in problem and str(site) in problem
    assert f"--no-deps {source}`" in problem
