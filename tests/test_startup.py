"""What a command imports before it answers: --help, a misspelt key, a missing file, `eval list`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowalign.commands.cli import COMMANDS

ROOT = Path(__file__).parent.parent
HEAVY = {
    "PIL", "accelerate", "diffusers", "fastapi", "httpx", "matplotlib", "pandas", "peft", "rich",
    "scipy", "torch", "transformers", "uvicorn",
}  # fmt: skip
FILES = {"train": "tiny/teacher_ocr", "eval": "tiny/eval", "doctor": "tiny/demo"}
ANSWERED = [
    *([name, "--help"] for name in COMMANDS),
    *(["eval", name, "--help"] for name in ("list", "compare", "table", "curves")),
    *([name, "--config", f"configs/{file}.yaml", "modle.id=x"] for name, file in FILES.items()),
    *([name, "--config", "missing.yaml"] for name in FILES),
    *(["eval", *words.split()] for words in ("compare a b", "table a", "curves a", "list")),
    ["watch", "missing"], ["--version"], ["trian"],
]  # fmt: skip
# One process answers all, one after the other, and prints what each left in sys.modules.
CODE = """
import contextlib, io, json, sys
from flowalign.commands import cli

for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, [name for name in sys.modules if "." not in name]]))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, set[str]]]:
    command = [sys.executable, "-c", CODE, json.dumps(ANSWERED)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = map(json.loads, done.stdout.splitlines())
    both = zip(ANSWERED, rows, strict=True)
    return {" ".join(words): (status, set(modules)) for words, (status, modules) in both}


@pytest.mark.parametrize("words", [" ".join(words) for words in ANSWERED])
def test_it_is_answered_without_heavy_imports(words: str, answers) -> None:
    status, modules = answers[words]
    answered = words.endswith(("--help", "--version", "list"))
    assert status == (0 if answered else 2)
    assert not HEAVY & modules
