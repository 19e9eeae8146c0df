"""The aesthetic predictor: a file of its head that is not one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_models import PROMPTS, clip_folder, hostile_files, pictures
from torch import Tensor

from flowalign.rewards import build

SIZES = {0: (24, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}


def head_weights() -> dict[str, Tensor]:
    """A random head under the names of the published file."""
    rng, found = torch.Generator().manual_seed(1), {}
    for layer, (inner, outer) in SIZES.items():
        found[f"layers.{layer}.weight"] = torch.randn(outer, inner, generator=rng) / inner**0.5
        found[f"layers.{layer}.bias"] = torch.randn(outer, generator=rng)
    return found


def saved(folder: Path) -> dict:
    """The options of a small one in a folder."""
    torch.save(head_weights(), folder / "sac+logos+ava1-l14-linearMSE.pth")
    head = str(folder / "sac+logos+ava1-l14-linearMSE.pth")
    return {"model": str(clip_folder(folder / "clip")), "head": head, "device": "cpu"}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return saved(tmp_path_factory.mktemp("aesthetic"))


def test_a_safetensors_head_is_the_same_head(options: dict, tmp_path: Path):
    images, _ = pictures(2, 40, 40)
    save_file(head_weights(), tmp_path / "head.safetensors")
    safe = build("aesthetic", **{**options, "head": str(tmp_path / "head.safetensors")})
    rows, two = [{}, {}], PROMPTS[:2]
    expected = build("aesthetic", **options)(images, two, rows).value
    assert torch.equal(safe(images, two, rows).value, expected)


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    merged = {**head_weights(), **{name.replace("__", "."): t for name, t in changes.items()}}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed(layers__6__bias=None), "layers.6.bias"),
        (changed(layers__0__weight=torch.ones(1024, 768)), r"\[1024, 768\].*\[1024, 24\]"),
        ([torch.ones(2)], "holds a list"),
    ],
)
def test_a_file_of_something_else_is_refused(options: dict, tmp_path: Path, content, said: str):
    torch.save(content, tmp_path / "head.pth")
    with pytest.raises(ValueError, match=said) as caught:
        build("aesthetic", **{**options, "head": str(tmp_path / "head.pth")})
    assert "head.pth" in str(caught.value)


def test_a_file_with_code_in_it_is_refused_and_not_executed(options: dict, tmp_path: Path):
    files, mark = hostile_files(tmp_path)
    for name, content in {"torn.pth": b"PK\x03\x04", "torn.safetensors": b"\xff" * 40}.items():
        (tmp_path / name).write_bytes(content)
        files.append(tmp_path / name)
    for file in files:
        with pytest.raises(ValueError, match=file.name):
            build("aesthetic", **{**options, "head": str(file)})
    assert not mark.exists()


def test_a_head_on_the_hub_is_asked_for_by_its_address(options: dict, monkeypatch):
    asked = []

    def download(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        if revision is None:
            raise OSError("no network")
        return options["head"]

    monkeypatch.setattr("flowalign.rewards.weights.hf_hub_download", download)
    build("aesthetic", **{**options, "head": "owner/name/sub/head.pth@abc1"})
    default = {key: value for key, value in options.items() if key != "head"}
    with pytest.raises(OSError, match="no network"):
        build("aesthetic", **default)
    assert asked == [
        ("owner/name", "sub/head.pth", "abc1"),
        ("trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth", None),
    ]
