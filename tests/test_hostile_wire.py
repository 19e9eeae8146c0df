"""Generated requests and answers: read, or refused with ValueError, in time, and nothing that
steers. test_hostile_server.py sends such over sockets.

`-m long` runs the same properties on ten times as many inputs.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from typing import Any

import torch
from generated import examples, holds, json_values, mutated
from hypothesis import strategies as st

from flowalign.rewards.service import wire
from flowalign.rewards.service.wire import Limits

LIMITS = Limits(images=4, pixels=64 * 64, bytes=2**16)
GOOD = wire.encode_request("exact", torch.zeros(2, 3, 4, 4), ["a", "b"], [{}, {"x": [1, {"y": 2}]}])
FILE = base64.b64decode(json.loads(GOOD)["requests"][0]["history"][0]["image_b64"])
ANSWER = {"results": [{"exact": {"exact": 1.0, "red": 0.5}}, {}], "errors": [{"exact": "no"}]}
RAW = [  # JSON that Python's own writer does not write
    b"", b"[" * 5000, b'{"a":' * 5000, b"NaN", b"\xff\xfe{", b"\xef\xbb\xbf{}", b'"\\',
    b'{"requests":' + b"9" * 5000 + b"}",
    b'{"results":[{"exact":{"exact":1e999}},{"exact":{"exact":NaN}}]}',
    b'{"results":[{"exact":{"exact":1e300}},{"exact":{"p":1e39}}]}',
    b'{"results":[{},{}],"errors":[{"exact":"\\u001b[2J"},{"exact":"\\ud800"}]}',
    b'{"results":[{"exact":{"\\u001b":1}},{}]}',
]  # fmt: skip


@st.composite
def corrupted(draw: Any, data: bytes) -> bytes:
    """The data with a few bytes replaced, cut out or put in."""
    body = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        at, cut = draw(st.integers(0, len(body))), draw(st.sampled_from([0, 1, 8, 10**6]))
        body[at : at + cut] = draw(st.binary(max_size=8))
    return bytes(body)


@st.composite
def json_like(draw: Any, document: Any) -> bytes:
    """The text of a document that is changed somewhere, or what is no JSON."""
    for _ in range(draw(st.integers(0, 2))):
        if isinstance(document, dict | list):
            document = mutated(document, draw, json_values)
    text = json.dumps(document, skipkeys=True).encode()
    return draw(st.sampled_from([text, text, draw(corrupted(text)), draw(st.sampled_from(RAW))]))


@st.composite
def bodies(draw: Any) -> bytes:
    """A request whose image file is damaged, or one that is changed elsewhere."""
    asked = json.loads(GOOD)
    if draw(st.booleans()):
        return draw(json_like(asked))
    turn = asked["requests"][draw(st.integers(0, 1))]["history"][0]
    turn["image_b64"] = base64.b64encode(draw(corrupted(FILE))).decode()
    return json.dumps(asked).encode()


@examples(250)
def test_a_request_is_read_or_refused(count: int):
    def check(body: bytes) -> None:
        try:
            images, prompts, metadata = wire.decode_request("exact", body, LIMITS)
        except ValueError as error:
            harmless(str(error))
        else:
            assert len(images) == len(prompts) == len(metadata) <= LIMITS.images

    holds(check, count, body=bodies() | st.just(GOOD))


@examples(250)
def test_an_answer_is_read_or_refused(count: int):
    """One number a row, finite where it is valid; parts under printable names."""

    def check(body: bytes) -> None:
        try:
            scores = wire.decode_answer("exact", body, 2)
        except ValueError as error:
            harmless(str(error))
            return
        assert len(scores.value) == len(scores.valid) == 2
        assert bool(torch.isfinite(scores.value[scores.valid]).all())
        for name, part in scores.parts.items():
            assert len(part) == 2 and name.isprintable() and not bool(part.isinf().any())

    holds(check, count, body=json_like(ANSWER))


def harmless(text: str) -> None:
    """A terminal shows it, and obeys none of it."""
    text.encode()
    assert 0 < len(text) < 800 and not set(map(unicodedata.category, text)) & {"Cc", "Cs"}
