"""The configs of the families beside Stable Diffusion 3.5: sound, and the doctor knows the shapes
of their models."""

import re
from pathlib import Path

import pytest
import torch
from test_sd35_configs import FAMILIES, ROOT, data

from flowalign.backbone import loading
from flowalign.checks import Launch, check_stage, stage_problems
from flowalign.commands import recipe
from flowalign.commands.doctor.advise import Device, forecasts, usable
from flowalign.commands.doctor.count import predict
from flowalign.config import (
    ConfigError,
    EvalStage,
    NftStage,
    RecipeStage,
    Stage,
    TrainingStage,
    load,
)
from flowalign.config.loading import card_of
from flowalign.training.inputs import Inputs

__all__ = ["data"]  # a fixture
PLANTED = [
    ("sana", "model.height=1008", r"model\.height: .*multiples of 32"),
    (
        "sana",
        "model.id=Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        r"model\.dtype: bfloat16.*Sana_1600M_1024px_BF16_diffusers",
    ),
    ("flux", "lora.targets=[attn.to_w]", r"lora\.targets: .*'attn\.to_w'.*attn\.to_q"),
    (
        "flux2",
        "model.id=black-forest-labs/FLUX.2-klein-4B rollout.guidance=4",
        r"rollout\.guidance: 4.*to 1",
    ),
    ("qwen_image", "model.width=1032", r"model\.width: .*16"),
]


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(("family", "change", "problem"), PLANTED)
def test_what_a_family_does_not_have_is_refused_before_it_is_loaded(
    family: str, change: str, problem: str
) -> None:
    path = ROOT / "configs" / family / "teacher_ocr_nft.yaml"
    sound = load(path, stage=TrainingStage)
    assert stage_problems(sound, Launch()) == []
    with pytest.raises(ConfigError, match=problem):
        check_stage(load(path, change.split(), stage=TrainingStage), Launch())


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("task", ["ocr", "pickscore"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_teachers_have_the_settings_that_they_name(family: str, task: str) -> None:
    """Flow-Factory, examples/nft/lora; the scale that a base is sampled at is its card's."""
    path = ROOT / "configs" / family / f"teacher_{task}_nft.yaml"
    teacher, student = load(path), load(path.with_name("student_flow_opd.yaml"))
    assert isinstance(teacher, NftStage)
    known = card_of(teacher.model.id)
    assert known and teacher.rollout.guidance == student.rollout.guidance == known[1]
    assert (teacher.lora.rank, teacher.lora.alpha) == (64, 128)
    nft, end = teacher.nft, 0.7 if family == "flux" else 0.5
    assert (nft.noise_levels, nft.levels, nft.within) == (2, "sampler", (0, end))
    recipe = load(path.with_name("flow_opd.yaml"), stage=Stage)
    assert isinstance(recipe, RecipeStage) and "sampling" not in recipe.stages["table"]
    text = path.read_text()
    assert all(word in text for word in ("Flow-Factory", "DiffusionNFT", "untested"))


FITS = {  # what the heads of the variants promise: bytes of the GPU, and families
    "1x24gb_nf4.yaml": (24e9, ("flux", "flux2", "z_image")),
    "1x48gb_checkpointing.yaml": (48e9, ("flux", "flux2", "z_image", "sana")),
    "1x80gb_checkpointing.yaml": (80e9, FAMILIES),
}


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=pytest.mark.slow if name == "eval" else pytest.mark.long)
        for family in FAMILIES
        for name in ("teacher_ocr_nft", "student_flow_opd", "eval")
    ],
)
def test_the_doctor_passes_it_in_shapes(family: str, name: str) -> None:
    path = ROOT / "configs" / family / f"{name}.yaml"
    config = load(path, stage=Stage)
    assert isinstance(config, TrainingStage | EvalStage)
    found = predict(config)
    for variant, (size, families) in FITS.items():
        if family in families:
            small = load(path, variant=ROOT / "configs" / "variants" / variant, stage=Stage)
            assert isinstance(small, TrainingStage | EvalStage)
            assert predict(small).peak < usable(size, "cuda"), variant
    assert found.peak > found.resident > 1e9 and found.all_phases[-1].flops > 1e12
    if isinstance(config, TrainingStage):
        launch = Launch(advise=True)
        assert not [p for p in stage_problems(config, launch) if p.level == "fault"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "weekend") for family in (*FAMILIES, "sd35_medium")),
        ("sd35_medium", "posters"),
        ("flux", "posters"),
    ],
)
def test_a_recipe_for_one_gpu_takes_a_weekend(family: str, name: str, tmp_path, monkeypatch):
    """With the variant that the head names, on the GPU that it is for."""
    monkeypatch.chdir(tmp_path)  # no prompt set is here: they are taken to be long enough
    path = ROOT / "configs" / family / f"{name}.yaml"
    variant = path.read_text().splitlines()[0].rpartition(" ")[2]
    gpu, size = ("l40s", 48e9) if family == "qwen_image" else ("4090", 24e9)
    whole = load(path, variant=ROOT / variant, stage=Stage)
    found, _ = recipe.stages_and_problems(whole, path.parent)
    predicted = forecasts(found, Device(1, gpu), Inputs(whole.model))
    listed = [forecast.timed() for forecast in predicted if forecast.stage.stage != "merge"]
    for forecast in listed:
        assert forecast.estimate and forecast.estimate.peak < usable(size, "cuda")
    assert 8 < sum(forecast.hours for forecast in listed) <= 24


FOLDERS = sorted({path.parent for path in (ROOT / "configs").glob("*/eval*.yaml")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_no_run_validates_on_a_set_that_an_evaluation_reports(folder: Path) -> None:
    """What a run is chosen by is not what an evaluation reports."""
    found = [load(path, stage=Stage) for path in sorted(folder.glob("[!_]*.yaml"))]
    stages = [stage for stage in found if not isinstance(stage, RecipeStage)]  # made of files here
    evaluations = [stage for stage in stages if isinstance(stage, EvalStage)]
    reported = {mark.prompts for stage in evaluations for mark in stage.benchmarks}
    used: dict[str, set[str]] = {}
    for config in stages:
        if isinstance(config, TrainingStage):
            for task in config.tasks:
                used.setdefault(config.output, set()).update({task.prompts, str(task.validation)})
    assert reported and used
    assert {run: both for run, sets in used.items() if (both := sets & reported)} == {}


def test_the_page_of_families_has_a_row_for_each() -> None:
    text = (ROOT / "docs" / "backbones.md").read_text()
    (table,) = re.findall(r"\| family \| pipeline.*\n\|---.*\n((?:\|.*\n)+)", text)
    rows = {(row.split("|")[1].strip(), row.split("|")[2].strip()) for row in table.splitlines()}
    assert rows == {(f"`{f.name}`", f"`{f.pipeline}`") for f in loading.FAMILIES.values()}


@pytest.mark.usefixtures("data")
def test_a_run_for_another_machine_needs_no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = ROOT / "configs/flux/teacher_ocr_nft.yaml"
    config = load(path, ["model.quantization=nf4"], stage=TrainingStage)
    here, there = (set(stage_problems(config, Launch(elsewhere=e))) for e in (False, True))
    assert there < here
    assert {problem.key for problem in here - there} == {"model.quantization"}


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("family", ["flux2", "z_image"])
def test_the_recipe_of_a_distilled_model_stays_on_its_grid(family: str) -> None:
    path = ROOT / "configs" / family / "turbo.yaml"
    stages, faults = recipe.stages_and_problems(load(path, stage=Stage), path.parent)
    assert not [fault for fault in faults if "is not installed" not in fault.text]
    trained = [stage for stage in stages.values() if isinstance(stage, TrainingStage)]
    assert [stage.stage for stage in trained] == ["gradient", "gradient", "opd"]
    for stage in trained:
        assert (stage.rollout.kind, stage.rollout.steps, stage.rollout.guidance) == (
            "ode", *(card_of(stage.model.id) or ()),
        )  # fmt: skip
