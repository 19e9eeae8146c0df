"""adapters.py: what peft and diffusers write is read with its scale, and what is no LoRA is not."""

import copy
import json
import logging
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from fake_hub import peft
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from torch.testing import assert_close

import flowalign
from flowalign.backbone import Backbone
from flowalign.backbone.adapters import (
    ADAPTER,
    AdapterError,
    adapter_folder,
    file_digest,
    read_lora,
    write_lora,
)
from flowalign.checks import Launch, check_stage
from flowalign.checks.adapters import readable
from flowalign.commands.cli import main
from flowalign.config import ConfigError, parse, read
from flowalign.system.manifest import MANIFEST
from flowalign.teachers.bank import Bank, Member
from flowalign.teachers.merge import merge
from flowalign.training.inputs import Inputs

PATTERNS = {  # regular expressions and endings, as peft reads them
    "rank_pattern": {r"transformer_blocks\.0\.attn\.to_[qk]": 2, "attn.to_out.0": 5},
    "alpha_pattern": {"attn.to_q": 3, r"transformer_blocks\.1\..*": 10},
}
KINDS: dict[str, dict[str, Any]] = {
    "official": {"r": 32, "lora_alpha": 64, "target_modules": fakes.TARGETS},  # Flow-OPD's
    "rslora": {"r": 4, "lora_alpha": 6, "target_modules": fakes.TARGETS, "use_rslora": True},
    "patterns": {"r": 4, "lora_alpha": 6, "target_modules": fakes.TARGETS, **PATTERNS},
    "regex": {"r": 3, "lora_alpha": 1, "target_modules": r".*\.0\.(attn\.to_q|ff\.net\.2)"},
}
CONFIGS = Path(flowalign.__file__).parents[1] / "configs" / "tiny"
X = torch.randn(2, 16, 4, 4, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def backbone(random_model: str) -> Backbone:
    """Without an adapter. Tests load theirs under names of their own."""
    return fakes.backbone(random_model)


@pytest.fixture(scope="module")
def bare(random_model: str) -> SD3Transformer2DModel:
    return SD3Transformer2DModel.from_pretrained(random_model, subfolder="transformer").eval()


def trained(bare: SD3Transformer2DModel, **config: Any) -> PeftModel:
    """peft's own model around a transformer, both halves of its LoRA random."""
    torch.manual_seed(7)
    made = get_peft_model(copy.deepcopy(bare), LoraConfig(**config))  # pyright: ignore
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    return made.eval()


@pytest.fixture(scope="module")
def peft_folders(
    bare: SD3Transformer2DModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One folder a kind, as Flow-GRPO's public teachers are: PeftModel.save_pretrained."""
    home = tmp_path_factory.mktemp("peft")
    for name, config in KINDS.items():
        trained(bare, **config).save_pretrained(str(home / name))
    return {name: home / name for name in KINDS}


def forward(model: torch.nn.Module, backbone: Backbone) -> Tensor:
    """The velocity at X of a transformer, whoever wrapped it."""
    cond = backbone.encode(fakes.PROMPTS[:2])
    with torch.no_grad():
        return model(
            hidden_states=X[:, : backbone.latent_shape[0]],
            encoder_hidden_states=cond.text["embeds"], pooled_projections=cond.text["pooled"],
            timestep=torch.full((2,), 600.0), return_dict=False,
        )[0]  # fmt: skip


def label(bank: Bank, name: str) -> Tensor:
    """The same of a bank's teacher."""
    cond = bank.backbone.encode(fakes.PROMPTS[:2])
    x = X[:, : bank.backbone.latent_shape[0]]
    with torch.no_grad(), bank.backbone.adapter(bank.source(name).adapter):
        return bank.backbone.velocity(x, 0.6, cond, guidance=1.0)


# What loads --------------------------------------------------------------------------------------


def test_a_bank_of_peft_s_folders_has_the_velocities_of_peft_s_own_models(
    random_model: str, bare: SD3Transformer2DModel, peft_folders: dict[str, Path]
) -> None:
    """All together on one base, of several ranks, alphas, patterns and layers."""
    for folder in peft_folders.values():
        keys = load_file(folder / "adapter_model.safetensors")
        assert all(key.startswith("base_model.model.transformer_blocks.") for key in keys)
    backbone = fakes.backbone(random_model)
    members = {name: Member(folder) for name, folder in peft_folders.items()}
    bank = Bank(backbone, members, {name: name for name in members})
    plain = forward(bare, backbone)
    for name, folder in peft_folders.items():
        expected = forward(PeftModel.from_pretrained(copy.deepcopy(bare), str(folder)), backbone)
        assert (expected - plain).abs().max() > 5e-3
        assert_close(label(bank, name), expected, rtol=0, atol=1e-6)


def test_the_scales_are_those_of_the_definition(peft_folders: dict[str, Path]) -> None:
    found = {name: read_lora(folder).scales for name, folder in peft_folders.items()}
    assert set(found["official"].values()) == {64 / 32}
    assert set(found["rslora"].values()) == {6 / 4**0.5}
    assert set(found["regex"].values()) == {1 / 3} and len(found["regex"]) == 2
    patterns = {  # the first pattern that matches has it
        "transformer_blocks.0.attn.to_q": 3 / 2,
        "transformer_blocks.0.attn.to_k": 6 / 2,
        "transformer_blocks.0.attn.to_v": 6 / 4,
        "transformer_blocks.0.attn.to_out.0": 6 / 5,
        "transformer_blocks.1.attn.to_q": 3 / 4,
        "transformer_blocks.1.attn.to_v": 10 / 4,
        "transformer_blocks.1.attn.to_out.0": 10 / 5,
    }
    assert {layer: found["patterns"][layer] for layer in patterns} == patterns


def diffusers_file(model: PeftModel, folder: Path, **options: Any) -> None:
    layers = {
        key.removeprefix("base_model.model."): value
        for key, value in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    StableDiffusion3Pipeline.save_lora_weights(
        folder, transformer_lora_layers=layers, **options  # pyright: ignore
    )  # fmt: skip


def test_diffusers_files_load_with_their_alpha_and_under_any_name(
    backbone: Backbone, bare: SD3Transformer2DModel, tmp_path: Path
) -> None:
    model = trained(bare, **KINDS["patterns"])
    config = model.peft_config["default"].to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    name = "epoch_3.safetensors"
    diffusers_file(model, tmp_path, weight_name=name, transformer_lora_adapter_metadata=config)
    expected = forward(model, backbone)
    for adapter, source in (("folder", tmp_path), ("file", tmp_path / name)):
        backbone.load_adapter(adapter, source)
        assert_close(forward(backbone.core, backbone), expected, rtol=0, atol=1e-6)


def test_without_any_description_alpha_is_the_rank_and_a_warning_says_so(
    random_model: str, backbone: Backbone, bare: SD3Transformer2DModel, tmp_path: Path, caplog
) -> None:
    diffusers_file(trained(bare, **KINDS["patterns"]), tmp_path)
    stock = StableDiffusion3Pipeline.from_pretrained(random_model)
    stock.load_lora_weights(str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="flowalign"):
        backbone.load_adapter("undescribed", tmp_path)
    assert "names no alpha; it is taken to be the rank" in caplog.text
    expected = forward(stock.transformer, backbone)
    assert_close(forward(backbone.core, backbone), expected, rtol=0, atol=1e-6)
    assert set(read_lora(tmp_path).scales.values()) == {1.0}


def test_one_adapter_is_one_whatever_its_format(
    bare: SD3Transformer2DModel, peft_folders: dict[str, Path], tmp_path: Path
) -> None:
    theirs = read_lora(peft_folders["patterns"])
    write_lora(tmp_path / "ours", theirs.weights, theirs.metadata)
    ours = read_lora(tmp_path / "ours")
    assert ours.digest == theirs.digest != read_lora(peft_folders["rslora"]).digest
    assert (ours.ranks, ours.alphas, ours.scales) == (theirs.ranks, theirs.alphas, theirs.scales)
    text = (peft_folders["rslora"] / "adapter_config.json").read_text()
    (tmp_path / "other").mkdir()
    file = "adapter_model.safetensors"
    (tmp_path / "other" / file).write_bytes((peft_folders["rslora"] / file).read_bytes())
    (tmp_path / "other" / "adapter_config.json").write_text(text.replace(": 6,", ": 7,"))
    assert read_lora(tmp_path / "other").digest != read_lora(peft_folders["rslora"]).digest
    assert file_digest(tmp_path / "other") != file_digest(peft_folders["rslora"])
    assert file_digest(tmp_path) is None


# What is refused ---------------------------------------------------------------------------------


def test_what_peft_writes_beside_a_plain_lora_is_refused(
    bare: SD3Transformer2DModel, backbone: Backbone, tmp_path: Path
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "to_q.*bias"),
        ({"modules_to_save": ["proj_out"]}, "proj_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ]
    for number, (config, seen) in enumerate(cases):
        made = trained(bare, r=2, target_modules=["attn.to_q"], **config)
        folder = tmp_path / str(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft, which takes a bias for half a matrix
            made.save_pretrained(str(folder))
        with pytest.raises(AdapterError, match=seen):
            backbone.load_adapter("refused", folder)
        assert "refused" not in getattr(backbone.core, "peft_config", {}), config


LAYER = "transformer.transformer_blocks.0.attn.to_q"
HALVES = {f"{LAYER}.lora_A.weight": torch.ones(2, 32), f"{LAYER}.lora_B.weight": torch.ones(32, 2)}


def test_files_that_are_no_lora_of_this_model_are_refused(backbone: Backbone, tmp_path: Path):
    cases = [
        ({"text_encoder.q_proj.lora_A.weight": torch.ones(2, 8)}, "text_encoder.q_proj"),
        ({**HALVES, f"{LAYER}.lora_B.weight": torch.ones(32, 3)}, r"\[2, 32\] and \[32, 3\]"),
        ({**HALVES, f"{LAYER}.lora_A.weight": torch.ones(2, 8)}, "to_q"),
        ({}, "no weights"),
        ({key: value[:0] if "_A" in key else value[:, :0] for key, value in HALVES.items()}, "q"),
        ({k.replace("to_q", "to_\x1b[2J"): v for k, v in HALVES.items()}, r"to_.x1b"),
    ]
    for weights, seen in cases:
        save_file(weights, tmp_path / "x.safetensors")
        with pytest.raises(AdapterError, match=seen):
            backbone.load_adapter("refused", tmp_path)


def described(folder: Path, width: int = 32, **changes: Any) -> Path:
    """A folder as peft writes it, of one layer, with changes in its description."""
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(peft(width)["adapter_model.safetensors"])
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "names",
    [["adapter_model.bin"], ["a.safetensors", "b.safetensors"], [],
     ["model_index.json", "sd3.5_medium.safetensors"], ["torn.safetensors"]],
)  # fmt: skip
def test_folders_without_an_adapter_are_refused(names: list[str], tmp_path: Path) -> None:
    """Pickles, more than one, whole pipelines, and what is no safetensors file."""
    for name in names:
        (tmp_path / name).write_bytes(save(HALVES) if name[0] in "abs" else b"<!DOCTYPE html>")
    with pytest.raises(AdapterError):
        read_lora(tmp_path)


def test_the_folder_of_a_run_is_its_adapter_and_a_missing_one_is_named(tmp_path: Path) -> None:
    shutil.copytree(adapter_folder("tiny/ocr"), tmp_path / "run" / "adapter")
    assert read_lora(tmp_path / "run").digest == read_lora("tiny/ocr").digest
    shipped = "tiny/geneval, tiny/guided, tiny/ocr, tiny/preference"
    with pytest.raises(AdapterError, match=f"tiny/orc.*{shipped}"):
        read_lora("tiny/orc")
    with pytest.raises(AdapterError, match="no such folder"):
        read_lora(tmp_path / "none")


def test_a_check_tells_another_base_from_another_machine(tmp_path: Path) -> None:
    """peft writes the base's name as it was on the machine of the training."""
    large, medium = (f"stabilityai/stable-diffusion-3.5-{size}" for size in ("large", "medium"))
    bases = {"far": large, "near": medium, "local": "/data/sd35m", "none": None}
    for name, base in bases.items():
        described(tmp_path / name, width=1536, base_model_name_or_path=base)
    data = read(CONFIGS / "student_flow_opd.yaml")
    data["tasks"] = [{**data["tasks"][0], "name": name} for name in bases]
    data["teachers"] = {name: {"adapter": str(tmp_path / name)} for name in bases}
    with pytest.raises(ConfigError) as caught:
        check_stage(parse(data, [f"model.id={medium}"]), Launch())
    (far,) = (problem for problem in caught.value.problems if problem.key.startswith("teachers."))
    assert far.key == "teachers.far" and f"was trained on '{large}'" in far.text


def test_the_name_of_a_base_that_may_be_a_copy_refuses_nothing(
    random_model: str, tmp_path: Path
) -> None:
    """A download, a folder that was moved, a link, another case, a public model's copy: the shapes
    decide, in every command."""
    (tmp_path / "link").symlink_to(random_model)
    public = "stabilityai/stable-diffusion-3.5-large"
    names = ["acme/sd3", "/scratch/jane/sd3", f"{random_model}/", str(tmp_path / "link"), public]
    config = fakes.distillation(random_model, tmp_path / "run", alone="even")
    assert isinstance(config, fakes.config.OpdStage)
    folders = [
        described(tmp_path / str(number), base_model_name_or_path=name)
        for number, name in enumerate(names)
    ]
    for number, name in enumerate(names):  # in the head of diffusers' file
        lora = read_lora(folders[number])
        metadata = lora.metadata | {"base_model_name_or_path": name}
        write_lora(tmp_path / f"head_{number}", lora.weights, metadata)
        folders.append(tmp_path / f"head_{number}")
    wide = described(tmp_path / "wide", width=64, base_model_name_or_path="acme/sd3")
    teachers = {
        f"t{number}": config.teachers["even"].model_copy(update={"adapter": str(folder)})
        for number, folder in enumerate([*folders, wide])
    }
    (problem,) = readable(
        config.model_copy(update={"teachers": teachers}), Launch(), Inputs(config.model)
    )
    assert problem.key == f"teachers.t{len(folders)}" and "(2, 64)" in problem.text
    args = ["sample", "x", "--model", random_model, "--steps", "2"]
    loras = [text for folder in folders[::3] for text in ("--lora", f"n{folder.name}={folder}")]
    assert main([*args, *loras, "--out", str(tmp_path / "x.png")]) == 0
    merge(folders, tmp_path / "merged")


def test_two_public_models_are_told_apart_by_name_alone(tmp_path: Path) -> None:
    """Where the sizes of a layer are the same."""
    dev, schnell = (f"black-forest-labs/FLUX.1-{name}" for name in ("dev", "schnell"))
    lora = described(tmp_path / "dev", width=3072, base_model_name_or_path=dev)
    for model in (schnell, "black-forest-labs/FLUX.1-Krea-dev"):
        assert main(["sample", "x", "--model", model, "--lora", str(lora)]) == 2
        with pytest.raises(AdapterError, match=dev):
            flowalign.load(model, lora=lora)
    other = described(tmp_path / "other", width=3072, base_model_name_or_path=schnell)
    with pytest.raises(ValueError, match=schnell):
        merge([lora, other], tmp_path / "merged")


@pytest.mark.parametrize("entries", [{"transformer.r": 2, "transformer.lora_alpha": 8}, {}])
def test_what_is_said_of_a_text_encoder_that_is_not_there_is_ignored(
    entries: dict[str, int], tmp_path: Path
) -> None:
    """As in a file of train_dreambooth_lora whose text encoder's weights were removed."""
    encoder = {"text_encoder.r": 4, "text_encoder.lora_alpha": 4, "text_encoder_2.use_dora": True}
    head = {"lora_adapter_metadata": json.dumps(encoder | entries)}
    save_file(HALVES, tmp_path / "x.safetensors", metadata=head)
    assert list(read_lora(tmp_path).scales.values()) == [4.0 if entries else 1.0]


def test_an_adapter_that_is_not_finite_is_not_written(random_model, tmp_path, backbone: Backbone):
    backbone.add_adapter("diverged", rank=2, alpha=2.0, targets=fakes.TARGETS)
    backbone.save_adapter("diverged", tmp_path / "a")
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    backbone.adapter_parameters("diverged")[3].data[0, 0] = math.inf
    with pytest.raises(AdapterError, match="lora_B"):
        backbone.save_adapter("diverged", tmp_path / "a")
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    huge = described(tmp_path / "huge", lora_alpha=1e30)  # finite, but not what it is merged to
    with pytest.raises(AdapterError, match="not written"):
        merge([huge], tmp_path / "out", weights=[1e30])
    assert not (tmp_path / "out").exists()


# Bytes -------------------------------------------------------------------------------------------


def test_the_same_adapter_has_the_same_bytes(tmp_path: Path) -> None:
    """safetensors writes the entries of a head in an order that differs from call to call."""
    halves = {key.removeprefix("transformer."): value for key, value in HALVES.items()}
    metadata = {"r": 2, "lora_alpha": 4, "base_model_name_or_path": "tiny"}
    for number in range(8):
        write_lora(tmp_path / str(number), halves, metadata, text_length=16)
    content = {
        tuple(file.read_bytes() for file in sorted((tmp_path / str(number)).iterdir()))
        for number in range(8)
    }
    assert len(content) == 1 and len(content.pop()) == 2  # the weights and their manifest


def test_a_damaged_adapter_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(adapter_folder("tiny/ocr"), tmp_path / "a")
    write_lora(folder, read_lora(folder).weights, read_lora(folder).metadata)
    content = (folder / ADAPTER).read_bytes()
    (folder / ADAPTER).write_bytes(content[:-60] + bytes([content[-60] ^ 1]) + content[-59:])
    with pytest.raises(AdapterError, match=f"damaged.*{ADAPTER}"):
        read_lora(folder)
    (folder / MANIFEST).unlink()  # the way out, if a change is wanted
    read_lora(folder)
    (folder / MANIFEST).write_text('{"manifest_version": 3, "name": "of another program"}')
    read_lora(folder)
