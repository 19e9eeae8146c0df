"""The worked example of docs/rewards/plugins.md, installed as a second package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fakes
import forked
import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed, in a folder of its own."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "docs/rewards/example", folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    isolated = ["--no-build-isolation", "--disable-pip-version-check"]
    where = folder / "site"
    subprocess.run([*pip, *isolated, "--target", where, source], check=True)
    paths = [str(where), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def flowalign(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run("-m", "flowalign.commands.cli", *arguments, env=environment)


@pytest.mark.slow
def test_the_doctor_finds_the_plugin_by_its_entry_point(installed: dict[str, str]) -> None:
    done = flowalign(installed, "doctor", "--reward", "sharpness", "scale=20")
    assert done.returncode == 0, done.stderr
    assert "scenes with its prompt" in done.stdout
    done = flowalign(installed, "doctor", "--reward", "sharpness", "scale=-1")
    assert done.returncode == 2 and "a number above 0" in done.stderr
    done = flowalign(installed, "doctor", "--reward", "sharpnes")
    assert done.returncode == 2 and "did you mean 'sharpness'" in done.stderr


@pytest.mark.slow
def test_a_run_trains_with_the_plugin(installed: dict[str, str], random_model: str, tmp_path: Path):
    config = fakes.settings(random_model, tmp_path / "run", "train.updates=1")
    raw = config.model_dump(mode="json")
    raw["tasks"][0]["reward"] = {"name": "sharpness", "options": {"scale": 5.0}}
    path = tmp_path / "plugin.yaml"
    path.write_text(json.dumps(raw))
    done = flowalign(installed, "train", "--config", str(path))
    assert done.returncode == 0, done.stderr[-2000:]
    (logged,) = fakes.lines(tmp_path / "run")
    assert logged["reward"] == pytest.approx(min(1, 5 * logged["reward/raw"]), rel=1e-4)


def test_the_example_measures_what_it_says() -> None:
    namespace: dict = {}
    exec((ROOT / "docs/rewards/example/flowalign_sharpness.py").read_text(), namespace)
    stripes = torch.zeros(1, 3, 4, 4)
    stripes[..., ::2] = 0.04
    images = torch.cat([stripes, torch.ones(1, 3, 4, 4)])
    found = namespace["Sharpness"]()(images, ["", ""], [{}] * 2)
    assert torch.allclose(found.value, torch.tensor([0.2, 0.0]))
