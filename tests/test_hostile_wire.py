"""Generated requests and answers: only refusals of our own, in time, and nothing that steers.

`-m long` runs the same properties on ten times as many inputs.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import served
import torch
from generated import examples, holds, json_values, mutated
from hostile import Hostile, response, saying
from hypothesis import strategies as st
from safetensors.numpy import save

from flowalign.rewards import score
from flowalign.rewards.service import wire
from flowalign.rewards.service.client import Remote
from flowalign.rewards.service.server import Settings, app
from flowalign.rewards.service.wire import Limits, WireError
from flowalign.rewards.vlm import VLM
from flowalign.types import Scores

LIMITS = Limits(images=4, pixels=64 * 64, bytes=2**16, json=2**14)
IMAGES = torch.zeros(2, 3, 4, 4)
DOCUMENT = {"version": wire.VERSION, "prompts": ["a", "b"], "metadata": [{}, {"x": [1, {"y": 2}]}]}
GOOD = wire.encode_request(IMAGES, ["a", "b"], [{}, {"x": 1}])
ANSWER = {
    "version": wire.VERSION,
    "reward": "tested",
    "value": [1.0, None],
    "valid": [True, False],
    "parts": {"red": [0.5, None]},
    "reasons": {"1": "no"},
}
INFO = {"version": wire.VERSION, "describe": {"name": "x", "limits": [1, None]}}
SAID = {"choices": [{"message": {"role": "assistant", "content": "Final Score: 4"}}]}
TOKEN = "correct-horse"
RAW = [  # JSON that Python's own writer does not write
    b"", b"[" * 5000, b'{"a":' * 5000, b"[" * 40 + b"]" * 40, b"[" + b"[]," * 3000 + b"[]]",
    b'{"version":2,"version":1}', b'{"version":2,"prompts":["\\ud800"],"metadata":[{}]}',
    b'{"version":' + b"9" * 5000 + b"}", b'{"version":2e0}', b'{"version":1e999}', b"NaN",
    b'{"version":2,"x":NaN}', b"\xff\xfe{", b"\xef\xbb\xbf{}", b'"' + b'\\"' * 5000, b'"\\',
    b'{"version":2,"value":[1e999,1],"valid":[true,true],"parts":{},"reasons":{}}',
    b'{"version":2,"value":[1e300,1],"valid":[true,true],"parts":{"p":[1,1e39]},"reasons":{}}',
    b'{"version":2,"value":[1,1],"valid":[true,false],"parts":{},"reasons":{"1":"\\u001b[2J"}}',
    b'{"version":2,"value":[1,1],"valid":[true,true],"parts":{"\\u001b":[1,1]},"reasons":{}}',
    b'{"choices":[{"message":{"content":"\\ud800 Final Score: 9\\u001b[2J"}}]}',
]  # fmt: skip


# What is generated -------------------------------------------------------------------------------


@st.composite
def json_like(draw: Any, *documents: Any) -> bytes:
    """The text of a document that is changed somewhere, or of none, or what is no JSON."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(RAW))
    document = draw(st.sampled_from(documents))
    for _ in range(draw(st.integers(0, 2))):
        if isinstance(document, dict | list):
            document = mutated(document, draw, json_values)
    text = json.dumps(_keyed(document)).encode()
    return draw(corrupted(text)) if draw(st.integers(0, 4)) == 0 else text


def _keyed(document: Any) -> Any:
    """With texts as keys, as JSON has them."""
    if isinstance(document, dict):
        return {k if isinstance(k, str) else repr(k): _keyed(v) for k, v in document.items()}
    return [_keyed(value) for value in document] if isinstance(document, list) else document


@st.composite
def corrupted(draw: Any, data: bytes) -> bytes:
    """The data with up to four changes: bytes replaced, cut out, put in, or all cut off."""
    body = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        change = draw(st.sampled_from(["replace", "delete", "insert", "cut"]))
        piece = draw(st.binary(min_size=1, max_size=8))
        if change == "cut":
            del body[at:]
        elif change == "delete":
            del body[at : at + len(piece)]
        else:
            body[at : at + len(piece) * (change == "replace")] = piece
    return bytes(body)


SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=5) | st.sampled_from(
    [[2, 4, 4, 3], [2, 4, 4, 3], [1, 4, 4, 3], [2, 70, 70, 3], [2, 1, 1, 3], [5, 1, 1, 3]]
)
DTYPES = st.sampled_from(["u1", "u1", "u1", "i1", "f4", "f8", "i8", "?", "u2"])


@st.composite
def tensor_files(draw: Any) -> bytes:
    """A well-formed safetensors file, more or less of the tensors of a request."""
    document = draw(st.just(json.dumps(DOCUMENT).encode()) | json_like(DOCUMENT)) or b"{"
    tensors = {"request": np.frombuffer(document, np.uint8)}
    names = [["images"]] * 6 + [["image"], ["images", "é\x1b"], ["image.0", "image.1"], []]
    for name in draw(st.sampled_from(names)):
        tensors[name] = np.zeros(draw(SHAPES), draw(DTYPES))
    if draw(st.integers(0, 9)) == 0:
        del tensors["request"]
    return save(tensors)


@st.composite
def headers(draw: Any) -> bytes:
    """A safetensors file whose header is any JSON."""
    fields = {
        "request": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "images": {"dtype": "U8", "shape": [1, 1, 1, 3], "data_offsets": [4, 7]},
    }
    text = draw(json_like(fields))
    size = draw(st.sampled_from([len(text)] * 5 + [0, 1, 2**14, 2**31, 2**63, 2**64 - 1]))
    return size.to_bytes(8, "little") + text + bytes(draw(st.integers(0, 20)))


class Pickled:
    """Ends this process when it is unpickled."""

    def __reduce__(self):
        return (os.abort, ())


@st.composite
def pickles(draw: Any) -> bytes:
    """A pickle, plain or as a tensor."""
    data = pickle.dumps(Pickled(), protocol=draw(st.integers(0, 5)))
    inside = save({"request": np.frombuffer(data, np.uint8)})
    return draw(st.sampled_from([data, inside, len(data).to_bytes(8, "little") + data]))


BODIES = st.one_of(
    st.binary(max_size=200), corrupted(GOOD), tensor_files(), tensor_files(), headers(), pickles()
)


# Requests ----------------------------------------------------------------------------------------


@examples(300)
def test_a_request_is_decoded_or_refused(count: int):
    def check(body: bytes) -> None:
        try:
            pixels, prompts, metadata = wire.decode_request(body, LIMITS)
        except WireError as error:
            assert error.status in (400, 413, 422)
            str(error).encode()
        else:
            assert 0 < len(prompts) == len(metadata) == len(pixels) <= LIMITS.images

    holds(check, count, body=BODIES)


HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "authorization": st.sampled_from(
            [f"Bearer {TOKEN}"] * 6 + ["", "Bearer", TOKEN, f"Bearer {TOKEN}x", "Bearer é", "\xff"]
        ),
        "content-type": st.sampled_from([wire.CONTENT_TYPE] * 6 + ["", "text/html", "\xe9" * 90]),
        "content-encoding": st.sampled_from(["identity", "gzip", "br", "\xff"]),
        "content-length": st.sampled_from(["0", "1", "99999999", "70000"]),
        "host": st.sampled_from(["evil.example", "", "a b"]),
    },
)
PATHS = st.sampled_from(
    ["/v1/score"] * 8
    + ["/v1/score/", "/v1/info", "/v1/health", "/", "//", "/docs", "/v1/%00", "/é"]
)
METHODS = st.sampled_from(["POST"] * 8 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"])


@examples(250)
def test_the_server_answers_or_refuses(count: int):
    """In this process, without a socket: what the application raises would come through."""
    served_app = app(served.exact, Settings("tested", token=TOKEN, limits=LIMITS))
    good = {"authorization": f"Bearer {TOKEN}", "content-type": wire.CONTENT_TYPE}
    loop = asyncio.new_event_loop()
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(served_app), base_url="http://x", follow_redirects=False
    )

    def check(body: bytes, method: str, path: str, changed: dict[str, str], plain: bool) -> None:
        kept = good if plain else good | changed
        more = [(name.encode(), value.encode("latin-1")) for name, value in kept.items()]
        answer = loop.run_until_complete(client.request(method, path, content=body, headers=more))
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        assert "location" not in answer.headers
        if answer.status_code not in (200, 404, 405):
            document = json.loads(answer.text)
            assert document["version"] == wire.VERSION
            assert not re.search(r"Traceback|/home|site-packages|\.py\b", document["error"])

    try:
        holds(
            check, count, body=BODIES | st.just(GOOD), method=METHODS, path=PATHS, changed=HEADERS,
            plain=st.booleans(),
        )  # fmt: skip
        answer = loop.run_until_complete(client.post("/v1/score", content=GOOD, headers=good))
        assert answer.status_code == 200
    finally:
        loop.run_until_complete(client.aclose())
        loop.close()


# Answers -----------------------------------------------------------------------------------------


@examples(300)
def test_an_answer_is_decoded_or_refused(count: int):
    def check(body: bytes) -> None:
        try:
            scores = wire.decode_answer(body, 2)
        except WireError as error:
            assert error.status == 502
            str(error).encode()
        else:
            sound(scores, 2)
        try:
            json.dumps(wire.parse(body, wire.Info, 502).describe, allow_nan=False).encode()
        except WireError as error:
            assert error.status == 502

    holds(check, count, body=json_like(ANSWER, INFO) | st.binary(max_size=100))


LINE = st.sampled_from(
    ["content-encoding: gzip", "content-type: text/html", "set-cookie: a=b", "x: " + "y" * 999,
     "retry-after: 99999", "location: /x", "transfer-encoding: chunked"]
)  # fmt: skip
ENDS = st.just([]) | st.lists(LINE, max_size=2)
STATUSES = st.sampled_from(
    ["200 OK"] * 8 + ["204 x", "302 x", "401 x", "413 x", "422 x", "500 x", "503 x", "600 x", "9 x"]
)


@st.composite
def answers(draw: Any, *documents: Any) -> bytes:
    """The bytes of an HTTP answer."""
    body = draw(json_like(*documents) | st.binary(max_size=100))
    length = draw(st.sampled_from([len(body)] * 6 + [None, 0, 1, len(body) + 9, 10**12]))
    whole = response(body, *draw(ENDS), status=draw(STATUSES), length=length)
    return draw(corrupted(whole)) if draw(st.integers(0, 3)) == 0 else whole


@contextmanager
def answering() -> Iterator[tuple[Hostile, list[bytes]]]:
    """A server, and the list whose one item it answers."""
    answer = [b""]
    with saying(lambda: [answer[0]]) as server:
        yield server, answer


@pytest.mark.parametrize("kind", ["remote", "vlm"])
@examples(150)
def test_the_client_scores_or_says_why_not(count: int, kind: str):
    with answering() as (server, answer):
        if kind == "remote":
            reward, documents = Remote(server.url, timeout=1.0, retries=0), (ANSWER, INFO)
        else:
            options = {"image_size": None, "timeout": 1.0, "retries": 0}
            reward, documents = VLM(f"{server.url}/v1", "judge", **options), (SAID,)

        def check(talk: bytes) -> None:
            answer[0] = talk
            explained(score(reward, IMAGES, ["a", "b"], [{}, {}]), 2)

        holds(check, count, talk=answers(*documents))


def sound(scores: Scores, count: int) -> None:
    """One number a row, finite where it is valid; parts under printable names."""
    assert len(scores.value) == len(scores.valid) == count
    assert bool(torch.isfinite(scores.value[scores.valid]).all())
    for name, part in scores.parts.items():
        assert len(part) == count and name.isprintable() and not bool(torch.isinf(part).any())


def explained(scores: Scores, count: int) -> None:
    """`sound`, and each invalid row has a reason that can be printed."""
    sound(scores, count)
    assert set(scores.reasons) == set((~scores.valid).nonzero().flatten().tolist())
    for reason in scores.reasons.values():
        reason.encode()
        assert 0 < len(reason) < 600 and not set(map(unicodedata.category, reason)) & {"Cc", "Cs"}
