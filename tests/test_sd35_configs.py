"""The configs of Stable Diffusion 3.5, and what all families share: sound without a model, and the
same run on any hardware."""

import json
import shutil
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import fake_hub
import fakes
import pytest

from flowalign.checks import Launch, check_stage
from flowalign.checks.numbers import volume
from flowalign.commands.doctor.advise import usable
from flowalign.commands.doctor.count import predict
from flowalign.config import (
    ConfigError,
    GrpoStage,
    OpdStage,
    RecipeStage,
    Stage,
    TrainingStage,
    load,
)
from flowalign.training.inputs import Inputs

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs/sd35_medium").glob("[!_]*.yaml"))
FAMILIES = ("flux", "flux2", "qwen_image", "sana", "z_image")
ALL = CONFIGS + sorted(path for f in FAMILIES for path in (ROOT / "configs" / f).glob("[!_]*.yaml"))
VARIANTS = sorted((ROOT / "configs/variants").glob("*gb.yaml"))  # _nf4 is for larger models
MEMORY = {
    "model": {"gradient_checkpointing", "quantization", "offload_text_encoders", "decode_batch"},
    "rollout": {"batch_size"}, "optimizer": {"micro_batch"}, "student": {"label_batch"},
    "evaluation": {"batch_size"}, "sampling": {"batch_size"},
}  # fmt: skip
"""What a variant may change: where and in which portions things are computed, not what."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip_extra: None) -> Iterator[None]:
    """Prompt sets under the names that the configs use, a line each, a picture, and a Hub with the
    public teachers, a layer each."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    for name, thing in (("train", "kite"), ("val", "vase"), ("test", "clock")):
        row = {"tag": "single_object", "include": [{"class": thing, "count": 1}]}
        row["prompt"] = f"a photo of a {thing}"
        (folder / f"geneval_{name}.jsonl").write_text(json.dumps(row))
        (folder / f"ocr_{name}.txt").write_text(f'a sign that says "{thing}"')
        (folder / f"pickscore_sfw_{name}.txt").write_text(f"a {thing} over a lake")
    # public_quick.yaml says how a reader makes it
    shutil.copy(folder / "geneval_test.jsonl", folder / "geneval_ninth.jsonl")
    (folder / "drawbench.txt").write_text("a clock over a lake")
    fakes.write_pairs(folder / "votes", 1, (512, 512))
    picture = tmp_path / "brand" / "pictures" / "a.png"
    picture.parent.mkdir(parents=True)
    picture.touch()
    with fake_hub.serving() as hub:
        fake_hub.go_online(fake_hub.with_public_teachers(hub), monkeypatch, tmp_path / "cache")
        yield


def stages(path: Path, variant: Path | None = None, processes: int = 1) -> dict[str, Stage]:
    """Every stage that a config runs, checked as before a run; with the lettering in place of the
    reader's own LoRA."""
    public = {"sd35_medium": "jieliu/SD3.5M-FlowGRPO-Text", "flux": "stage:lettering"}
    places = ["stages.merge.adapters.0", "stages.table.models.brand"] * (path.stem == "posters")
    own = [f"{place}={public[path.parent.name]}" for place in places]
    config = load(path, own, stage=Stage, variant=variant)
    if isinstance(config, RecipeStage):
        return fakes.stages_of(config, path.parent, processes)
    check_stage(config, Launch(processes))
    return {path.stem: config}


@pytest.mark.slow
@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_config_runs_on_one_gpu_and_on_two_machines_of_eight(path: Path) -> None:
    if path.parent.name != "sd35_medium" and path.stem == "student_flow_opd":
        with pytest.raises(ConfigError, match=r"teacher_ocr_nft/adapter"):
            stages(path)  # alone, it needs the teachers that the recipe trains
        return
    for processes in (1, 16):  # what 16 can share, 2 to 8 can
        found = stages(path, processes=processes)
        assert found, processes
        for stage in found.values():
            if isinstance(stage, GrpoStage):
                # Flow-GRPO's betas are of a KL divided by 2 s^2; the exact one is 4 to 25 times it
                kl = (stage.grpo.kl_weight, stage.grpo.kl)
                assert kl in {(0, "exact"), (0.04, "published")}
            if path.parent.name != "sd35_medium" and not stage.merges:
                assert "stabilityai" not in stage.model.id


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_variant_runs_the_same_images_and_updates(path: Path) -> None:
    plain = stages(path)
    for variant in VARIANTS:
        varied = stages(path, variant, processes=int(variant.stem.split("x")[0]))
        assert plain.keys() == varied.keys()
        for name, stage in plain.items():
            here, there = stage.model_dump(), varied[name].model_dump()
            for section, keys in MEMORY.items():
                for part in (here, there):
                    if part.get(section):
                        part[section] = {k: v for k, v in part[section].items() if k not in keys}
            assert here == there, (variant.stem, name)
            # in 16 bits a ratio is 1 only where rollout and update share their batches
            for run in (stage, varied[name]):
                pathwise = isinstance(run, OpdStage) and run.student.gradient == "pathwise"
                if isinstance(run, TrainingStage) and not pathwise:
                    assert run.rollout.batch_size == run.optimizer.micro_batch


@pytest.mark.usefixtures("data")
def test_few_images_of_a_large_model_are_noted() -> None:
    path = ROOT / "configs/sd35_medium/teacher_ocr_nft.yaml"

    def notes(*changes: str) -> list[str]:
        config = load(path, changes)
        return [problem.text for problem in volume(config, Launch(), Inputs(config.model))]

    assert notes() == []
    (text,) = notes("train.updates=10")
    assert "11,520" in text
    assert notes("train.updates=20") == []


OPD = {  # FACTS, section 9: Flow-OPD on eight GPUs
    "student.weighting": "kl", "student.noise_levels.select": "all", "rollout.steps": 10,
    "rollout.guidance": 4.5, "rollout.noise_level": 0.7, "rollout.group_size": 16,
    "rollout.kind": "sde", "model.height": 512, "lora.rank": 32, "lora.alpha": 64,
    "lora.targets": None, "optimizer.lr": 1e-4, "optimizer.weight_decay": 1e-4,
    "optimizer.updates_per_rollout": 2, "ema.decay": 0.9, "ema.every": 8, "anchor.weight": 0.04,
    "model.max_sequence_length": 128, "evaluation.steps": 40,
}  # fmt: skip
NFT = {  # FACTS, section 11: DiffusionNFT on eight GPUs
    "rollout.prompts": 48, "rollout.group_size": 24, "rollout.steps": 10, "rollout.kind": "ode",
    "rollout.solver": "dpm2", "rollout.guidance": 1.0, "lora.rank": 32, "lora.alpha": 64,
    "model.height": 512, "optimizer.lr": 3e-4, "optimizer.weight_decay": 1e-4,
    "nft.levels": "random", "nft.noise_levels": 9, "nft.within": (0, 1),
    "nft.advantage": "batch_std", "nft.advantage_clip": 5, "nft.kl_weight": 1e-4,
    "ema.decay": 0.9, "evaluation_sampling.steps": 40, "evaluation_sampling.guidance": 1.0,
    "nft.beta": 1.0, "optimizer.updates_per_rollout": 1, "nft.old.decay": 0.5,
    "nft.old.rise": 0.001, "nft.old.after": 0,
}  # fmt: skip
GRPO = {  # FACTS, section 17: Flow-GRPO-Fast without guidance; 1152 images a rollout
    "rollout.kind": "cps", "rollout.noise_level": 0.8, "rollout.guidance": 1.0, "rollout.width": 3,
    "rollout.images": 1152, "optimizer.lr": 3e-4, "optimizer.updates_per_rollout": 2,
    "grpo.advantage": "batch_std", "grpo.clip_range": 1e-5, "grpo.kl_weight": 0,
}  # fmt: skip
AWM = {  # scxue/advantage_weighted_matching, config/dgx_awm.py, geneval_sd3_no_cfg_1node. All three
    # terms of the loss are five times theirs, as they divide advantages by 5.
    "rollout.prompts": 6 * 36 * 8 // 24, "rollout.group_size": 24, "rollout.steps": 14,
    "rollout.guidance": 1.0, "optimizer.lr": 3e-4, "awm.noise_levels": 6, "awm.levels": "sampler",
    "awm.advantage_clip": 5, "awm.kl_weight": 5 * 0.001, "awm.ema_kl_weight": 5,
    "optimizer.max_grad_norm": 5, "awm.weighting": "ghuber",
    "awm.ghuber_power": 0.25, "awm.clip_range": 1, "awm.average.decay": 0.3, "ema.decay": 0.99,
    "ema.every": 1,
}  # fmt: skip
GRPO_MIX = {  # Flow-OPD, config/grpo.py, geneval_ocr_deqa_pickscore_32gpu
    "rollout.prompts": 48, "rollout.group_size": 24, "optimizer.lr": 1e-4,
    "optimizer.updates_per_rollout": 2,
}  # fmt: skip
DIFFUSION_OPD = {  # a dense ODE trajectory
    "rollout.kind": "ode", "rollout.trained": (0, 10), "student.weighting": "mean",
    "student.noise_levels.select": "all",
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo_mix": GRPO_MIX, "student_diffusion_opd": DIFFUSION_OPD,
    "student_flow_opd_paper": OPD, "teacher_geneval_nft_published": NFT,
    "teacher_geneval_awm": AWM, "teacher_geneval": GRPO | {"rollout.prompts": 48},
    "teacher_pickscore": GRPO | {"rollout.prompts": 64},
}  # fmt: skip


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_are_those_of_their_authors(name: str) -> None:
    (found,) = stages(ROOT / f"configs/sd35_medium/{name}.yaml", processes=8).values()
    assert {key: attrgetter(key)(found) for key in SETTINGS[name]} == SETTINGS[name]


@pytest.mark.usefixtures("data")
def test_the_default_student_is_the_one_that_the_study_found_best() -> None:
    """docs/log/2026-11.md: the plain velocity distance at one high-noise state."""
    (student,) = stages(ROOT / "configs/sd35_medium/student_flow_opd.yaml").values()
    assert isinstance(student, OpdStage)
    default = OpdStage.model_fields["student"].default
    assert student.student.model_copy(update={"label_batch": default.label_batch}) == default
    assert (default.weighting, default.noise_levels.select, default.noise_levels.count) == (
        "velocity", "high_noise", 1,
    )  # fmt: skip
    assert (student.rollout.prompts, student.rollout.group_size) == (256, 1)


FITTED = ("student_flow_opd", "student_flow_opd_published", "teacher_geneval",
          "teacher_geneval_nft", "teacher_ocr_nft", "teacher_geneval_awm")  # fmt: skip


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, path, marks=pytest.mark.slow if first else pytest.mark.long)
        for name in FITTED
        for path in VARIANTS
        for first in [(name, path.stem) == ("student_flow_opd", "1x24gb")]
    ],
    ids=lambda value: getattr(value, "stem", value),
)
def test_a_variant_fits_its_gpus(name: str, variant: Path) -> None:
    path = ROOT / "configs/sd35_medium" / f"{name}.yaml"
    count, size = variant.stem.removesuffix("gb").split("x")
    found = predict(load(path, variant=variant), processes=int(count))
    assert found.peak < usable(float(size) * 1e9, "cuda")
