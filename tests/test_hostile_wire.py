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
ANSWERS = {  # of a server whose reward is named, of its list of rewards, and of a judge
    "remote": {"results": [{"exact": {"exact": 1.0, "red": 0.5}}, {}], "errors": [{"exact": "no"}]},
    "unnamed": {"rewards": ["exact"], "describe": {"exact": {"name": "x", "limits": [1, None]}}},
    "vlm": {"choices": [{"message": {"role": "assistant", "content": "Final Score: 4"}}]},
}
TOKEN = "correct-horse"
RAW = [  # JSON that Python's own writer does not write
    b"", b"[" * 5000, b'{"a":' * 5000, b"NaN", b"\xff\xfe{", b"\xef\xbb\xbf{}", b'"\\',
    b'{"requests":' + b"9" * 5000 + b"}",
    b'{"results":[{"exact":{"exact":1e999}},{"exact":{"exact":NaN}}]}',
    b'{"results":[{"exact":{"exact":1e300}},{"exact":{"p":1e39}}]}',
    b'{"results":[{},{}],"errors":[{"exact":"\\u001b[2J"},{"exact":"\\ud800"}]}',
    b'{"results":[{"exact":{"\\u001b":1}},{}]}',
    b'{"choices":[{"message":{"content":"\\ud800 Final Score: 9\\u001b[2J"}}]}',
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


HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "authorization": st.sampled_from([f"Bearer {TOKEN}", "", TOKEN, "Bearer é", "\xff"]),
        "content-encoding": st.sampled_from(["identity", "gzip", "\xff"]),
        "content-length": st.sampled_from(["0", "99999999"]),
        "host": st.sampled_from(["evil.example", ""]),
    },
)
PATHS = st.sampled_from(["/score"] * 4 + ["/score/", "/rewards", "/health", "//", "/docs", "/%00"])
METHODS = st.sampled_from(["POST"] * 4 + ["GET", "PUT", "HEAD", "BREW"])


@examples(250)
def test_the_server_answers_or_refuses(count: int):
    """In this process, without a socket: what the application raises would come through."""
    good = {"authorization": f"Bearer {TOKEN}"}
    loop = asyncio.new_event_loop()
    transport = httpx.ASGITransport(app(served.exact, TOKEN, LIMITS))
    client = httpx.AsyncClient(transport=transport, base_url="http://x", follow_redirects=False)

    def check(body: bytes, method: str, path: str, changed: dict[str, str]) -> None:
        more = [(name.encode(), text.encode("latin-1")) for name, text in (good | changed).items()]
        answer = loop.run_until_complete(client.request(method, path, content=body, headers=more))
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        assert "location" not in answer.headers
        if answer.status_code not in (200, 404, 405):
            detail = json.loads(answer.text)["detail"]
            assert not re.search(r"Traceback|/home|site-packages|\.py\b", detail)

    try:
        sent = bodies() | st.just(GOOD)
        holds(check, count, body=sent, method=METHODS, path=PATHS, changed=st.just({}) | HEADERS)
        answer = loop.run_until_complete(client.post("/score", content=GOOD, headers=good))
        assert answer.status_code == 200
    finally:
        loop.run_until_complete(client.aclose())
        loop.close()


LINES = st.sampled_from([[], ["content-encoding: gzip"], ["retry-after: 99999"], ["location: /x"],
                         ["transfer-encoding: chunked"]])  # fmt: skip
STATUSES = st.sampled_from(["200 OK"] * 4 + ["204 x", "302 x", "401 x", "422 x", "503 x", "9 x"])


@st.composite
def answers(draw: Any, document: Any) -> bytes:
    """The bytes of an HTTP answer."""
    body = draw(json_like(document))
    length = draw(st.sampled_from([len(body)] * 4 + [None, 0, len(body) + 9, 10**12]))
    return draw(corrupted(response(body, *draw(LINES), status=draw(STATUSES), length=length)))


@pytest.mark.parametrize("kind", ANSWERS)
@examples(150)
def test_the_client_scores_or_says_why_not(count: int, kind: str):
    answer, options = [b""], {"timeout": 1.0, "retries": 0}
    with saying(lambda: answer) as server:
        reward: Any = VLM(f"{server.url}/v1", "judge", image_size=None, **options)
        if kind != "vlm":
            reward = Remote(server.url, reward="exact" if kind == "remote" else None, **options)

        def check(talk: bytes) -> None:
            answer[0] = talk
            explained(score(reward, IMAGES, ["a", "b"], [{}, {}]))

        holds(check, count, talk=answers(ANSWERS[kind]))


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
