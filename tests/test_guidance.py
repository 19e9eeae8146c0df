"""One CFG scale for rollout, student, teachers and anchor, unless a config says otherwise."""

import json
from pathlib import Path
from typing import Any

import fakes
import pytest

from flowalign import config
from flowalign.checks import Launch
from flowalign.checks.adapters import misused
from flowalign.commands import recipe
from flowalign.training.inputs import Inputs
from flowalign.types import Problem

OCR = {"name": "ocr", "prompts": "tiny/ocr_train"}
DATA: dict[str, Any] = {
    "stage": "opd", "model": {"id": "tiny", "height": 96, "width": 96, "max_sequence_length": 14},
    "lora": {"init": "tiny/ocr"}, "teachers": {"ocr": {"adapter": "tiny/ocr"}},
    "anchor": {"adapter": "tiny/ocr"}, "tasks": [OCR], "evaluation": None,
}  # fmt: skip
SMALL = ["rollout.steps=3", "rollout.prompts=2", "rollout.group_size=1", "train.updates=1",
         "student.label_dtype=float32", "train.trackers=[]"]  # fmt: skip


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
        (["student.guidance=2.0"], (2.0, 2.0), {}),
        (["student.guidance=1.0", "teachers.ocr.guidance=4.5"], (4.5, 1.0), {"teachers.ocr": 4.5}),
        (["anchor.guidance=1.0"], (4.5, 1.0), {"anchor": 1.0}),
    ],
)
def test_an_explicit_scale_counts_and_the_others_follow_the_student(
    tmp_path: Path, changes: list[str], scales: tuple[float, float], mixed: dict[str, float]
) -> None:
    found = config.parse({**DATA, "output": str(tmp_path)}, changes)
    assert isinstance(found, config.OpdStage) and found.anchor
    assert tuple(map(found.guidance_of, (found.teachers["ocr"], found.anchor))) == scales
    assert found.mixtures == mixed


def test_the_teachers_of_sft_sample_at_the_guidance_of_the_rollout(random_model, tmp_path) -> None:
    found = fakes.distillation(random_model, tmp_path / "run", "rollout.guidance=2.0", stage="sft")
    loop = fakes.wired(found)
    (source,) = loop.algorithm.sources(["even"]) or []
    assert source.guidance == 2.0


TINY = {"id": "tiny", "height": 96, "width": 96, "max_sequence_length": 14}
TASK = {**OCR, "reward": {"name": "clipscore", "options": {"model": "tiny"}}}
BENCHMARKS = [{"name": "ocr", "prompts": "tiny/ocr_test", "reward": TASK["reward"]}]


def taught(scale: float, kind: str = "ode", init: str | None = None) -> dict[str, Any]:
    stage = "nft" if kind == "ode" else "grpo"
    rollout = {"kind": kind, "guidance": scale}
    return {"stage": stage, "tasks": [TASK], "rollout": rollout, "evaluation": None} | (
        {"lora": {"init": init}} if init else {}
    )


def student(
    labels: float, scale: float, adapter: str | None = "stage:a", **keys: Any
) -> dict[str, Any]:
    teachers = {"ocr": {"adapter": adapter, "guidance": labels}}
    shared = {"tasks": [OCR], "evaluation": None, "rollout": {"guidance": scale, "group_size": 1}}
    return {"stage": "opd", "teachers": teachers, **shared, **keys}


def table(scale: float, **models: str | None) -> dict[str, Any]:
    sampling = {"guidance": scale}
    return {"stage": "eval", "models": models, "benchmarks": BENCHMARKS, "sampling": sampling}


def found(tmp_path: Path, **stages: dict[str, Any]) -> list[Problem]:
    """The problems of a recipe that refuse nothing."""
    data = {"stage": "recipe", "output": str(tmp_path), "model": TINY, "stages": stages}
    whole = config.parse(data, stage=config.RecipeStage)
    _, problems = recipe.stages_and_problems(whole, tmp_path)
    return [problem for problem in problems if problem.level != "refuse"]


MERGE = {"stage": "merge", "adapters": ["stage:a", "stage:b"]}
FREE, GUIDED = taught(1.0), taught(4.5, "sde")


@pytest.mark.parametrize(
    ("stages", "where"),
    [
        ({"a": FREE, "s": student(1.5, 1.0), "t": table(1.0, base=None, s="stage:s")}, []),
        ({"a": GUIDED, "s": student(4.5, 4.5), "t": table(4.5, a="stage:a", s="stage:s")}, []),
        ({"a": GUIDED, "s": student(4.5, 1.0, lora={"init": "stage:a"})}, []),  # it absorbs CFG
        ({"a": FREE, "s": student(4.5, 1.0)}, ["s: teachers.ocr"]),
        ({"a": GUIDED, "s": student(1.0, 1.0)}, ["s: teachers.ocr"]),
        ({"a": FREE, "s": student(1.0, 1.0, anchor={"adapter": "stage:a", "guidance": 4.0})},
         ["s: anchor.adapter"]),
        ({"a": FREE, "b": taught(4.5, "sde", "stage:a")}, ["b: lora.init"]),
        ({"a": FREE, "s": student(4.5, 4.5, adapter=None, lora={"init": "stage:a"})},
         ["s: lora.init"]),
        ({"a": GUIDED, "t": table(1.0, base=None, a="stage:a")}, ["t: models.a"]),
        ({"a": FREE, "b": FREE, "m": MERGE, "t": table(4.5, m="stage:m")}, ["t: models.m"]),
        ({"a": FREE, "b": GUIDED, "m": MERGE}, ["m: adapters.1"]),
        ({"a": FREE, "b": FREE, "m": MERGE, "t": table(1.0, m="stage:m", x="me/x")}, []),
        ({"s": student(4.5, 4.5, adapter="me/hub-lora"), "t": table(1.0, x="me/hub-lora")}, []),
        ({"s": student(4.5, 4.5, adapter="tiny/ocr")}, ["s: teachers.ocr"]),
    ],
)  # fmt: skip
def test_an_adapter_is_used_at_the_scale_that_it_was_trained_at(
    stages: dict[str, Any], where: list[str], tmp_path: Path
) -> None:
    """A factor of two is let pass: labels at 1.5 and 2 were best."""
    problems = found(tmp_path, **stages)
    assert [f"{problem.stage}: {problem.key}" for problem in problems] == where
    assert all("1" in p.text and "4" in p.text for p in problems)  # both scales


def test_the_scale_of_an_earlier_run_is_in_its_folder(tmp_path: Path) -> None:
    """Also of a merge of two."""
    for name in "ab":
        run = config.parse({**FREE, "output": str(tmp_path / name), "model": TINY})
        (tmp_path / name / "adapter").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(config.to_yaml(run))
    adapters = [str(tmp_path / name / "adapter") for name in "ab"]
    keys = {"output": str(tmp_path / "m"), "adapters": adapters}
    merge = config.parse({"stage": "merge", "model": TINY, **keys}, stage=config.MergeStage)
    (tmp_path / "m" / "adapter").mkdir(parents=True)
    (tmp_path / "m" / "config.yaml").write_text(config.to_yaml(merge))
    models = {name: str(tmp_path / name / "adapter") for name in "am"}
    data = {**table(4.5, base=None, **models), "output": str(tmp_path / "t"), "model": TINY}
    stage = config.parse(data, stage=config.EvalStage)
    assert [problem.key for problem in misused(stage, Launch(), Inputs())] == [
        "models.a", "models.m",
    ]  # fmt: skip
    (tmp_path / "a" / "config.yaml").write_text("stage: of another program\n")
    assert [problem.key for problem in misused(stage, Launch(), Inputs())] == ["models.m"]
