"""scripts/first_day.sh: everything that README and docs show works in a fresh clone, and leaves the
files that they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import documents
import pytest

ROOT = documents.ROOT
FOLDERS = {  # the page whose table says what a command leaves -> where the script has it
    "docs/quickstart.md": "outputs/tiny/teacher_ocr_nft",
    "docs/evaluation.md": "outputs/tiny/eval",
}

OPTIONAL = ("layouts/", "warnings.jsonl")  # where a benchmark asks for one; where a run warned


def files_in_tables(page: str) -> list[str]:
    """The first cells of a page's tables with the heading "file or folder"."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| file or folder \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [name for row in table.splitlines() for name in re.findall("`(.+?)`", row.split("|")[1])]


def outputs_in_text() -> list[tuple[str, str]]:
    """(page, path) of the paths in running text that begin with outputs/ and belong to the tiny
    world."""
    return [
        (page.name, token.content)
        for page in documents.pages()
        for _, token in documents.inline(page, "code_inline")
        if re.match(r"outputs/(tiny|demo)[\w./-]*$", token.content)
    ]


@pytest.mark.long
def test_all_steps_work_and_leave_the_files_that_documents_name(tmp_path: Path) -> None:
    """In one test, since the steps take minutes; with this test's own environment."""
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "first_day.sh", tmp_path],
        env=os.environ | {"FIRST_DAY_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_files(tmp_path / "flowalign")


def check_files(clone: Path) -> None:
    """The files that tables list and that texts name, in a clone where all steps were done."""
    for page, folder in FOLDERS.items():
        names = [name for name in files_in_tables(page) if not name.startswith(OPTIONAL)]
        assert len(names) >= 5
        for name in names:
            path = name.replace("MODEL", "base").replace("BENCHMARK", "ocr")
            assert (clone / folder / path).exists(), f"{page}: {name}"
    assert len(outputs_in_text()) >= 3
    for page, path in outputs_in_text():
        assert (clone / path).exists(), f"{page}: {path}"
