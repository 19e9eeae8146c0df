"""Damaged files of checkpoints, adapters and stages are named, and the runs end as ever."""

import subprocess
import sys

import fakes
import pytest


@pytest.mark.long  # the small case is test_resume
def test_damaged_runs_end_as_the_undamaged_one() -> None:
    script = fakes.ROOT / "benchmarks" / "damage.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
