"""Adapters and models that a stranger made: they are read, or refused, in time."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
import torch
from safetensors.torch import load_file, save_file

import flowalign
from flowalign import rewards
from flowalign.backbone import ModelError, adapters, load_pipeline
from flowalign.backbone.adapters import ADAPTER, PEFT_CONFIG, AdapterError, read_lora
from flowalign.backbone.tiny import PREFERENCE

LAYER = "transformer_blocks.0.attn.to_q"
HALVES = {f"{LAYER}.lora_A.weight": torch.ones(2, 32), f"{LAYER}.lora_B.weight": torch.ones(32, 2)}
CATASTROPHES = [  # Python's `re` needs years for each on a long name
    r"(.+)+!?x", ".*.*.*.*.*.*x", "(a|a)(t|t)(r|r)(n|n)(s|s)" * 8,
]  # fmt: skip


def harmless(text: str) -> bool:
    """Whether a terminal shows all of a text and obeys none of it."""
    return not any(category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("r", 8), ("peft_type", "LOHA"), ("use_dora", True), ("r", "2"), ("r", 10**9),
        ("lora_alpha", float("nan")), ("rank_pattern", ["to_q"]), ("use_rslora", "yes"),
        ("base_model_name_or_path", "a\x1b[2J"),
    ],
)  # fmt: skip
def test_an_entry_of_a_wrong_kind_is_named(entry: str, value: Any, tmp_path: Path) -> None:
    save_file(HALVES, tmp_path / ADAPTER)
    (tmp_path / PEFT_CONFIG).write_text(json.dumps({"r": 2, entry: value}))
    with pytest.raises(AdapterError, match=entry):
        read_lora(tmp_path)


def test_patterns_are_matched_as_peft_does_and_never_for_long(tmp_path, monkeypatch) -> None:
    """peft's are regular expressions, with groups and all."""
    monkeypatch.setattr(adapters, "MATCHING_S", 0.3)
    save_file(HALVES, tmp_path / ADAPTER)
    (layer,) = {name.rsplit(".lora_", 1)[0] for name in read_lora(tmp_path).weights}
    tail = layer.rpartition(".")[2]
    groups = [rf"(\w+\.)*(x|{tail})", rf".*\.(?:a|b|{tail})", rf"^(.+)\.{tail[:-1]}[{tail[-1]}]$"]
    for pattern in [*groups, *CATASTROPHES, "(", "*", "(?R)"]:
        start = time.monotonic()
        (tmp_path / PEFT_CONFIG).write_text(json.dumps({"r": 2, "alpha_pattern": {pattern: 7}}))
        try:
            (alpha,) = read_lora(tmp_path).alphas.values()
            if pattern in groups:
                assert bool(re.match(rf"(.*\.)?({pattern})$", layer)) == (alpha == 7)
        except AdapterError as error:
            assert pattern not in groups and "pattern" in str(error)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"\xff\xfe", b'{"r": ' + b"9" * 5000 + b"}", b"[]"],
    ids=["deep", "no text", "digits", "list"],
)
def test_a_description_that_is_no_mapping_is_refused(content: bytes, tmp_path: Path) -> None:
    save_file(HALVES, tmp_path / ADAPTER)
    (tmp_path / PEFT_CONFIG).write_bytes(content)
    with pytest.raises(AdapterError):
        read_lora(tmp_path)


@pytest.mark.parametrize("length", ["0", "-1", "9" * 5000, "x"])
def test_a_number_of_tokens_that_no_pipeline_takes_is_refused(length: str, tmp_path: Path) -> None:
    save_file(HALVES, tmp_path / ADAPTER, metadata={"flowalign_max_sequence_length": length})
    with pytest.raises(AdapterError, match="flowalign_max_sequence_length"):
        read_lora(tmp_path)


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("part", "name"),
    [("vae", "diffusion_pytorch_model.bin"), ("text_encoder_3", "pytorch_model.bin")],
)
def test_a_part_of_a_model_that_is_a_pickle_is_refused(
    part: str, name: str, random_model: str, tmp_path: Path
) -> None:
    """Also one that torch's weights_only would load."""
    folder = shutil.copytree(random_model, tmp_path / "model")
    (file,) = (folder / part).glob("*.safetensors")
    harmless = load_file(file)
    file.unlink()
    for content in (harmless, Planted(tmp_path / "planted")):
        torch.save(content, folder / part / name)
        with pytest.raises(ModelError, match=f"{part}/{name} is a pickle"):
            load_pipeline(str(folder))
        with pytest.raises(OSError, match="safetensors"):
            flowalign.load(str(folder))
    assert not (tmp_path / "planted").exists()


def test_a_preference_model_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(PREFERENCE, tmp_path / "clip")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named model.safetensors"):
        rewards.build("pickscore", model=str(folder))
