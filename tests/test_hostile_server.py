"""Whatever a server sends, a caller neither hangs nor fills its memory. Real sockets."""

from __future__ import annotations

import gzip
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import torch
from hostile import response, saying

from flowalign.commands.prompts import fetch
from flowalign.rewards import score
from flowalign.rewards.service.client import Remote
from flowalign.rewards.vlm import VLM
from flowalign.system.http import Client

IMAGE = torch.zeros(1, 3, 4, 4)
LEAST = {"timeout": 0.4, "retries": 0}  # seconds; a reward's requests take at most twice that


def head(*lines: str, status: str = "200 OK") -> bytes:
    return response(b"", *lines, status=status, length=None)


BLOCK = bytes(2**16)
FLOODS = {  # what comes first, and what comes for ever
    "body": (head(), BLOCK),
    "chunks": (head("transfer-encoding: chunked"), b"10000\r\n" + BLOCK + b"\r\n"),
    "error": (head(status="400 no"), BLOCK),
    "head": (b"HTTP/1.1 200 OK\r\nx: ", b"x" * 2**16),
}
DRIP = (head(), b" ")


def endless(first: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.chain([first], itertools.repeat(piece))


def silent() -> Iterator[bytes]:
    time.sleep(2)
    yield b""


def remote(url: str) -> None:
    scores = score(Remote(url, **LEAST), IMAGE, ["a"], [{}])
    assert not scores.valid.any() and len(scores.reasons[0]) < 500


def vlm(url: str) -> None:
    scores = score(VLM(f"{url}/v1", "judge", **LEAST), IMAGE, ["a"], [{}])
    assert not scores.valid.any() and len(scores.reasons[0]) < 500


def described(url: str) -> None:
    with pytest.raises((ConnectionError, TimeoutError, ValueError)):
        Remote(url, **LEAST).describe()


def downloaded(url: str) -> None:
    with Client(**LEAST, max_bytes=2**20, redirects=True) as client:
        with pytest.raises((ConnectionError, TimeoutError, ValueError)):
            client.request("GET", f"{url}/set.txt")


Talk = Callable[[], Iterator[bytes]]
BOMB = response(gzip.compress(bytes(2**26)), "content-encoding: gzip")
# every talk to the client, and one of them to each of its callers
FLOODED = [(endless(*FLOODS[name]), downloaded) for name in FLOODS]
FLOODED += [(endless(*FLOODS["body"]), caller) for caller in (remote, vlm, described)]
FLOODED += [(lambda: iter([BOMB]), caller) for caller in (remote, vlm)]
DRIPPED = [(endless(*DRIP), caller) for caller in (downloaded, remote, vlm, described)]
DRIPPED += [(silent, downloaded)]


@pytest.mark.parametrize(("talk", "caller"), FLOODED)
def test_a_flood_is_cut_off(talk: Talk, caller: Callable[[str], None]):
    tracemalloc.start()
    with saying(talk) as server:
        began = time.monotonic()
        caller(server.url)
        seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert seconds < 4 and peak < 16, (seconds, peak)


@pytest.mark.parametrize(("talk", "caller"), DRIPPED)
def test_a_drip_is_cut_off(talk: Talk, caller: Callable[[str], None]):
    with saying(talk, pause=0.05) as server:
        began = time.monotonic()
        caller(server.url)
        assert time.monotonic() - began < 3


def test_redirects_end_and_so_do_those_that_lead_astray():
    for location in (
        "/again",
        "http://[::x]/",
        "ftp://x",
        "//",
        "http://\x80.example",
        "x" * 60_000,
    ):
        answer = response(b"", f"location: {location}", status="302 there")
        with saying(lambda answer=answer: [answer]) as server:
            with Client(timeout=2, retries=0, redirects=True) as client:
                with pytest.raises((ConnectionError, ValueError)) as caught:
                    client.request("GET", server.url)
            assert server.asked <= 6 and len(str(caught.value)) < 500, location


def test_what_a_server_says_cannot_steer_a_terminal_or_fill_a_log(caplog):
    texts = ["\x1b[2J\x1b]0;owned\x07" + "x" * 2**20, "\x9b31m\u202e"]
    for text in texts:
        answer = response(text.encode(), status="422 no")
        with saying(lambda answer=answer: [answer]) as server:
            for caller in (remote, vlm):
                caller(server.url)
    shown = "".join(record.getMessage() for record in caplog.records)
    assert r"\x1b[2J" in shown and len(shown) < 5000
    assert not set(shown) & set("\x1b\x07\x9b\u202e")


TORN = (lambda: [response(b"a cat", length=1000)], 0)


@pytest.mark.parametrize(
    ("talk", "pause"), [(endless(*FLOODS["body"]), 0), (endless(*DRIP), 0.01), TORN]
)
def test_the_fetch_of_prompts_is_bounded(talk, pause, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 2**20)
    monkeypatch.setattr(fetch, "SECONDS", 1.0)
    monkeypatch.setattr("flowalign.system.http.LONGEST_WAIT", 0.01)
    with saying(talk, pause) as server:
        began = time.monotonic()
        with pytest.raises(fetch.FetchError):
            fetch._download(f"{server.url}/set.txt")
        assert time.monotonic() - began < 6
