"""A teacher on another base: a second frozen transformer labels the student's states."""

import json
import shutil
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowalign.backbone.adapters import read_lora
from flowalign.backbone.lora import misfit
from flowalign.backbone.structure import mismatches
from flowalign.backbone.tiny import MODEL as TINY
from flowalign.checks import Launch, stage_problems
from flowalign.commands.doctor.count import predict
from flowalign.config import (
    ADAPTER,
    ModelConfig,
    OpdStage,
    TrainingStage,
    load,
    parse,
    to_yaml,
)
from flowalign.training.rollout import Noise, sample

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The random model with a wider transformer."""
    return fakes.larger(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="module")
def large_lora(large_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("lora")
    fakes.adapted(large_model, "t").save_adapter("t", folder)
    return str(folder)


def taught(model: str, large: str, output: Path, *overrides: str, **more: str) -> TrainingStage:
    """Task `odd` has a LoRA of the student's base, task `even` the other base."""
    keys = [f"teachers.even={{adapter: null, base: {large!r}}}", "student.label_dtype=float32"]
    keys = keys[: 1 if more else 2]
    return fakes.distillation(model, output, *keys, *overrides, **more)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_labels_are_those_of_that_transformer(
    random_model: str, large_model: str, large_lora: str, tmp_path: Path, guidance: float
) -> None:
    """Without an adapter and with a LoRA of that base, of which there is one copy."""
    odd = f"teachers.odd={{adapter: {large_lora!r}, base: {large_model!r}}}"
    scale = [f"teachers.{name}.guidance={guidance}" for name in ("even", "odd")]
    loop = fakes.wired(taught(random_model, large_model, tmp_path / "run", odd, *scale), moved=True)
    others = list(loop.backbone.others.values())
    assert len(others) == 2 and others[0] is others[1]
    assert others[0].pipe.vae is loop.backbone.pipe.vae
    rollout = loop.rollout(0)
    assert loop.algorithm.teachers
    label = loop.algorithm.teachers(rollout)
    expected = fakes.backbone(large_model)
    for name in ("even", "odd"):
        if name == "odd":
            expected.load_adapter("only", large_lora)
        rows = [i for i, teacher in enumerate(label.teacher) if teacher == name]
        alone = fakes.velocities(expected, rollout, rows, guidance)
        assert torch.equal(label.velocity[rows], alone)
    trained = [n for n, p in loop.backbone.core.named_parameters() if p.requires_grad]
    assert trained and len(trained) == len(loop.parameters)
    assert not any(p.requires_grad for p in others[0].core.parameters())


def test_a_target_beyond_it_has_the_students_base_as_reference(
    random_model: str, large_model: str, tmp_path: Path
) -> None:
    given = ["teachers.even.extrapolate=1.5", "anchor={adapter: null}"]
    loop = fakes.wired(taught(random_model, large_model, tmp_path / "run", *given), moved=True)
    rollout = loop.rollout(0)
    assert loop.algorithm.teachers
    label = loop.algorithm.teachers(rollout)
    rows = [i for i, teacher in enumerate(label.teacher) if teacher == "even"]
    own = fakes.velocities(fakes.backbone(large_model), rollout, rows, 1.0)
    base = fakes.velocities(fakes.backbone(random_model), rollout, rows, 1.0)
    torch.testing.assert_close(label.velocity[rows], base + 1.5 * (own - base), rtol=0, atol=1e-5)


def go(found: TrainingStage, *flags: str) -> int:
    path = Path(found.output).parent / "config.yaml"
    path.write_text(to_yaml(found))
    return fakes.command("--config", path, *flags)


def end(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What a run leaves: its adapter, and its log without seconds."""
    return (run / "adapter" / ADAPTER).read_bytes(), fakes.timeless(run)


def evaluated(model: str, large: str, output: Path, *overrides: str) -> TrainingStage:
    """A run whose student is evaluated at fixed states before it learns and at its end."""
    prompts = output.parent / "prompts.txt"
    tasks = [f"tasks.{index}.validation={prompts}" for index in (0, 1)]
    given = [
        "train.updates=16", "train.checkpoint_every=8", "optimizer.lr=1e-2", "ema=null",
        "lora.targets=[attn.to_out.0, ff.net.2, proj_out]",
        "alarm=null", "evaluation={every: 16, prompts: 4}", "student.fixed_prompts=4",
    ]  # fmt: skip
    return taught(model, large, output, *given, *tasks, *overrides)


@pytest.mark.slow
def test_a_student_comes_nearer_and_resumes_to_the_bit(random_model, large_model: str, tmp_path):
    """The larger base is in no checkpoint and no adapter; other weights of it are refused."""
    large = Path(shutil.copytree(large_model, tmp_path / "large"))
    found = evaluated(random_model, str(large), tmp_path / "run")
    assert go(found) == 0
    run = Path(found.output)
    whole = end(run)
    first, last = (row for row in whole[1] if "fixed_path/even" in row)
    assert last["fixed_path/even"] < 0.8 * first["fixed_path/even"]
    adapter = read_lora(run / "adapter")
    assert misfit(fakes.backbone(random_model).core, adapter) is None
    assert f"`{large}`" in (run / "adapter" / "README.md").read_text()

    shutil.rmtree(run / "checkpoints" / "update_000016")
    assert go(found, "--resume") == 0
    assert end(run) == whole

    shutil.rmtree(run / "checkpoints" / "update_000016")
    file = large / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file({name: weight + 0.01 for name, weight in weights.items()}, file)
    assert go(found, "--resume") == 2


@pytest.mark.slow
def test_it_teaches_by_images(random_model, large_model: str, tmp_path) -> None:
    """sft samples with it."""
    found = taught(random_model, large_model, tmp_path / "a" / "run", stage="sft")
    loop = fakes.wired(found, moved=True)
    rollout = loop.rollout(0)
    rows = [i for i, task in enumerate(rollout.batch.tasks) if task == "even"]
    expected = sample(
        fakes.backbone(large_model), rollout.batch.select(rows), loop.algorithm.plan(0),
        guidance=1.0, noise=Noise((found.seed, 0)),
        places=[(int(rollout.group[row]), int(rollout.copy[row])) for row in rows],
        batch_size=found.rollout.batch_size,
    )  # fmt: skip
    assert rollout.latents is not None and expected.latents is not None
    torch.testing.assert_close(rollout.latents[rows], expected.latents, rtol=0, atol=1e-5)


def changed(model: str, folder: Path, part: str, **entries: Any) -> str:
    """The model with other entries in the config of a part."""
    shutil.copytree(model, folder)
    file = folder / part
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return str(folder)


def test_a_pair_that_matches_is_sound(random_model: str, large_model: str, tmp_path: Path) -> None:
    assert not stage_problems(taught(random_model, large_model, tmp_path / "run"), Launch())


@pytest.mark.parametrize(
    ("part", "entries", "key"),
    [
        ("vae/config.json", {"scaling_factor": 0.5}, "vae.scaling_factor"),
        ("transformer/config.json", {"in_channels": 8}, "latent"),
        ("transformer/config.json", {"pooled_projection_dim": 8}, "text"),
        ("text_encoder_3/config.json", {"num_layers": 3}, "text_encoder_3"),
        ("scheduler/scheduler_config.json", {"shift": 1.5}, "scheduler.shift"),
        ("transformer/config.json", {"pos_embed_max_size": 1}, "positions"),
    ],
)
def test_a_pair_that_does_not_match_is_refused(
    random_model: str, large_model: str, tmp_path: Path, part: str, entries: Any, key: str
) -> None:
    other = changed(large_model, tmp_path / "other", part, **entries)
    (problem,) = stage_problems(taught(random_model, other, tmp_path / "run"), Launch())
    assert problem.key == "teachers.even.base" and key in problem.text


@pytest.mark.parametrize(
    ("teacher", "key"),
    [
        ({"base": "nobody/nothing"}, "teachers.even.base"),
        ({"device": "cuda:63"}, "teachers.even.device"),
        ({"quantization": "nf4"}, "teachers.even.quantization"),
        ({"adapter": "LORA OF THE STUDENT'S BASE"}, "teachers.even"),
    ],
)
def test_a_base_that_cannot_be_had_is_refused(
    random_model: str, large_model: str, tmp_path: Path, teacher: Any, key: str
) -> None:
    found = taught(random_model, large_model, tmp_path / "run")
    raw = found.model_dump(mode="json")
    raw["teachers"]["even"] |= teacher
    if "adapter" in teacher:
        raw["teachers"]["even"]["adapter"] = raw["teachers"]["odd"]["adapter"]
    problems = stage_problems(parse(raw), Launch())
    assert {problem.key for problem in problems} == {key}


def test_the_length_of_a_prompt_is_the_students(tmp_path: Path) -> None:
    """The tiny model has fewer tokens than its family by default, and a copy of it as many."""
    copy = str(shutil.copytree(TINY, tmp_path / "copy"))
    tiny, other = (ModelConfig(id=name, height=96, width=96) for name in ("tiny", copy))
    assert not list(mismatches(tiny, other))


@pytest.mark.slow
def test_the_published_pairs() -> None:
    """Stable Diffusion 3.5 Large labels the states of Medium, and SANA 4.8B those of 1.6B;
    FLUX.2-klein 9B cannot label those of 4B, whose text encoder is smaller."""
    found = load(ROOT / "configs/sd35_medium/student_large.yaml", stage=OpdStage)
    ((key, base),) = found.bases.items()
    assert key == "teachers.large" and not list(mismatches(found.model, base))
    names = (f"Efficient-Large-Model/SANA1.5_{n}B_1024px_diffusers" for n in ("1.6", "4.8"))
    assert not list(mismatches(*(ModelConfig(id=name) for name in names)))
    klein = (ModelConfig(id=f"black-forest-labs/FLUX.2-klein-{n}B") for n in (4, 9))
    assert any(text.startswith("its text_encoder ") for text in mismatches(*klein))
    predicted = predict(found)
    assert predicted.parts["transformers of 1 other bases"] == pytest.approx(16.3e9, rel=0.01)
