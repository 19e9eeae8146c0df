"""Generated requests and answers: only refusals of our own, in time, and nothing that steers.

`-m long` runs the same properties on ten times as many inputs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import unicodedata
from typing import Any

import httpx
import pytest
import served
import torch
from generated import examples, holds, json_values, mutated
from hostile import response, saying
from hypothesis import strategies as st

from flowalign.rewards import score
from flowalign.rewards.service import wire
from flowalign.rewards.service.client import Remote
from flowalign.rewards.service.server import app
from flowalign.rewards.service.wire import Limits
from flowalign.rewards.vlm import VLM
from flowalign.types import Scores

LIMITS = Limits(images=4, pixels=64 * 64, bytes=2**16)
IMAGES = torch.zeros(2, 3, 4, 4)
GOOD = wire.encode_request("exact", IMAGES, ["a", "b"], [{}, {"x": [1, {"y": 2}]}])
FILE = base64.b64decode(json.loads(GOOD)["requests"][0]["history"][0]["image_b64"])
ANSWER = {"results": [{"exact": {"exact": 1.0, "red": 0.5}}, {}], "errors": [{}, {"exact": "no"}]}
ROSTER = {"rewards": ["exact"], "describe": {"exact": {"name": "x", "limits": [1, None]}}}
SAID = {"choices": [{"message": {"role": "assistant", "content": "Final Score: 4"}}]}
TOKEN = "correct-horse"
RAW = [  # JSON that Python's own writer does not write
    b"", b"[" * 5000, b'{"a":' * 5000, b"[" * 40 + b"]" * 40, b"NaN", b"\xff\xfe{",
    b"\xef\xbb\xbf{}", b'"' + b'\\"' * 5000, b'"\\', b'{"requests":' + b"9" * 5000 + b"}",
    b'{"requests":1e999}',
    b'{"results":[{"exact":{"exact":1e999}},{"exact":{"exact":NaN}}]}',
    b'{"results":[{"exact":{"exact":1e300}},{"exact":{"p":1e39}}]}',
    b'{"results":[{},{}],"errors":[{"exact":"\\u001b[2J"},{"exact":"\\ud800"}]}',
    b'{"results":[{"exact":{"\\u001b":1}},{}]}',
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


@st.composite
def bodies(draw: Any) -> bytes:
    """A request whose image file is damaged, or one that is changed elsewhere, or none."""
    asked = json.loads(GOOD)
    if draw(st.booleans()):
        return draw(st.one_of(st.binary(max_size=99), corrupted(GOOD), json_like(asked)))
    turn = asked["requests"][draw(st.integers(0, 1))]["history"][0]
    turn["image_b64"] = base64.b64encode(draw(corrupted(FILE))).decode()
    return json.dumps(asked).encode()


# Requests ----------------------------------------------------------------------------------------


HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "authorization": st.sampled_from(
            [f"Bearer {TOKEN}"] * 6 + ["", "Bearer", TOKEN, f"Bearer {TOKEN}x", "Bearer é", "\xff"]
        ),
        "content-type": st.sampled_from(["", "text/html", "\xe9" * 90]),
        "content-encoding": st.sampled_from(["identity", "gzip", "br", "\xff"]),
        "content-length": st.sampled_from(["0", "1", "99999999", "70000"]),
        "host": st.sampled_from(["evil.example", "", "a b"]),
    },
)
PATHS = st.sampled_from(
    ["/score"] * 8 + ["/score/", "/rewards", "/health", "/", "//", "/docs", "/%00", "/é"]
)
METHODS = st.sampled_from(["POST"] * 8 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"])


@examples(250)
def test_the_server_answers_or_refuses(count: int):
    """In this process, without a socket: what the application raises would come through."""
    served_app = app(served.exact, TOKEN, LIMITS)
    good = {"authorization": f"Bearer {TOKEN}"}
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
            detail = json.loads(answer.text)["detail"]
            assert not re.search(r"Traceback|/home|site-packages|\.py\b", detail)

    try:
        holds(
            check, count, body=bodies() | st.just(GOOD), method=METHODS, path=PATHS,
            changed=HEADERS, plain=st.booleans(),
        )  # fmt: skip
        answer = loop.run_until_complete(client.post("/score", content=GOOD, headers=good))
        assert answer.status_code == 200
    finally:
        loop.run_until_complete(client.aclose())
        loop.close()


# Answers -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["remote", "unnamed", "vlm"])
@examples(150)
def test_the_client_scores_or_says_why_not(count: int, kind: str):
    answer, options = [b""], {"timeout": 1.0, "retries": 0}
    with saying(lambda: answer) as server:
        if kind == "vlm":
            reward: Any = VLM(f"{server.url}/v1", "judge", image_size=None, **options)
        else:
            named = "exact" if kind == "remote" else None  # else it asks for the name
            reward = Remote(server.url, reward=named, **options)

        def check(talk: bytes) -> None:
            answer[0] = talk
            explained(score(reward, IMAGES, ["a", "b"], [{}, {}]))

        holds(check, count, talk=answers({"remote": ANSWER, "unnamed": ROSTER, "vlm": SAID}[kind]))


def explained(scores: Scores) -> None:
    """One number a row, finite where it is valid, or else a reason that can be printed; parts under
    printable names."""
    assert len(scores.value) == len(scores.valid) == len(IMAGES)
    assert bool(torch.isfinite(scores.value[scores.valid]).all())
    for name, part in scores.parts.items():
        assert len(part) == len(IMAGES) and name.isprintable() and not bool(part.isinf().any())
    assert set(scores.failures) == set((~scores.valid).nonzero().flatten().tolist())
    for reason in scores.reasons.values():
        reason.encode()
        assert 0 < len(reason) < 600 and not set(map(unicodedata.category, reason)) & {"Cc", "Cs"}
