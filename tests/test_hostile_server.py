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
from flowalign.system import http
from flowalign.system.http import Client

IMAGE = torch.zeros(1, 3, 4, 4)
LEAST = {"timeout": 0.4, "retries": 0}  # seconds; an answer takes at most twice that
BLOCK = bytes(2**16)


def head(*lines: str, status: str = "200 OK") -> bytes:
    return response(b"", *lines, status=status, length=None)


TALKS = {  # what comes first, and what comes for ever
    "body": (head(), BLOCK),
    "chunks": (head("transfer-encoding: chunked"), b"10000\r\n" + BLOCK + b"\r\n"),
    "error": (head(status="400 no"), BLOCK),
    "head": (b"HTTP/1.1 200 OK\r\nx: ", b"x" * 2**16),
    "bomb": (response(gzip.compress(bytes(2**26)), "content-encoding: gzip"), b""),
    "drip": (head(), b" "),
    "silence": (b"", b""),
}


def remote(url: str) -> None:
    scores = score(Remote(url, **LEAST), IMAGE, ["a"], [{}])
    assert not scores.valid.any() and len(scores.reasons[0]) < 500


def vlm(url: str) -> None:
    scores = score(VLM(f"{url}/v1", "judge", **LEAST), IMAGE, ["a"], [{}])
    assert not scores.valid.any() and len(scores.reasons[0]) < 500


def downloaded(url: str) -> None:
    with pytest.raises(fetch.FetchError):
        fetch._download(f"{url}/set.txt")


@pytest.mark.parametrize(
    ("name", "caller"),
    [
        *((name, downloaded) for name in ("body", "head", "error", "drip", "silence")),
        *((name, remote) for name in ("body", "chunks", "bomb")),
        ("drip", vlm),
    ],
)
def test_a_flood_or_a_drip_is_cut_off(name: str, caller: Callable[[str], None], monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 2**20)
    monkeypatch.setattr(fetch, "FILE_SECONDS", 1.0)
    monkeypatch.setattr(http, "LONGEST_WAIT", 0.01)
    first, piece = TALKS[name]

    def talk() -> Iterator[bytes]:
        return itertools.chain([first], itertools.repeat(piece))

    tracemalloc.start()
    with saying(talk, 0.05 if len(piece) < 2 else 0.0) as server:
        began = time.monotonic()
        caller(server.url)
        seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert seconds < 5 and peak < 16, (seconds, peak)


def test_redirects_end_and_so_do_those_that_lead_astray():
    for location in ("/again", "http://[::x]/", "ftp://x", "http://\x80.example", "x" * 60_000):
        answer = response(b"", f"location: {location}", status="302 there")
        with saying(lambda answer=answer: [answer]) as server:
            with Client(timeout=2, retries=0, redirects=True) as client:
                with pytest.raises((ConnectionError, ValueError)) as caught:
                    client.request("GET", server.url)
            assert server.asked <= 6 and len(str(caught.value)) < 500, location


def test_what_a_server_says_cannot_steer_a_terminal_or_fill_a_log(caplog):
    for text in ("\x1b[2J\x1b]0;owned\x07" + "x" * 2**20, "\x9b31m\u202e"):
        answer = response(text.encode(), status="422 no")
        with saying(lambda answer=answer: [answer]) as server:
            for caller in (remote, vlm):
                caller(server.url)
    shown = "".join(record.getMessage() for record in caplog.records)
    assert r"\x1b[2J" in shown and len(shown) < 5000
    assert not set(shown) & set("\x1b\x07\x9b\u202e")
