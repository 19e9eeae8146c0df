"""Prompts are encoded once, and what is kept of them depends on the text alone."""

import functools
from pathlib import Path

import fakes
import pytest
import torch
from torch.testing import assert_close

from flowalign.backbone import load_pipeline
from flowalign.backbone.sd3 import SD3
from flowalign.backbone.text import TextEncoder
from flowalign.backbone.tiny import T5_LENGTH
from flowalign.config import ModelConfig

TEXTS = fakes.PROMPTS[:5]


def encoder(model: str, cache: Path | None = None, length: int = T5_LENGTH) -> TextEncoder:
    kept = str(cache) if cache else None
    settings = ModelConfig(id=model, max_sequence_length=length, text_cache=kept)
    return TextEncoder(SD3(pipeline(model)), settings, "cpu")


pipeline = functools.cache(load_pipeline)


def count(texts: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What it asks its encoders from now on."""
    asked: list[str] = []
    encode = texts.family.pipe.encode_prompt

    def spy(prompts: list[str], **rest: object) -> object:
        asked.extend(prompts)
        return encode(prompts, **rest)  # pyright: ignore

    monkeypatch.setattr(texts.family.pipe, "encode_prompt", spy)
    return asked


def test_kept_embeddings_are_those_of_the_encoders(random_model: str, tmp_path: Path) -> None:
    plain, kept = encoder(random_model), encoder(random_model, tmp_path)
    for _ in range(2):  # encoded, then read
        assert_close(kept(TEXTS), plain(TEXTS), rtol=0, atol=5e-6)
    assert_close(kept.negative, plain([""]), rtol=0, atol=5e-6)


def test_a_text_is_encoded_once_by_all_runs_and_whatever_its_batch(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = encoder(random_model, tmp_path / "a")
    asked = count(first, monkeypatch)
    whole = first([*TEXTS, *TEXTS[:2]])
    assert asked == TEXTS  # a prompt that comes twice, once
    assert torch.equal(whole["embeds"][:2], whole["embeds"][5:])
    second = encoder(random_model, tmp_path / "a")
    asked = count(second, monkeypatch)
    assert torch.equal(second(TEXTS[::-1])["embeds"], first(TEXTS)["embeds"].flip(0))
    assert not asked
    other = encoder(random_model, tmp_path / "b")
    alone = [other([text])["pooled"] for text in TEXTS]  # one by one instead of together
    assert torch.equal(torch.cat(alone), first(TEXTS)["pooled"])


def test_other_encoders_and_lengths_do_not_meet(random_model, tmp_path, monkeypatch) -> None:
    encoder(random_model, tmp_path)(TEXTS)
    all_tokens = encoder(random_model)(TEXTS)["embeds"].shape[1]
    shorter = encoder(random_model, tmp_path, length=8)
    asked = count(shorter, monkeypatch)
    assert shorter(TEXTS)["embeds"].shape[1] < all_tokens and asked == TEXTS
    other = tmp_path / "other"
    fakes.pipeline(seed=1).save_pretrained(other)
    expected = encoder(str(other))(TEXTS)
    changed = encoder(str(other), tmp_path)
    asked = count(changed, monkeypatch)
    assert_close(changed(TEXTS), expected, rtol=0, atol=5e-6)
    assert asked == TEXTS


def test_a_file_that_is_damaged_is_written_again(random_model, tmp_path, monkeypatch) -> None:
    texts = encoder(random_model, tmp_path)
    before = texts(TEXTS)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == len(TEXTS)
    contents = [path.read_bytes() for path in files]
    damages = [b"", b"no tensors", *(content[:-1] for content in contents)]
    for path, damaged in zip(files, damages, strict=False):
        path.write_bytes(damaged)
    asked = count(texts, monkeypatch)
    for _ in range(2):
        assert_close(texts(TEXTS), before, rtol=0, atol=0)
        assert sorted(asked) == sorted(TEXTS)  # once
    assert [path.read_bytes() for path in files] == contents
