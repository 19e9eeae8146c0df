"""`flowalign fetch`: what a run reads comes from a Hub of our own, and nothing else does."""

from pathlib import Path
from typing import Any

import fake_hub
import pytest
from fake_hub import PEFT, Hub, online
from huggingface_hub import constants

from flowalign.backbone.loading import load_pipeline
from flowalign.commands import recipe
from flowalign.commands.cli import main
from flowalign.commands.fetch import needed
from flowalign.commands.prompts import fetch as data
from flowalign.config import Stage, load
from flowalign.config.safe_yaml import dump_yaml
from flowalign.rewards import RewardSpec, build

__all__ = ["online"]  # a fixture

ROOT = Path(__file__).parents[1]
OTHERS = {  # of a repository, which no run reads
    "sd3.5_medium.safetensors": b"x", "text_encoders/clip_g.safetensors": b"x",
    "text_encoder/model.fp16.safetensors": b"x", "transformer/diffusion_pytorch_model.bin": b"x",
    "vae/diffusion_pytorch_model.fp16.safetensors": b"x", "README.md": b"x",
    "text_encoder_3/model.fp16-00001-of-00002.safetensors": b"x",
}  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def stocked(online: Hub, random_model: str) -> Hub:
    """A Hub with a pipeline, an adapter and a judge, and what lies beside them."""
    online.put("me/model", files(Path(random_model)) | OTHERS)
    online.put("me/lora", {**PEFT, "optimizer.bin": b"x", "step_9/x.safetensors": b"x"})
    judge = files(ROOT / "flowalign/backbone/tiny/preference_model")
    online.put("me/judge", judge | {"pytorch_model.bin": b"x", "model.fp16.safetensors": b"x"})
    return online


def config(folder: Path, **changes: Any) -> str:
    mark = {"name": "x", "prompts": "tiny/ocr_test", "limit": 1}
    mark["reward"] = {"name": "clipscore", "options": {"model": "me/judge"}}
    model = {"id": "me/model", "height": 64, "width": 64}
    data = {"stage": "eval", "output": str(folder / "out"), "model": model}
    data |= {"models": {"base": None, "lora": "me/lora"}, "benchmarks": [mark], **changes}
    path = folder / "config.yaml"
    path.write_text(dump_yaml(data))
    return str(path)


def test_a_run_starts_without_a_network_after_it(
    stocked: Hub, tmp_path: Path, random_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Every file that is read and no other; once; and what is missing is said before."""
    path = config(tmp_path)
    assert main(["fetch", "--config", path, "--check"]) == 1
    missing = capsys.readouterr().out
    assert stocked.downloads == []
    assert all(f"missing: me/{name}: " in missing for name in ("model", "lora", "judge"))

    assert main(["fetch", "--config", path]) == 0
    judge = {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json",
             "tokenizer_config.json"}  # fmt: skip
    assert sorted(stocked.downloads) == sorted([*files(Path(random_model)), *PEFT, *judge])
    stocked.downloads.clear()
    for more in ([], ["--check"]):
        assert main(["fetch", "--config", path, *more]) == 0
    assert stocked.downloads == []

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["fetch", "--config", path, "--check"]) == 0
    assert load_pipeline("me/model").transformer is not None
    assert build("clipscore", model="me/judge", device="cpu") is not None
    assert main(["doctor", "--config", path, "--no-model"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["vae/diffusion_pytorch_model.safetensors", "vae/config.json"])
def test_a_download_that_broke_off_is_missed_and_resumed(
    stocked: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, lost: str
) -> None:
    path = config(tmp_path)
    assert main(["fetch", "--config", path]) == 0
    (file,) = (tmp_path / "cache").glob(f"models--me--model/snapshots/*/{lost}")
    file.resolve().unlink()
    file.unlink()
    stocked.downloads.clear()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert main(["fetch", "--config", path, "--check"]) == 1
        assert "not known: me/model" in capsys.readouterr().out
    assert main(["fetch", "--config", path, "--check"]) == 1
    assert "missing: me/model: 1 files" in capsys.readouterr().out
    assert main(["fetch", "--config", path]) == 0
    assert stocked.downloads == [lost]


@pytest.mark.slow
def test_what_cannot_be_had_is_said(stocked: Hub, tmp_path: Path, capsys: Any) -> None:
    path = config(tmp_path, models={"x": "me/none"})
    for more in (["--check"], []):
        assert main(["fetch", "--config", path, *more]) == 1
        assert "missing: me/none" in capsys.readouterr().out
    stocked.put("me/closed", dict(PEFT), gated=True)
    for source in ("me/model", "me/closed"):  # a whole pipeline; terms that nobody accepted
        assert main(["fetch", "--config", path, f"models.x={source}"]) == 1
        assert f"missing: {source}: " in capsys.readouterr().out


@pytest.mark.slow
def test_prompt_sets_are_written_by_their_own_commands(
    stocked: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[list[str]] = []
    monkeypatch.setattr(data, "fetch_set", lambda source, out, force: asked.append([out]) or [])
    sets = ["data/geneval_test.jsonl", "data/drawbench.txt", "elsewhere/ocr_test.txt"]
    reward = {"name": "clipscore", "options": {"model": "me/judge"}}
    marks = [{"name": f"m{i}", "prompts": n, "reward": reward} for i, n in enumerate(sets)]
    path = config(tmp_path, benchmarks=marks)
    assert main(["fetch", "--config", path, "--check"]) == 1 and not asked
    said = capsys.readouterr().out
    assert all(f"missing: {name} (flowalign data fetch" in said for name in sets)
    assert main(["fetch", "--config", path]) == 1  # nothing came, in this test
    assert asked == [["data"], ["data"]]


@pytest.mark.slow
def test_code_of_the_config_is_not_run_and_other_downloads_are_named(
    stocked: Hub, tmp_path: Path, capsys: Any
) -> None:
    judges = [{"name": "no_such_module:f"}, {"name": "ocr", "options": {"engine": "paddleocr"}}]
    mark = {"prompts": "tiny/ocr_test"}
    marks = [{**mark, "name": judge["name"][:3], "reward": judge} for judge in judges]
    assert main(["fetch", "--config", config(tmp_path, benchmarks=marks)]) == 0
    assert "reward ocr" in capsys.readouterr().out


def test_what_the_published_judges_read() -> None:
    def read(name: str, **options: Any) -> list[tuple[str, str]]:
        return [(f.repository, f.patterns[-1]) for f in RewardSpec(name, options).hub_files]

    large = ("openai/clip-vit-large-patch14", "model-*-of-*.safetensors")
    assert read("clipscore") == read("diversity") == [large]
    processor = ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "*.jinja")  # without its weights
    weights = ("yuvalkirstain/PickScore_v1", "model-*-of-*.safetensors")
    assert read("pickscore", offload=True) == [weights, processor]
    assert read("hpsv2") == [("xswu/HPSv2", "HPS_v2.1_compressed.pt")]
    head = ("trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth")
    assert read("aesthetic") == [large, head]
    bert = ("google-bert/bert-base-uncased", "*.jinja")
    assert read("imagereward") == [("THUDM/ImageReward", "ImageReward.pt"), bert]
    assert read("geneval2") == read("dpg") == [("Qwen/Qwen3-VL-8B-Instruct", weights[1])]
    revised = RewardSpec("clipscore", {"model": "me/clip@v1"}).hub_files
    assert [(f.repository, f.revision) for f in revised] == [("me/clip", "v1")]
    none: list[tuple[str, dict[str, Any]]] = [
        ("pickscore", {"model": "tiny"}), ("geneval", {}), ("ocr", {}),
        ("dpg", {"endpoint": {"url": "http://x"}}), ("dpg", {"model": "mplug"}),
        ("remote", {"url": "http://x"}), ("diversity", {"model": "a.b:c"}),
    ]  # fmt: skip
    for name, options in none:
        assert not read(name, **options), name


def test_the_detector_of_geneval_reads_its_own_model_and_open_clips(open_clip: Any) -> None:
    given = {"detector": "mask2former", "detector_options": {"model": "me/other@v2"}}
    network, colors = RewardSpec("geneval", given).hub_files
    assert (network.repository, network.revision) == ("me/other", "v2")
    place = open_clip.get_pretrained_cfg("ViT-L-14", "openai")["hf_hub"]
    assert f"{colors.repository}/" == place and colors.patterns == ("open_clip_model.safetensors",)


def test_a_recipe_is_read_whole() -> None:
    path = ROOT / "configs/sd35_medium/flow_opd_public.yaml"
    stages, _ = recipe.read_stages(load(path, stage=Stage), path.parent)
    found = needed(stages.values())
    assert set(fake_hub.PUBLIC) <= set(found.values())
    assert {f.repository for f in found} > {"stabilityai/stable-diffusion-3.5-medium"}


def test_what_ships_is_asked_of_nobody(stocked: Hub, tmp_path: Path, capsys: Any) -> None:
    """Adapters, prompts and models, whoever has their names on the Hub."""
    stocked.put("tiny/ocr", dict(PEFT))
    judge = {"name": "clipscore", "options": {"model": "tiny"}}
    mark = {"name": "x", "prompts": "tiny/ocr_test", "limit": 1, "reward": judge}
    shipped: dict[str, Any] = {"model": {"id": "tiny"}, "benchmarks": [mark]}
    path = config(tmp_path, models={"base": None, "a": "tiny/ocr"}, **shipped)
    assert main(["fetch", "--config", path]) == 0
    student = str(tmp_path / "both.yaml")
    loras = ["--loras", "tiny/ocr", "tiny/preference"]
    sets = ["--prompts", "tiny/ocr_train", "tiny/preference_train"]
    assert main(["init", "--stage", "opd", *loras, *sets, "--out", student]) == 0
    assert main(["fetch", "--config", student]) == 0
    assert stocked.asked == []


def test_a_repository_of_variants_alone_is_missing(
    stocked: Hub, tmp_path: Path, random_model: str, capsys: Any
) -> None:
    """No run could read what would come."""
    names = {
        name.replace(".safetensors", ".fp16.safetensors"): content
        for name, content in files(Path(random_model)).items()
    }
    stocked.put("me/half", names)
    assert main(["fetch", "--config", config(tmp_path), "model.id=me/half"]) == 1
    assert "missing: me/half has no file" in capsys.readouterr().out
    assert not any("fp16" in name for name in stocked.downloads)
