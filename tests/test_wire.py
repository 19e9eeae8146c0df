"""What goes over the wire comes out as it went in, and what is hostile is refused cheaply."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from flowalign.rewards.service import wire
from flowalign.rewards.service.wire import Limits, WireError
from flowalign.system.images import to_float
from flowalign.types import Scores

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 5, 7), np.uint8))
PROMPTS = ["a red sign", 'says "ZÜRICH 北"', ""]
METADATA = [{}, {"include": [{"class": "dog", "count": 2}]}, {"x": [1.5, None, True, "é"]}]
LIMITS = Limits(images=8, pixels=1000, json=5_000)


def body(text: bytes | None = None, tensors: dict | None = None, **document: object) -> bytes:
    """A request of two images made by hand; what is given replaces its part."""
    good = {"version": 2, "prompts": ["a", "b"], "metadata": [{}, {}]}
    text = json.dumps({**good, **document}).encode() if text is None else text
    request = {"request": np.frombuffer(text, np.uint8)}
    return save({**request, **({"images": pixels(2)} if tensors is None else tensors)})


def pixels(*shape: int) -> np.ndarray:
    """[B,2,3,3] zeros, or zeros of another shape."""
    return np.zeros(shape if len(shape) > 1 else (*shape, 2, 3, 3), np.uint8)


def test_pixels_prompts_and_metadata_arrive_as_they_were_sent():
    sent = wire.encode_request(to_float(PIXELS), PROMPTS, METADATA)
    received, *rows = wire.decode_request(sent, LIMITS)
    assert torch.equal(received, PIXELS) and rows == [PROMPTS, METADATA]


def test_the_format_is_the_documented_one():
    """Read and written here with nothing but safetensors and JSON."""
    tensors = load(wire.encode_request(to_float(PIXELS), PROMPTS, METADATA))
    document = json.loads(tensors.pop("request").tobytes())
    assert document == {"version": 2, "prompts": PROMPTS, "metadata": METADATA}
    assert np.array_equal(tensors.pop("images").transpose(0, 3, 1, 2), PIXELS.numpy())
    assert not tensors
    assert wire.decode_request(body(), LIMITS)[0].shape == (2, 3, 2, 3)


def test_what_is_malformed_is_refused_with_a_status():
    none = np.zeros((2, 0, 3, 3), np.uint8)
    old = {f"image.{i}": pixels(2, 3, 3) for i in range(2)}
    many = {f"t{i}": pixels(1, 1) for i in range(500)}
    for sent, status in (
        (b"", 400),
        (b"\x00" * 100, 400),
        (pickle.dumps({"images": [1]}), 400),
        (body()[:-1], 400),
        (body()[:20], 400),
        (body() + b"x", 400),
        ((2**40).to_bytes(8, "little") + b"{}", 400),
        (save({"images": pixels(2)}), 400),
        (body(tensors=many), 400),  # a long header is not parsed
        (body(b"\xff\xfe"), 400),
        (body(b"[" * 4000), 400),
        (body(b'{"version": NaN}'), 400),
        (body(b'{"version": 2, "prompts": ["\\ud800"], "metadata": [{}]}'), 400),
        (body(b"[]"), 400),
        (body(version=1), 400),
        (body(version=True), 400),
        (body(version=1, tensors=old), 400),  # what the release before sent
        (body(b'{"version": 2, "prompts": ["a", "b"]}'), 422),
        (body(extra=1), 422),
        (body(prompts="ab"), 422),
        (body(prompts=["a", 3]), 422),
        (body(metadata=[{}]), 422),
        (body(metadata=[{}, []]), 422),
        (body(prompts=[], metadata=[]), 422),
        (body(prompts=["a"], metadata=[{}]), 422),
        (body(prompts=["a"] * 9, metadata=[{}] * 9, tensors={"images": pixels(9)}), 413),
        (body(b" " * 5001), 413),
        (body(tensors={"images": pixels(2).astype(np.float32)}), 422),
        (body(tensors={"images": pixels(2, 2, 3, 4)}), 422),
        (body(tensors={"images": pixels(3)}), 422),
        (body(tensors={"images": pixels(2, 3)}), 422),
        (body(tensors={"images": none}), 422),
        (body(tensors={"images": pixels(2, 40, 40, 3)}), 413),
        (body(tensors={}), 422),
        (body(tensors={"images": pixels(2), "more": pixels(2)}), 422),
        (body(tensors=old), 422),
    ):
        with pytest.raises(WireError) as caught:
            wire.decode_request(sent, LIMITS)
        assert caught.value.status == status, (sent[:200], caught.value)
        assert len(str(caught.value)) < 700


def test_pixels_and_metadata_that_cannot_be_sent_are_refused():
    broken = to_float(PIXELS)
    broken[1, 0, 0, 0] = math.nan
    for images, metadata in ((broken, METADATA), (to_float(PIXELS), [{}, {"x": math.inf}, {}])):
        with pytest.raises(WireError) as caught:
            wire.encode_request(images, PROMPTS, metadata)
        assert caught.value.status == 422


def test_an_answer_arrives_as_it_was_sent():
    value = torch.tensor([0.1, math.nan, -3e-38])
    part = torch.tensor([1.0, math.inf, 2.0])
    scores = Scores(value, torch.tensor([True, False, True]), {"raw": part}, {1: 'a "reason" ü'})
    answer = wire.decode_answer(wire.encode_answer("pickscore", scores), 3)
    assert torch.equal(answer.value[[0, 2]], value[[0, 2]]) and answer.value[1].isnan()
    assert answer.valid.tolist() == [True, False, True] and answer.reasons == scores.reasons
    assert answer.parts["raw"][1].isnan() and answer.parts["raw"][[0, 2]].tolist() == [1.0, 2.0]


def test_a_malformed_answer_is_refused():
    good = {"version": 2, "reward": "r", "value": [1, None], "valid": [True, False], "parts": {},
            "reasons": {}}  # fmt: skip
    assert wire.decode_answer(json.dumps(good).encode(), 2).valid.tolist() == [True, False]
    for change, key in (
        ({"version": 1}, "version"),
        ({"value": [1.0]}, "value"),
        ({"value": ["1", "2"]}, "value"),
        ({"valid": [1, 0]}, "valid"),
        ({"parts": {"raw": None}}, "raw"),
        ({"reasons": []}, "reasons"),
    ):
        with pytest.raises(WireError) as caught:
            wire.decode_answer(json.dumps({**good, **change}).encode(), 2)
        assert key in str(caught.value), change
    with pytest.raises(WireError):
        wire.decode_answer(b"<html>", 2)
