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
    "docs/quickstart.md": "outputs/tiny/teacher_ocr",
    "docs/evaluation.md": "outputs/tiny/eval",
}

OPTIONAL = ("layouts/", "warnings.jsonl")  # where a benchmark asks for one; where a run warned


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clone in which all steps were done, with this test's own environment."""
    work = tmp_path_factory.mktemp("first_day")
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "first_day.sh", work],
        env=os.environ | {"FIRST_DAY_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return work / "flowalign"


def files_in_tables(page: str) -> list[str]:
    """The first cells of a page's tables with the heading "file or folder"."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| file or folder \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [name for row in table.splitlines() for name in re.findall("`(.+?)`", row.split("|")[1])]


@pytest.mark.slow
@pytest.mark.parametrize("page", FOLDERS)
def test_the_files_that_a_page_lists_are_there(clone: Path, page: str) -> None:
    names = [name for name in files_in_tables(page) if not name.startswith(OPTIONAL)]
    assert len(names) >= 5
    for name in names:
        path = name.replace("MODEL", "base").replace("BENCHMARK", "ocr")
        assert (clone / FOLDERS[page] / path).exists(), f"{page}: {name}"


@pytest.mark.slow
def test_the_outputs_that_documents_name_are_there(clone: Path) -> None:
    """Paths in running text that begin with outputs/ and belong to the tiny world."""
    named = [
        (page, token.content)
        for page in documents.pages()
        for _, token in documents.inline(page, "code_inline")
        if re.match(r"outputs/(tiny|demo)[\w./-]*$", token.content)
    ]
    assert len(named) >= 3
    for page, path in named:
        assert (clone / path).exists(), f"{page}: {path}"
