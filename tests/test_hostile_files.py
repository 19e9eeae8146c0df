"""Adapters and models that a stranger made: they are read, or refused, in time.

`-m long` runs the same properties on ten times as many inputs.
"""

import copy
import itertools
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
import torch
from diffusers import SD3Transformer2DModel
from generated import examples, holds, nothing_else
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

import flowalign
from flowalign import rewards
from flowalign.backbone import ModelError, adapters, load_pipeline, put_lora
from flowalign.backbone.adapters import ADAPTER, PEFT_CONFIG, AdapterError, read_lora
from flowalign.backbone.tiny import PREFERENCE

LAYER = "transformer_blocks.0.attn.to_q"
HALVES = {f"{LAYER}.lora_A.weight": torch.ones(2, 32), f"{LAYER}.lora_B.weight": torch.ones(32, 2)}
CATASTROPHES = [  # Python's `re` needs years for each on a long name
    r"(.+)+!?x", ".*.*.*.*.*.*x", "(a|a)(t|t)(r|r)(n|n)(s|s)" * 8,
]  # fmt: skip


@pytest.fixture(scope="module")
def bare(random_model: str) -> SD3Transformer2DModel:
    return SD3Transformer2DModel.from_pretrained(random_model, subfolder="transformer").eval()


def harmless(text: str) -> bool:
    """Whether a terminal shows all of a text and obeys none of it."""
    return not any(category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text)


def taken_or_refused(folder: Path, bare: SD3Transformer2DModel) -> bool:
    """Whether an adapter goes onto a model; AdapterError is the only other way out."""
    with nothing_else(folder.parent):
        try:
            lora = read_lora(str(folder))
            assert all(0 < scale < float("inf") for scale in lora.scales.values())
            assert len(lora.digest) == 64
            put_lora(copy.deepcopy(bare), "x", lora)
        except AdapterError as error:
            assert len(str(error)) < 3000 and harmless(str(error))
            return False
    return True


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.sampled_from([0, -1, 2, 10**9, 10**400, 1e308, float("nan"), "", "8", LAYER, f"^{LAYER}"]),
)  # fmt: skip
patterns = st.sampled_from([*CATASTROPHES, LAYER, f"^{LAYER}", "attn.to_q", ".*", "(", "(?R)"])
tables = st.dictionaries(patterns | st.text("()[]{}+*?.|^$ato_q0", max_size=24), values, max_size=4)
descriptions = st.fixed_dictionaries(
    {},
    optional={
        "r": st.just(2) | values, "lora_alpha": st.just(4) | values,
        "rank_pattern": tables | values, "alpha_pattern": tables | values, "use_rslora": values,
        "base_model_name_or_path": st.text() | values, "something": values,
    },
)  # fmt: skip


@examples(100)
def test_any_description_is_read_or_refused(count: int, tmp_path, bare: SD3Transformer2DModel):
    folder = tmp_path / "a"
    folder.mkdir()

    def check(description: dict[str, Any], inside: bool) -> None:
        text = json.dumps(description)
        head = {"lora_adapter_metadata": text} if inside else {}
        (folder / PEFT_CONFIG).unlink(missing_ok=True)
        save_file(HALVES, folder / ADAPTER, metadata=head)
        if not inside:
            (folder / PEFT_CONFIG).write_text(text)
        taken_or_refused(folder, bare)

    holds(check, count, description=descriptions, inside=st.booleans())


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("r", 8), ("peft_type", "LOHA"), ("use_dora", True), ("r", "2"), ("r", 2.0), ("r", 10**9),
        ("r", 0), ("lora_alpha", float("nan")), ("lora_alpha", -4), ("lora_alpha", 10**400),
        ("rank_pattern", ["to_q"]), ("alpha_pattern", {"to_q": None}), ("use_rslora", "yes"),
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


def test_all_patterns_of_a_description_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's may be many, each of them just quick enough."""
    seconds = itertools.count()  # a second goes by between two looks at the clock
    monkeypatch.setattr(adapters.time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(adapters, "MATCHING_S", 20.0)
    several = {f"layer_{i}": 7 for i in range(40)}
    assert adapters.resolve_pattern(["layer_1"], 4, dict([*several.items()][:10])) == {"layer_1": 7}
    with pytest.raises(ValueError, match="pattern"):
        adapters.resolve_pattern(["another"], 4, several)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"r": ' * 50_000, b"\xff\xfe", b"", b'{"r": ' + b"9" * 5000 + b"}",
     b'{"base_model_name_or_path": "\\ud800"}', b"[]", b"null"],
    ids=["lists", "mappings", "no text", "empty", "digits", "surrogate", "list", "null"],
)  # fmt: skip
def test_a_description_that_is_no_mapping_is_refused(content: bytes, tmp_path: Path) -> None:
    save_file(HALVES, tmp_path / ADAPTER)
    (tmp_path / PEFT_CONFIG).write_bytes(content)
    with pytest.raises(AdapterError):
        read_lora(tmp_path)


SOUND = save(
    HALVES,
    metadata={
        "format": "pt",
        "lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 4, "rank_pattern": {}}),
        "flowalign_max_sequence_length": "16",
    },
)


@examples(200)
def test_any_damage_to_a_head_is_refused_or_does_no_harm(
    count: int, tmp_path: Path, bare: SD3Transformer2DModel
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()

    def check(start: int, removed: int, put: bytes) -> None:
        (folder / ADAPTER).write_bytes(SOUND[:start] + put + SOUND[start + removed :])
        taken_or_refused(folder, bare)

    put = st.binary(max_size=24) | st.sampled_from([b'"', b"{", b"[[[[", b"\\ud800", b"\x00" * 9])
    holds(check, count, start=st.integers(0, 420), removed=st.integers(0, 24), put=put)


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
