"""Every script of benchmarks/ runs at its smallest."""

import shlex
from pathlib import Path

import fakes
import forked
import pytest

FOLDER = fakes.ROOT / "benchmarks"
# Its words, and "slow" where that takes up to ten seconds, else "long". {} is a new folder.
SMALLEST = {
    "floors": ("long", "tiny --repeats 1 --prompts 8"),
    "hacks": ("long", "--seeds 0 --hacks darkened --out {}"),
    "many_loras": ("long", "--counts 2 --steps 1 --updates 1 --workers 1 --out {}"),
    "ocr_signs": ("slow", "--count 2"),
    "predictions memory": ("long", "--width 0.05 --layers 2 --size 64 --cases grpo"),
    "predictions pace": ("long", "teacher_ocr --updates 1"),
    "text_in_style": ("long", "--out {} --steps 1 --updates 1 --prompts 8"),
}
ELSEWHERE = {"gpu", "seeds"}  # have tests of their own


def test_every_benchmark_is_tried() -> None:
    scripts = {p.stem for p in FOLDER.glob("*.py") if "__main__" in p.read_text()}
    assert scripts == {name.split()[0] for name in SMALLEST} | ELSEWHERE


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=getattr(pytest.mark, m)) for n, (m, _) in SMALLEST.items()]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    script, *command = name.split()
    words = shlex.split(SMALLEST[name][1].replace("{}", str(tmp_path)))
    done = forked.run(FOLDER / f"{script}.py", *command, *words, cwd=fakes.ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
