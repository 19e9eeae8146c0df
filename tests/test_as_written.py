"""README and the quick start as a reader follows them: top to bottom, in one fresh folder, with the
exit status and the lines that the page shows below each command (documents.ends).

What `needs` the network is not run: .ci/run installs and tests by itself. What `needs` minutes is
cut short in the slow test, whose processes are forked, and left out where it cannot be cut. The
long test runs it as it stands.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import documents
import forked
import pytest
import torch
from documents import Block

ROOT = documents.ROOT
CHECKOUT = (  # what a command on the pages reads
    "Makefile", "configs", "flowalign", "pyproject.toml", "requirements.lock", "scripts", "train.py"
)  # fmt: skip
CUT = {
    "flowalign train ": "train.updates=2 rollout.prompts=4 rollout.batch_size=16"
    " optimizer.updates_per_rollout=2 optimizer.micro_batch=16 train.checkpoint_every=1"
    " train.sample_every=1 evaluation.every=2 evaluation.prompts=3 evaluation.watch=[]",
    "python -m flowalign.eval ": "fidelity=null benchmarks.0.limit=2 benchmarks.1.limit=2"
    " benchmarks.2.limit=2",
}
FORKED = {"flowalign": ["-m", "flowalign.commands.cli"], "python": []}


def test_what_a_page_shows_is_the_end_but_for_numbers() -> None:
    printed = (
        "update 1/20\nkept: update 20 of 20 (held-out 0.31; the last: -1e-05)\n\nsamples-2.png\n"
    )
    assert documents.ends(printed, "kept: update 40 of 60 (held-out .592; the last: 2)\n...\n")
    assert documents.ends(printed, "update 1/40\n...\nsamples-2.png\n")
    assert not documents.ends(printed, "update 1/40\n")  # not the end
    assert not documents.ends(printed, "of 20 (held-out 0.31; the last: -1e-05)\n...\n")  # no line
    assert not documents.ends(printed, "kept: update 20 of 20 (held-out NaN; the last: 2)\n...\n")
    assert not documents.ends(printed, "samples-3.png\n")


def cut_short(text: str) -> str:
    """The command with settings that make it take seconds; "" where it has none."""
    for command, settings in CUT.items():
        if text.startswith(command):
            return f"{text.rstrip()} {settings}\n"
    return ""


def follow(block: Block, text: str, folder: Path, whole: bool) -> str:
    """Save or run a block as a reader does; what it printed, standard error among it. In a page cut
    short its commands are forked, which saves the imports, and standard error comes first."""
    if name := block.notes.get("file"):
        (folder / name).write_text(text)
        return ""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",  # no command of these pages may ask the Hub
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "PYTHONUNBUFFERED": "1",  # or what is printed comes after what is logged
    }
    is_shell = block.language in documents.SHELL
    if whole:
        shell = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            shell if is_shell else [sys.executable, "-c", text], cwd=folder, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.place}: {text}\n{done.stdout}"
        return done.stdout
    printed = ""
    script = folder / "block.py"
    script.write_text(text)
    lines = [shlex.split(line) for line in text.splitlines()] if is_shell else [["python", script]]
    for program, *arguments in lines:
        done = forked.run(*FORKED[program], *arguments, env=environment, cwd=folder)
        printed += done.stderr + done.stdout
        assert done.returncode == 0, f"{block.place}: {text}\n{printed}"
    return printed


@pytest.mark.parametrize("page", documents.FOLLOWED, ids=lambda page: page.stem)
@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(False, marks=pytest.mark.slow, id="cut short"),
        pytest.param(True, marks=pytest.mark.long, id="whole"),
    ],
)
def test_a_page_can_be_followed(page: Path, whole: bool, tmp_path: Path) -> None:
    for name in CHECKOUT:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    blocks = list(documents.blocks(page))
    for block, below in zip(blocks, blocks[1:] + blocks[-1:], strict=True):
        needs = block.notes.get("needs", "")
        is_run = block.language in (*documents.SHELL, "python") or "file" in block.notes
        text = block.text
        if "minutes" in needs and not whole:
            text = cut_short(text)
        if not is_run or not text or needs.startswith("network"):
            continue
        printed = follow(block, text, tmp_path, whole)
        if block.language in documents.SHELL:
            assert below.language == "text", f"{block.place}: what does it print?"
            assert documents.ends(printed, below.text), f"{below.place}: it prints\n{printed}"
