"""Every script of benchmarks/ runs at its smallest."""

import shlex
import subprocess
import sys
from pathlib import Path

import fakes
import forked
import pytest

FOLDER = fakes.ROOT / "benchmarks"
TEACHER = fakes.ROOT / "configs" / "tiny" / "teacher_preference_nft.yaml"
# Its words, and "slow" where that takes up to ten seconds, else "long". {} is a new folder.
SMALLEST = {
    "budget": ("slow", "--present --out {} --picture {}/a.png"),
    "credit_ablation": ("long", "--updates 1 --prompts 4 --seeds 0 --only group_std --out {}"),
    "curves": ("slow", "{} --picture {}/a.png"),
    "damage_files": ("long", ""),
    "family_memory": ("long", "--families sana --stages eval"),
    "floors": ("long", "tiny --repeats 1 --prompts 8"),
    "gpu_pass": ("long", "--device cpu --width 0.05 --layers 2 --size 64"),
    "gradient_noise": ("long", f"{TEACHER} --states 2 --rollouts 2"),
    "hacks": ("long", "--seeds 0 --hacks darkened --out {}"),
    "learn_flux": ("long", "--minutes 0.02 --out {}"),
    "many_loras": ("long", "--counts 2 --steps 1 --updates 1 --workers 1 --out {}"),
    "memory": ("long", "--width 0.05 --layers 2 --size 64 --cases grpo"),
    "ocr_signs": ("slow", "--count 2"),
    "pace": ("long", "teacher_ocr --updates 1"),
    "score_overlap": ("long", "--repeats 1"),
    "soak": ("long", "--minutes 0.5 --folder {}"),
    "solver_error": ("long", "--prompts 1"),
    "student_study": ("long", "--updates 1 --prompts 4 --only 'the merge' --out {}"),
    "teacher_ablation": ("long", "--updates 1 --only default --out {}"),
    "teacher_methods": ("slow", "--present --out {} --picture {}/a.png --data {}/a.json"),
    "text_in_style": ("long", "--out {} --steps 1 --updates 1 --prompts 8"),
}
ELSEWHERE = {"gpu", "damage", "kill_test", "seeds"}  # have tests of their own
UNTRIED = {"hpsv3_small"}  # its package needs an environment of its own
RUINED = [  # of merges and evaluations: test_recipe, test_store; of one file: test_resume
    pytest.param("kill_test --only grpo_1 --kills 2 --workers 1", marks=pytest.mark.long),
    pytest.param("kill_test", marks=pytest.mark.long),
    pytest.param("damage", marks=pytest.mark.long),
]


def test_every_benchmark_is_tried() -> None:
    scripts = {p.stem for p in FOLDER.glob("*.py") if "__main__" in p.read_text()}
    assert scripts == SMALLEST.keys() | ELSEWHERE | UNTRIED


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=getattr(pytest.mark, m)) for n, (m, _) in SMALLEST.items()]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    words = shlex.split(SMALLEST[name][1].replace("{}", str(tmp_path)))
    done = forked.run(FOLDER / f"{name}.py", *words, cwd=fakes.ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("words", RUINED)
def test_runs_that_are_killed_or_damaged_end_as_the_undisturbed_one(words: str) -> None:
    """In real processes."""
    name, *rest = words.split()
    command = [sys.executable, FOLDER / f"{name}.py", "--quick", *rest]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
