"""One CFG scale for rollout, student, teachers and anchor, unless a config says otherwise."""

import json
from pathlib import Path
from typing import Any

import fakes
import pytest

from flowalign import config

OCR = {"name": "ocr", "prompts": "tiny/ocr_train"}
DATA: dict[str, Any] = {
    "stage": "opd",
    "model": {"id": "tiny", "height": 64, "width": 64, "max_sequence_length": 16},
    "lora": {"init": "tiny/ocr"},
    "teachers": {"ocr": {"adapter": "tiny/ocr"}},
    "anchor": {"adapter": "tiny/ocr"},
    "tasks": [OCR],
    "evaluation": None,
}
SMALL = ["rollout.steps=3", "rollout.prompts=2", "rollout.copies=1", "student.label_dtype=float32",
         "train.updates=1", "train.trackers=[]"]  # fmt: skip


def first_update(folder: Path, *overrides: str) -> dict[str, float]:
    """What the first update of a student that starts as its own teacher and anchor measures."""
    found = config.parse({**DATA, "output": str(folder)}, [*SMALL, *overrides])
    fakes.wired(found).run()
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.slow
def test_a_student_that_starts_as_its_own_teacher_keeps_its_velocity(tmp_path: Path) -> None:
    """With guidance as it is by default. (At a teacher's 1.0 and a rollout's 4.5 thirty updates
    took OCR from .70 to .02.)"""
    seen = first_update(tmp_path / "run")
    apart = first_update(tmp_path / "apart", "teachers.ocr.guidance=1.0", "anchor.guidance=1.0")
    for loss in ("distill", "anchor"):
        assert abs(seen[loss]) < 1e-9 and apart[loss] > 1e-2, loss


@pytest.mark.parametrize(
    ("changes", "scales", "mixed"),
    [
        ([], (4.5, 4.5), {}),
        (["rollout.guidance=1.0"], (1.0, 1.0), {}),
        (["student.guidance=2.0"], (2.0, 2.0), {}),
        (["student.guidance=1.0", "teachers.ocr.guidance=4.5"], (4.5, 1.0), {"teachers.ocr": 4.5}),
        (["anchor.guidance=1.0"], (4.5, 1.0), {"anchor": 1.0}),
        (["teachers.ocr.guidance=4.5"], (4.5, 4.5), {}),
    ],
)
def test_an_explicit_scale_counts_and_the_others_follow_the_student(
    tmp_path: Path, changes: list[str], scales: tuple[float, float], mixed: dict[str, float]
) -> None:
    found = config.parse({**DATA, "output": str(tmp_path)}, changes)
    assert isinstance(found, config.OpdStage) and found.anchor
    assert tuple(map(found.guidance_of, (found.teachers["ocr"], found.anchor))) == scales
    assert found.mixtures == mixed


def test_the_teachers_of_sft_sample_at_the_guidance_of_the_rollout(
    random_model: str, tmp_path: Path
) -> None:
    found = fakes.distillation(random_model, tmp_path / "run", "rollout.guidance=2.0", stage="sft")
    loop = fakes.wired(found)
    (source,) = loop.algorithm.sources(["even"]) or []
    assert source.guidance == 2.0
