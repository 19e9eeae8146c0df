"""Every script of benchmarks/ runs at its smallest."""

import shlex
import shutil
from pathlib import Path

import fakes
import forked
import pytest

from flowalign.backbone.tiny import TEACHERS

FOLDER = fakes.ROOT / "benchmarks"
# Its words, and "slow" where that takes up to ten seconds, else "long". {} is a new folder.
SMALLEST = {
    "diversity": ("long", "base= --prompts 2 --out {}"),
    "hacks": ("long", "--seeds 0 --runs darkened --out {}"),
    "many_loras": ("long", "--counts 2 --steps 1 --updates 1 --workers 1 --out {}"),
    "many_tasks": ("long", "--updates 1 --limit 2 {}"),
    "one_more": ("long", "--updates 1 --limit 2 {}"),
    "pairs": ("long", "{}/pairs"),
    "predictions memory": ("long", "--width 0.05 --layers 2 --size 64 --cases grpo"),
    "predictions pace": ("long", "teacher_ocr --updates 1"),
    "text_in_style": ("long", "--out {} --steps 1 --updates 1 --prompts 8"),
}
ONE_MORE = {"student": "preference"}
ONE_MORE |= {f"teacher_{name}": name for name in ("geneval", "ocr", "preference")}
ELSEWHERE = {"gpu"}  # has tests of its own


def test_every_benchmark_is_tried() -> None:
    scripts = {p.stem for p in FOLDER.glob("*.py") if "__main__" in p.read_text()}
    assert scripts == {name.split()[0] for name in SMALLEST} | ELSEWHERE


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=getattr(pytest.mark, m)) for n, (m, _) in SMALLEST.items()]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    script, *command = name.split()
    if script == "one_more":  # the models of a seed
        for model, adapter in ONE_MORE.items():
            shutil.copytree(TEACHERS / adapter, tmp_path / model / "adapter")
    words = shlex.split(SMALLEST[name][1].replace("{}", str(tmp_path)))
    done = forked.run(FOLDER / f"{script}.py", *command, *words, cwd=fakes.ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
