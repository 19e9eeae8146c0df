"""Killed runs of every stage, continued, end with the files of one that nobody killed."""

import subprocess
import sys

import fakes
import pytest


@pytest.mark.slow
def test_killed_runs_end_as_the_undisturbed_one() -> None:
    script = fakes.ROOT / "benchmarks" / "kill_test.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
