"""What goes over the wire comes out as it went in, and what is hostile is refused cheaply."""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load, save

from flowalign.images import to_float
from flowalign.rewards import wire
from flowalign.rewards.lazy import SERVE, require
from flowalign.rewards.wire import Limits, WireError
from flowalign.types import Scores

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 5, 7), np.uint8))
PROMPTS = ["a red sign", 'says "ZÜRICH 北"', ""]
METADATA = [{}, {"include": [{"class": "dog", "count": 2}]}, {"x": [1.5, None, True, "é"]}]
LIMITS = Limits(images=8, pixels=1000, bytes=50_000, prompt=100, json=5_000, depth=6)


def png(width: int, height: int, mode: str = "RGB") -> np.ndarray:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)


def chunk(kind: bytes, data: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + crc


def body(tensors: dict | None = None, document: object = None, text: bytes | None = None) -> bytes:
    """A request of two images made by hand; what is given replaces its part."""
    good = {"version": 1, "prompts": ["a", "b"], "metadata": [{}, {}]}
    text = json.dumps(good if document is None else document).encode() if text is None else text
    pictures = {f"image.{i}": np.zeros((2, 3, 3), np.uint8) for i in range(2)}
    return save({"request": np.frombuffer(text, np.uint8), **(tensors or pictures)})


@pytest.mark.parametrize("encoding", wire.ENCODINGS)
def test_pixels_prompts_and_metadata_arrive_as_they_were_sent(encoding: str):
    sent = wire.encode_request(to_float(PIXELS), PROMPTS, METADATA, encoding)
    found = wire.decode_request(sent, LIMITS)
    assert torch.equal(found.pixels, PIXELS)
    assert (found.prompts, found.metadata) == (PROMPTS, METADATA)


def test_the_format_is_the_documented_one():
    """Read and written here with nothing but safetensors, JSON and PIL."""
    for encoding in wire.ENCODINGS:
        tensors = load(wire.encode_request(to_float(PIXELS), PROMPTS, METADATA, encoding))
        document = json.loads(tensors.pop("request").tobytes())
        assert document == {"version": 1, "prompts": PROMPTS, "metadata": METADATA}
        for row in range(3):
            if encoding == "png":
                picture = np.asarray(Image.open(io.BytesIO(tensors.pop(f"png.{row}").tobytes())))
            else:
                picture = tensors.pop(f"image.{row}")
            assert np.array_equal(picture.transpose(2, 0, 1), PIXELS[row].numpy())
        assert not tensors
    assert wire.decode_request(body(), LIMITS).pixels.shape == (2, 3, 2, 3)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", 400),
        (b"\x00" * 100, 400),
        (pickle.dumps({"images": [1]}), 400),
        (body()[:-1], 400),
        (body()[:20], 400),
        (body() + b"x", 400),
        ((2**40).to_bytes(8, "little") + b"{}", 400),
        (body(text=b"\xff\xfe"), 400),
        (body(text=b"[" * 4000), 400),
        (body(text=b'{"a":' * 20 + b"1" + b"}" * 20), 400),
        (body(text=b'{"version": NaN}'), 400),
        (body(text=b'{"version": 1, "prompts": ["\\ud800"], "metadata": [{}]}'), 400),
        (body(text=b"9" * 4900), 400),
        (body(document=[]), 400),
        (body(document={"version": 2, "prompts": ["a", "b"], "metadata": [{}, {}]}), 400),
        (body(document={"version": True, "prompts": ["a", "b"], "metadata": [{}, {}]}), 400),
        (body(document={"version": 1, "prompts": ["a", "b"]}), 422),
        (body(document={"version": 1, "prompts": "ab", "metadata": [{}, {}]}), 422),
        (body(document={"version": 1, "prompts": ["a", 3], "metadata": [{}, {}]}), 422),
        (body(document={"version": 1, "prompts": ["a", "b"], "metadata": [{}]}), 422),
        (body(document={"version": 1, "prompts": ["a", "b"], "metadata": [{}, []]}), 422),
        (body(document={"version": 1, "prompts": [], "metadata": []}), 422),
        (body(document={"version": 1, "prompts": ["a"], "metadata": [{}]}), 422),
        (body(document={"version": 1, "prompts": ["a" * 101, "b"], "metadata": [{}, {}]}), 422),
        (body(document={"version": 1, "prompts": ["a"] * 9, "metadata": [{}] * 9}), 413),
        (body(text=b" " * 5001), 413),
        (body({"image.0": np.zeros(25_000, np.uint16)}), 413),
        (body({"image.0": np.zeros((2, 3, 3), np.float32)}), 422),
        (body({"image.0": np.zeros((2, 3, 4), np.uint8)}), 422),
        (body({"image.0": np.zeros((2, 3), np.uint8), "image.1": np.zeros(1, np.uint8)}), 422),
        (body({f"image.{i}": np.zeros((0, 3, 3), np.uint8) for i in range(2)}), 422),
        (body({f"image.{i}": np.zeros((2 + i, 3, 3), np.uint8) for i in range(2)}), 422),
        (body({f"image.{i}": np.zeros((40, 40, 3), np.uint8) for i in range(2)}), 413),
        (body({"image.0": np.zeros((2, 3, 3), np.uint8), "png.1": png(3, 2)}), 422),
        (body({f"png.{i}": png(3, 2, ("L", "RGBA")[i]) for i in range(2)}), 422),
        (body({f"png.{i}": png(3, 2)[:-30] for i in range(2)}), 422),
        (body({f"png.{i}": np.frombuffer(b"GIF89a", np.uint8) for i in range(2)}), 422),
    ],
)
def test_what_is_malformed_is_refused_with_a_status(sent: bytes, status: int):
    with pytest.raises(WireError) as caught:
        wire.decode_request(sent, LIMITS)
    assert caught.value.status == status
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("side", [100, 4000, 12_000, 2**31 - 1])
def test_a_bomb_is_refused_before_it_is_unpacked(side: int):
    """100 pixels a side are within the limit of an image, two such images not within the bytes."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    data = zlib.compress(bytes(min((1 + 3 * side) * side, 5_000_000)), 1)
    bomb = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    sent = body({f"png.{i}": np.frombuffer(bomb, np.uint8) for i in range(2)})
    del data
    tracemalloc.start()
    with pytest.raises(WireError) as caught:
        wire.decode_request(sent, Limits(pixels=10_000, bytes=max(len(sent), 59_999)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.status == 413
    assert peak < 8 * len(sent) + 1_000_000


def test_what_is_missing_is_named_with_its_extra():
    with pytest.raises(ImportError, match=r"pip install 'flowalign\[serve\]'"):
        require("no_such_web_framework", *SERVE)


def test_pixels_and_metadata_that_cannot_be_sent_are_refused():
    broken = to_float(PIXELS)
    broken[1, 0, 0, 0] = math.nan
    for images, metadata in ((broken, METADATA), (to_float(PIXELS), [{}, {"x": math.inf}, {}])):
        with pytest.raises(WireError, match="cannot be sent") as caught:
            wire.encode_request(images, PROMPTS, metadata)
        assert caught.value.status == 422


def test_an_answer_arrives_as_it_was_sent():
    value = torch.tensor([0.1, math.nan, -3e-38])
    part = torch.tensor([1.0, math.inf, 2.0])
    scores = Scores(value, torch.tensor([True, False, True]), {"raw": part}, {1: 'a "reason" ü'})
    found = wire.decode_answer(wire.encode_answer("pickscore", scores), 3)
    assert torch.equal(found.value[[0, 2]], value[[0, 2]]) and found.value[1].isnan()
    assert found.valid.tolist() == [True, False, True] and found.reasons == scores.reasons
    assert found.parts["raw"][1].isnan() and found.parts["raw"][[0, 2]].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2 of the wire format"),
        ({"value": [1.0]}, "`value` of the answer"),
        ({"value": ["1", "2"]}, "no number"),
        ({"value": [10**400, 1]}, "too large"),
        ({"valid": [1, 0]}, "booleans"),
        ({"parts": {"raw": None}}, "`raw` of the answer"),
        ({"reasons": {"7": "out of range"}}, "by row"),
        ({"reasons": []}, "no object"),
    ],
)
def test_a_malformed_answer_is_refused(change: dict, said: str):
    good = {"version": 1, "reward": "r", "value": [1, None], "valid": [True, False], "parts": {},
            "reasons": {}}  # fmt: skip
    assert wire.decode_answer(json.dumps(good).encode(), 2).valid.tolist() == [True, False]
    with pytest.raises(WireError, match=said):
        wire.decode_answer(json.dumps({**good, **change}).encode(), 2)
    with pytest.raises(WireError, match="cannot be read"):
        wire.decode_answer(b"<html>", 2)
