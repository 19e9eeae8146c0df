"""What runs on a second kind of device, in processes of its own (tests/second_device.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import second_device

FOLDER = Path(__file__).parent


@pytest.mark.skipif(not second_device.COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("subject", ["device", "rewards", "runs"])
def test_on_the_second_device(subject: str) -> None:
    """tests/on_second_device/<subject>.py, whose tests pytest does not find by itself."""
    path = FOLDER / "on_second_device" / f"{subject}.py"
    options = ["-q", "-p", "no:cacheprovider", "--durations=5"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(FOLDER)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
