"""What runs on a second kind of device, in processes of its own (tests/second_device.py)."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest
import second_device
import torch
from packaging.version import Version

FOLDER = Path(__file__).parent


SUBJECTS = {  # files of on_second_device/ are those that pytest does not find by itself
    "rewards": ["on_second_device/rewards.py", "test_bank.py",
                "test_rollout.py", "test_solvers.py"],
    "runs": ["on_second_device/runs.py"],
    "families": ["test_family_stages.py"],
}  # fmt: skip


@pytest.mark.skipif(not second_device.COMPILER, reason="needs a C++ compiler")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="needs torch's C++ of now")
@pytest.mark.parametrize(
    "subject",
    [
        pytest.param("rewards", marks=pytest.mark.slow),
        pytest.param("runs", marks=pytest.mark.slow),
        pytest.param("families", marks=pytest.mark.long),
    ],
)
def test_on_the_second_device(subject: str) -> None:
    paths = [str(FOLDER / name) for name in SUBJECTS[subject]]
    options = ["-q", "-p", "second_device", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are imported
    if subject == "families":  # of every family, two stages
        options += ["-m", "not long and not gpu", "-k", "not nft"]
    given = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(FOLDER)])}
    done = forked.run("-m", "pytest", *options, *paths, env=given, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
