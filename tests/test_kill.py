"""Killed runs of every stage, continued, end with the files of one that nobody killed."""

import subprocess
import sys

import fakes
import pytest

ONE = ["--only", "grpo_1", "--kills", "2"]  # merges and evaluations: test_recipe, test_store


@pytest.mark.parametrize(
    "words", [pytest.param(ONE, marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.long)]
)
def test_killed_runs_end_as_the_undisturbed_one(words: list[str]) -> None:
    script = fakes.ROOT / "benchmarks" / "kill_test.py"
    command = [sys.executable, script, "--quick", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
