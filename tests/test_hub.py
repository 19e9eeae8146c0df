"""hub.py: what a Hub id is, what of it is downloaded, and what is said when it cannot be."""

import json
from pathlib import Path

import fake_hub
import fakes
import pytest
import torch
from fake_hub import PEFT, online
from huggingface_hub import constants, hf_hub_download, snapshot_download
from safetensors.torch import save_file

import flowalign
from flowalign.backbone.adapters import (
    AdapterError,
    HubError,
    adapter_files,
    adapter_folder,
    is_hub_id,
    read_lora,
    write_lora,
)
from flowalign.backbone.structure import read_family
from flowalign.checks import Launch, check_stage
from flowalign.commands.recipe import file_digest
from flowalign.config import ConfigError, ModelConfig
from flowalign.system.hub_address import HubAddress
from flowalign.system.hub_files import Unreachable
from flowalign.teachers.merge import merge

__all__ = ["online"]  # a fixture


def test_what_is_a_hub_id_and_what_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)  # tests/ is there, so tests/lora is no Hub id
    cases: list[tuple[str, tuple[str, str | None, str] | None]] = [
        ("jieliu/SD3.5M-FlowGRPO-Text", ("jieliu/SD3.5M-FlowGRPO-Text", None, "")),
        ("me/lora@v1.0", ("me/lora", "v1.0", "")),
        ("me/lora@refs/pr/3/best", ("me/lora", "refs/pr/3", "best")),
        ("me/lora@main/runs/best", ("me/lora", "main", "runs/best")),
        ("me/lora@main/a b.safetensors", ("me/lora", "main", "a b.safetensors")),
        ("me/lora/a b.safetensors", ("me/lora", None, "a b.safetensors")),
        ("https://huggingface.co/me/lora/", ("me/lora", None, "")),
        ("https://hf.co/me/lora/blob/v1/a%20b.safetensors", ("me/lora", "v1", "a b.safetensors")),
        *(
            (text, None)
            for text in (
                "https://huggingface.co/me", "https://a.com/me/lora", "me/lora@main/../x", "me/l/x",
                "runs/teacher/adapter", "/me/lora", "../lora", "me", "me//lora", "~/lora",
                "me/lora@", "tests/lora",
            )
        ),
    ]  # fmt: skip
    for source, parts in cases:
        assert is_hub_id(source) == (parts is not None), source
        if parts:
            assert HubAddress.parse(source) == HubAddress(*parts)


def test_an_adapter_and_nothing_else_is_downloaded_once(online: fake_hub.Hub) -> None:
    other = {"optimizer.bin": b"x" * 9, "checkpoints/adapter_model.safetensors": b"y" * 9}
    online.put("me/lora", {**PEFT, **other})
    lora = read_lora("me/lora")
    assert lora.metadata["lora_alpha"] == 5 and len(lora.weights) == 2
    assert sorted(online.downloads) == sorted(PEFT)
    asked = len(online.asked)
    assert read_lora("me/lora").metadata == lora.metadata
    assert len(online.asked) == asked  # from the cache
    before = file_digest("me/lora")
    online.put("me/lora", {**PEFT, "adapter_config.json": PEFT["adapter_config.json"][:-2] + b"7}"})
    assert read_lora("me/lora").metadata["lora_alpha"] == 5
    assert read_lora(adapter_folder("me/lora", newest=True)).metadata["lora_alpha"] == 7
    assert read_lora("me/lora").metadata["lora_alpha"] == 7 and file_digest("me/lora") != before


def test_revisions_and_folders_inside_a_repository(online: fake_hub.Hub) -> None:
    online.put("me/lora", {f"runs/best/{name}": what for name, what in PEFT.items()})
    online.put("me/lora", {"x.safetensors": PEFT["adapter_model.safetensors"]}, revision="old")
    assert read_lora("me/lora@main/runs/best").metadata["lora_alpha"] == 5
    assert read_lora("me/lora@old").metadata["lora_alpha"] == 2
    with pytest.raises(ValueError, match="me/lora@main/runs"):
        read_lora("me/lora@main/runs")


def test_one_of_several_files_is_chosen_before_any_is_fetched(online: fake_hub.Hub) -> None:
    """Gigabytes of other adapters stay there."""
    weights = PEFT["adapter_model.safetensors"]
    names = ["4 steps.safetensors", "8steps.safetensors", "v1/x.safetensors"]
    names.append("v1/[old].safetensors")
    online.put("me/many", {name: weights for name in names})
    for folder in ("me/many", "me/many@main/v1", "https://huggingface.co/me/many/tree/main/v1"):
        with pytest.raises(AdapterError) as caught:
            read_lora(folder)
        example = str(caught.value).rsplit(" as in ", 1)[1]
        assert not online.downloads
        assert read_lora(example).ranks and len(online.downloads) <= 1
        online.downloads.clear()
    for source in (
        "me/many/8steps.safetensors",
        "me/many@main/4 steps.safetensors",
        "https://huggingface.co/me/many/blob/main/4%20steps.safetensors",
        "https://huggingface.co/me/many/resolve/main/v1/x.safetensors?download=true",
    ):
        assert read_lora(source).ranks


def test_a_whole_pipeline_is_refused_before_its_weights_are_fetched(online: fake_hub.Hub) -> None:
    online.put("stabilityai/sd", {"model_index.json": b"{}", "sd.safetensors": b"x" * 9})
    with pytest.raises(ValueError, match="whole pipeline"):
        read_lora("stabilityai/sd")
    assert not online.downloads


def test_a_check_says_what_is_wrong_with_each_id_and_loads_no_model(
    online: fake_hub.Hub, random_model: str, tmp_path: Path
) -> None:
    online.put("me/lora", PEFT)
    online.put("me/gated", PEFT, gated=True)
    faults = {  # by teacher: its source, and what is said of it
        "typo": ("me/lroa", "Repository Not Found"),
        "gated": ("me/gated", "me/gated"),
        "old": ("me/lora@v0", "Revision Not Found"),
        "odd": ("me--you/lora", "Cannot have --"),
        "empty": ("me/lora@main/sub", "me/lora@main/sub"),
    }
    sources = {"good": "me/lora"} | {name: source for name, (source, _) in faults.items()}
    config = fakes.distillation(random_model, tmp_path / "run", "model.id=no/model", alone="even")
    assert isinstance(config, fakes.config.OpdStage)
    taught = config.teachers["even"]
    teachers = {n: taught.model_copy(update={"adapter": s}) for n, s in sources.items()}
    with pytest.raises(ConfigError) as caught:
        check_stage(config.model_copy(update={"teachers": teachers}), Launch())
    for problem, (name, (_, said)) in zip(caught.value.problems, faults.items(), strict=True):
        assert problem.key == f"teachers.{name}" and said in problem.text


def test_offline_the_cache_is_taken_or_missed_with_a_reason(online: fake_hub.Hub, monkeypatch):
    online.put("me/lora", PEFT)
    read_lora("me/lora")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read_lora(adapter_folder("me/lora", newest=True)).metadata["lora_alpha"] == 5
    with pytest.raises(HubError, match="'me/other'"):
        read_lora("me/other")


@pytest.mark.parametrize(
    ("cached", "source"),
    [("a.safetensors", "me/two/b.safetensors"), ("README.md", "me/two/a.safetensors"),
     ("ocr/x.safetensors", "me/two@main/style")],
)  # fmt: skip
def test_a_cache_with_other_files_of_a_repository_does_not_stand_for_one(
    cached: str, source: str, online: fake_hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = PEFT["adapter_model.safetensors"]
    names = ("a.safetensors", "b.safetensors", "ocr/x.safetensors", "style/x.safetensors")
    online.put("me/two", {"README.md": b"# two", **dict.fromkeys(names, lora)})
    hf_hub_download("me/two", cached)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(Unreachable, match="me/two"):
            adapter_files(source).missing()
        for newest in (False, True):
            with pytest.raises(HubError, match=r"\.safetensors of me/two"):
                read_lora(source, newest=newest)
    assert read_lora(source).ranks
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert adapter_files(source).missing() == {} and read_lora(source).ranks


def test_load_and_merge_take_ids(online: fake_hub.Hub, random_model: str, tmp_path: Path) -> None:
    online.put("me/lora", PEFT)
    lora = read_lora("me/lora")
    write_lora(tmp_path / "same", lora.weights, lora.metadata)
    for source in ("me/lora", str(tmp_path / "same")):
        weights = flowalign.load(random_model, lora=source).transformer.state_dict()
        assert (weights["transformer_blocks.0.attn.to_q.lora_A.default_0.weight"] == 1).all()
    merge(["me/lora", tmp_path / "same"], tmp_path / "twice")
    assert read_lora(tmp_path / "twice").metadata["r"] == 4
    with pytest.raises(HubError, match="me/none"):
        flowalign.load("no/model", lora="me/none")  # before the model is looked for


@pytest.mark.slow
def test_a_lora_is_converted_for_the_revision_of_the_model(
    online: fake_hub.Hub, random_model: str, tmp_path: Path
) -> None:
    """Not for the newest one, although its configs are in the cache."""
    root = Path(random_model)
    files = {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}
    smaller = json.loads(files["transformer/config.json"]) | {"num_layers": 1}
    online.put("me/model", files | {"transformer/config.json": json.dumps(smaller).encode()})
    online.put("me/model", files, revision="old")
    assert len(read_family(ModelConfig(id="me/model")).core.transformer_blocks) == 1
    layer = "transformer_blocks.1.attn.to_q"
    halves = {f"diffusion_model.{layer}.lora_{half}.weight": torch.ones(32, 32) for half in "AB"}
    save_file(halves, tmp_path / "x.safetensors")
    snapshot_download("me/model", revision="old")
    pipe = flowalign.load("me/model", tmp_path, revision="old", local_files_only=True)
    assert (pipe.transformer.state_dict()[f"{layer}.lora_A.default_0.weight"] == 1).all()
