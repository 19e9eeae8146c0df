"""pretrained.py: a model whose files lack weights, or have others, is refused by their names."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPModel, Dinov2Config, Dinov2Model, T5Config, T5EncoderModel

import flowalign
from flowalign import rewards
from flowalign.backbone.family import ModelError
from flowalign.backbone.loading import load_pipeline
from flowalign.backbone.pretrained import WeightsError, load_complete
from flowalign.backbone.tiny import PREFERENCE
from flowalign.commands.cli import main

Change = Callable[[dict[str, Tensor], str], None]


def lost(weights: dict[str, Tensor], name: str) -> None:
    del weights[name]


def reshaped(weights: dict[str, Tensor], name: str) -> None:
    weights[name] = torch.cat([weights[name]] * 2)


def changed(model: str | Path, folder: Path, part: str, change: Change, end: str) -> str:
    """A copy of a model with a change in the first weight of a part with this end of its name; its
    name."""
    shutil.copytree(model, folder)
    (file,) = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name.endswith(end))
    change(weights, name)
    save_file(weights, file, {"format": "pt"})
    return name


PARTS = [
    ("text_encoder", "layer_norm1.weight"), ("text_encoder_2", "text_projection.weight"),
    ("text_encoder_3", "relative_attention_bias.weight"), ("transformer", "to_q.bias"),
    ("vae", "conv_norm_out.weight"),
]  # fmt: skip


@pytest.mark.parametrize("change", [lost, reshaped])
@pytest.mark.parametrize(("part", "end"), PARTS)
def test_a_part_of_a_pipeline_is_refused_by_its_weight(
    part: str, end: str, change: Change, random_model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    name = changed(random_model, folder, part, change, end)
    for load, kind in ((load_pipeline, ModelError), (flowalign.load, WeightsError)):
        with pytest.raises(kind) as error:
            load(str(folder))
        assert f"{folder}/{part} " in str(error.value) and name in str(error.value)


def test_sample_ends_before_it_draws(random_model: str, tmp_path: Path, capsys) -> None:
    name = changed(random_model, tmp_path / "m", "text_encoder", lost, "position_embedding.weight")
    out = tmp_path / "x.png"
    args = ["sample", "x", "--model", str(tmp_path / "m"), "--steps", "2", "--out", str(out)]
    assert main(args) == 2
    assert name in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("change", [lost, reshaped])
@pytest.mark.parametrize("judge", ["pickscore", "clipscore", "diversity"])
@pytest.mark.parametrize("end", ["visual_projection.weight", "q_proj.weight"])
def test_a_judge_is_refused_by_its_weight(
    judge: str, end: str, change: Change, tmp_path: Path
) -> None:
    name = changed(PREFERENCE, tmp_path / "judge", "", change, end)
    with pytest.raises(ValueError, match=name):
        rewards.build(judge, model=str(tmp_path / "judge"))


def test_a_scale_and_a_dino_are_looked_for_too(tmp_path: Path) -> None:
    changed(PREFERENCE, tmp_path / "clip", "", lost, "logit_scale")
    with pytest.raises(ValueError, match="logit_scale"):
        rewards.build("pickscore", model=str(tmp_path / "clip"))
    config = Dinov2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    name = changed(tmp_path / "dino", tmp_path / "without", "", lost, "cls_token")
    with pytest.raises(ValueError, match=name):
        rewards.build("diversity", model=str(tmp_path / "without"))


def test_tied_weights_and_ids_of_positions_are_not_missing(tmp_path: Path) -> None:
    """T5's embeddings lie in a file under one of two names; old CLIPs have ids of positions."""
    model = T5EncoderModel(T5Config(d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2))
    model.save_pretrained(tmp_path / "t5")
    loaded = load_complete(T5EncoderModel, tmp_path / "t5")
    assert torch.equal(loaded.encoder.embed_tokens.weight, model.shared.weight)
    name = changed(tmp_path / "t5", tmp_path / "none", "", lost, "shared.weight")
    with pytest.raises(WeightsError, match=name):
        load_complete(T5EncoderModel, tmp_path / "none")

    shutil.copytree(PREFERENCE, tmp_path / "clip")
    file = tmp_path / "clip" / "model.safetensors"
    ids = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    for weights in (load_file(file) | ids, load_file(file)):
        save_file(weights, file, {"format": "pt"})
        assert load_complete(CLIPModel, tmp_path / "clip").logit_scale.isfinite()


@pytest.mark.parametrize("part", ["text_encoder_3", "vae"])
def test_a_part_in_a_variant_alone_is_named(part: str, random_model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_model, tmp_path / "model"))
    (file,) = (folder / part).glob("*.safetensors")
    file.rename(file.with_name(file.name.replace("model.", "model.fp16.")))
    with pytest.raises(ModelError, match=rf"variant 'fp16'.*{part}/"):
        load_pipeline(str(folder))
    with pytest.warns(FutureWarning, match="torch_dtype"):  # diffusers' own, of its earlier name
        pipe = flowalign.load(str(folder), variant="fp16", torch_dtype=torch.bfloat16)
    assert pipe.text_encoder_3.dtype == pipe.vae.dtype == torch.bfloat16


def test_a_variant_beside_a_whole_part_is_not_blamed(random_model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_model, tmp_path / "model"))
    (file,) = (folder / "vae").glob("*.safetensors")
    shutil.copy(file, file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    next((folder / "text_encoder").glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match="text_encoder") as error:
        load_pipeline(str(folder))
    assert "fp16" not in str(error.value)
