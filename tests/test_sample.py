"""`flowalign sample`: settings of the model or of the LoRA's run, and nothing overwritten."""

from pathlib import Path
from typing import Any

import fakes
import families
import pytest
import torch

from flowalign.backbone.adapters import describe_adapter, read_lora, write_lora
from flowalign.commands import arguments, cli, sample
from flowalign.commands.sample import Plan, settle
from flowalign.config import to_yaml
from flowalign.system.images import pixels_of
from flowalign.training.algorithm import STUDENT


def plan(*words: str, lora: str | None = None) -> Plan:
    return settle(arguments.sample_arguments(["a star", *words]), read_lora(lora) if lora else None)


def chosen(own: Plan) -> tuple[int, float, int]:
    return own.sampling.steps, own.sampling.guidance, own.model.height


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "model, wanted",
    [
        ("tiny", (10, 1.0, 96)),
        ("stabilityai/stable-diffusion-3.5-medium", (40, 4.5, 1024)),
        ("stabilityai/stable-diffusion-3.5-large-turbo", (4, 1.0, 1024)),
    ],
)
def test_steps_guidance_and_size_are_the_models_own(model: str, wanted: tuple[int, float, int]):
    own = plan("--model", model)
    assert chosen(own) == wanted and own.model.height == own.model.width
    given = plan("--model", model, "--steps", "3", "--guidance", "2", "--size", "96")
    assert chosen(given) == (3, 2.0, 96)


def test_a_loras_run_says_its_settings_and_its_model(random_model: str) -> None:
    changes = ("rollout.steps=7", "rollout.window=null", "rollout.guidance=3.0")
    config = fakes.settings(random_model, Path("run"), *changes)
    backbone, adapter = fakes.adapted(random_model), Path("run/adapter")
    backbone.name = random_model
    backbone.save_adapter(STUDENT, adapter)
    Path("run/config.yaml").write_text(to_yaml(config))
    own = plan(lora=str(adapter))
    assert (own.model.id, *chosen(own)[:2]) == (random_model, 7, 3.0)
    assert (own.model.height, own.model.width) == (config.model.height, config.model.width)
    assert plan("--steps", "2", lora=str(adapter)).sampling.steps == 2
    Path("run/config.yaml").unlink()
    assert plan(lora=str(adapter)).sampling.steps == 28  # of the pipeline in diffusers
    lora = read_lora(str(adapter))
    stranger = {name: weight[:, :3] if "_A" in name else weight for name, weight in
                lora.weights.items()}  # fmt: skip
    write_lora("other", stranger, describe_adapter(lora.ranks, lora.alphas, False, None))
    with pytest.raises(ValueError, match="--model"):  # it is not taken for one of tiny
        plan(lora="other")


@pytest.mark.parametrize(
    "words",
    [
        ["--size", "100"], ["--size", "x"], ["--steps", "2.5"], ["--images", "0"], ["--seed", "-1"],
        ["--guidance", "nan"], ["--dtype", "bf16"],
        ["--size", "99200"], ["--out", "x.txt"], ["--lora", "nowhere"],
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_before_a_model_is_loaded(words: list[str], monkeypatch, capsys):
    monkeypatch.setattr(sample, "draw", lambda *_: pytest.fail("a model would be loaded"))
    try:
        status = cli.main(["sample", "a star", *words])
    except SystemExit as refused:  # by argparse
        status = refused.code
    error = capsys.readouterr().err
    assert status == 2 and words[1] in error and "Traceback" not in error
    assert words[0] in error or words[0] == "--lora"
    assert not list(Path().iterdir())


def test_no_file_is_overwritten(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sample, "draw", lambda *_: {"base": torch.zeros(1, 3, 64, 64)})
    for name in ("samples.png", "samples-2.png"):
        assert cli.main(["sample", "a star"]) == 0
        assert capsys.readouterr().out == f"{name}\n" and Path(name).is_file()
    monkeypatch.setattr(sample, "draw", lambda *_: pytest.fail("a model would be loaded"))
    assert cli.main(["sample", "a star", "--out", "samples.png"]) == 2
    assert "samples.png" in capsys.readouterr().err


def test_images_larger_than_the_grid_shows_are_written_one_by_one(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sample, "GRID_SIDE", 64)  # the tiny model draws at most 128 pixels
    words = ["sample", "a star", "a sign", "--size", "80", "--steps", "2", "--images", "2"]
    assert cli.main([*words, "--out", "new/big.webp"]) == 0
    files = {file.name: file.read_bytes() for file in Path("new/big").glob("*.png")}
    assert {*files} == {"001_01.png", "001_02.png", "002_01.png", "002_02.png"}
    assert {pixels_of(data).shape for data in files.values()} == {(3, 80, 80)}
    assert len({*files.values()}) == 4
    assert pixels_of(Path("new/big.webp").read_bytes()).shape[0] == 3
    printed = capsys.readouterr().out
    assert "new/big/" in printed and "new/big.webp" in printed


def test_several_loras_are_drawn_side_by_side_of_one_noise(capsys) -> None:
    words = ["sample", "a star", "--steps", "2", "--images", "2", "--out", "all.png"]
    loras = ["--lora", "base", "--lora", "tiny/ocr", "--lora", "spelling=tiny/ocr"]
    assert cli.main([*words, *loras]) == 0
    files = {name: Path(f"all/{name}/001_02.png").read_bytes() for name in
             ("base", "ocr", "spelling")}  # fmt: skip
    assert files["ocr"] == files["spelling"] != files["base"]
    assert "6 images" in capsys.readouterr().out
    assert Path("all.png").is_file()
    words = ["sample", "a star", "--steps", "2", "--lora", "tiny/ocr", "--out", "a.png"]
    assert cli.main(words) == 0  # one alone


@pytest.mark.parametrize(
    "name", ["schnell", pytest.param("klein_distilled", marks=pytest.mark.slow)]
)
def test_a_distilled_model_of_any_name_is_sampled_without_guidance(name: str) -> None:
    families.pipeline(name).save_pretrained("mine")
    assert plan("--model", "mine").sampling.guidance == 1.0
    words = ["--model", "mine", "--steps", "1", "--size", "64", "--out", "a.png"]
    assert cli.main(["sample", "a star", *words]) == 0 and Path("a.png").is_file()
