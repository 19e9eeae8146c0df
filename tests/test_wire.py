"""What goes over the wire comes out as it went in, and what is hostile is refused cheaply."""

from __future__ import annotations

import base64
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.rewards.service import wire
from flowalign.rewards.service.wire import Limits
from flowalign.system.images import to_float
from flowalign.types import Scores

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 5, 7), np.uint8))
PROMPTS = ["a red sign", 'says "ZÜRICH 北"', ""]
METADATA = [{}, {"include": [{"class": "dog", "count": 2}]}, {"x": [1.5, None, True, "é"]}]
LIMITS = Limits(images=4, pixels=100, bytes=600)


def file(width: int = 3, height: int = 2, form: str = "PNG", mode: str = "RGB") -> str:
    held = io.BytesIO()
    Image.new(mode, (width, height)).save(held, form)
    return base64.b64encode(held.getvalue()).decode()


def body(*changes: dict, **turn: object) -> bytes:
    """A request made by hand, of an image or of one a change."""
    good = {
        "history": [{"text": "a", "image_b64": file()} | turn],
        "required_rewards": ["r"],
        "metadata": None,
    }
    return json.dumps({"requests": [good | change for change in changes or ({},)]}).encode()


def test_pixels_prompts_and_metadata_arrive_as_they_were_sent():
    sent = wire.encode_request("r", to_float(PIXELS), PROMPTS, METADATA)
    images, *rows = wire.decode_request("r", sent, Limits())
    assert torch.equal(images, PIXELS) and rows == [PROMPTS, METADATA]


def test_what_unirl_sends_is_understood():
    """Its other keys, JPEG, and of a history the last turn."""
    turns = [{"text": "x", "image_b64": "?"}, {"text": "b", "image_b64": file(3, 2, "JPEG")}]
    more = {"request_id": "1", "source_rank": 0, "idempotency_key": "z"}
    images, prompts, metadata = wire.decode_request("r", body(more, {"history": turns}), LIMITS)
    assert list(images.shape) == [2, 3, 2, 3]
    assert prompts == ["a", "b"] and metadata == [{}, {}]


def test_what_is_malformed_is_refused():
    for sent, key in (
        (b"", "JSON"),
        (b"[" * 4000, "JSON"),
        (b'{"requests": [' + b"{}," * 70_000 + b"{}]}", "values"),
        (body({"history": []}), "history"),
        (body({"metadata": []}), "metadata"),
        (body({"required_rewards": ["hpsv3"]}), "hpsv3"),
        (body(text=3), "text"),
        (body(*[{}] * 5), "5 images"),
        (body(image_b64=None, video_b64="x"), "image_b64"),
        (body(image_b64="no base64!"), "image_b64"),
        (body(image_b64=file(form="TIFF")), "image_b64"),
        (body(image_b64=file(mode="RGBA")), "transparent"),
        (body(image_b64=file(11, 10)), "11x10"),
        (body({}, {"history": [{"text": "b", "image_b64": file(9, 4)}]}), "another size"),
        (b'{"requests": []}', "requests"),
        (body(*[{}] * 3, image_b64=file(10, 8)), "10x8"),  # together too large
        (b'{"requests": [{"history": [{"text": "\\ud800"}], "required_rewards": []}]}', "JSON"),
    ):
        with pytest.raises(ValueError, match=re.escape(key)) as caught:
            wire.decode_request("r", sent, LIMITS)
        assert len(str(caught.value)) < 700


def test_an_answer_arrives_as_it_was_sent_and_an_invalid_row_has_no_number():
    value = torch.tensor([0.1, math.nan, -3e-38])
    part = torch.tensor([1.0, 7.0, math.inf])
    reasons = {0: "well done", 1: 'a "reason" ü'}
    scores = Scores(value, torch.tensor([True, False, True]), {"raw": part, "r": part}, reasons)
    sent = wire.encode_answer("r", scores)
    answer = json.loads(sent)
    first = {"r": pytest.approx(0.1), "raw": 1.0}
    assert answer["results"] == [{"r": first}, {}, {"r": {"r": pytest.approx(-3e-38)}}]
    assert [*answer["results"][0]["r"]][0] == "r"  # UniRL's client takes the first
    assert answer["errors"] == [{}, {"r": 'a "reason" ü'}, {}]
    back = wire.decode_answer("r", sent, 3)
    assert torch.equal(back.value[[0, 2]], value[[0, 2]]) and back.value[1].isnan()
    assert back.valid.tolist() == [True, False, True] and back.reasons == reasons
    assert back.parts.keys() == {"raw"} and back.parts["raw"].nan_to_num(-1).tolist() == [1, -1, -1]


def test_a_malformed_answer_is_refused():
    good = {"results": [{"r": {"r": 1}}, {}], "errors": [{}, {"r": "no"}]}
    for change, valid in (
        ({}, True),
        ({"errors": []}, True),
        ({"results": [{"r": {"r": 1e39}}, {}]}, False),
        ({"results": [{"r": {"r": None, "x": 1}}, {"r": {}}]}, False),
    ):
        scores = wire.decode_answer("r", json.dumps(good | change).encode(), 2)
        assert scores.valid.tolist() == [valid, False], change
    for change, key in (
        ({"results": [{}]}, "results"),
        ({"results": [{"r": 1.0}, {}]}, "results"),
        ({"results": [{"r": {"r": "1"}}, {}]}, "results"),
        ({"results": [{"r": {"\x1b": 1}}, {}]}, "results"),
        ({"errors": {}}, "errors"),
        ({"errors": [{"r": 1}]}, "errors"),
    ):
        with pytest.raises(ValueError, match=key):
            wire.decode_answer("r", json.dumps(good | change).encode(), 2)
    with pytest.raises(ValueError):
        wire.decode_answer("r", b"<html>", 2)
