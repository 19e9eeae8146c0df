"""The server answers as the reward does, refuses what is wrong, and outlives both."""

from __future__ import annotations

import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import served
import torch

from flowalign.commands.cli import main
from flowalign.rewards.service import server, wire
from flowalign.system.images import to_float

IMAGES = to_float(torch.arange(4 * 3 * 8 * 8).view(4, 3, 8, 8).remainder(251).to(torch.uint8))
PROMPTS, METADATA = ["a", "bb", "ccc", "dddd"], [{}, {"bonus": 3}, {}, {}]
BODY = wire.encode_request("exact", IMAGES, PROMPTS, METADATA)


def ask(url: str, body: bytes = BODY, **headers: str) -> httpx.Response:
    answer = httpx.post(f"{url}/score", content=body, headers=headers, verify=False, timeout=60)
    assert "Traceback" not in answer.text
    return answer


def get(url: str, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{url}/{path}", headers=headers, verify=False)


def one(prompt: str, reward: str = "Stuck") -> bytes:
    return wire.encode_request(reward, IMAGES[:1], [prompt], [{}])


def raw(url: str, sent: bytes, end: bool = False) -> bytes:
    """What comes back for bytes as they are; end: the sender closes its side."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        if end:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
            if not end and b"\r\n\r\n" in answer:
                break
        return answer


def test_errors_are_per_image():
    body = wire.encode_request("Touchy", IMAGES, ["a", "bad", "c", "d"], METADATA)
    with served.serving(served.Touchy()) as url:
        answer = ask(url, body).json()
        assert [row.keys() for row in answer["results"]] == [{"Touchy"}, set(), *[{"Touchy"}] * 2]
        assert [list(row) for row in answer["errors"]] == [[], ["Touchy"], [], []]
        assert "FileNotFoundError" in answer["errors"][1]["Touchy"]
        worst = ask(url, one("worst", "Touchy")).json()  # ends no server
        assert worst["results"] == [{}] and "SystemExit" in worst["errors"][0]["Touchy"]
        assert ask(url, one("fine", "Touchy")).status_code == 200


def test_the_token_guards_all_but_health():
    with served.serving(served.exact, token="s3cret") as url:
        for headers in ({}, {"authorization": "Bearer s3cre"}, {"authorization": "s3cret"}):
            assert ask(url, BODY, **headers).status_code == 401
            assert get(url, "rewards", **headers).status_code == 401
        assert ask(url, authorization="Bearer s3cret").status_code == 200
        assert get(url, "health").json()["status"] == "ok"
        said = get(url, "rewards", authorization="Bearer s3cret").json()
        assert said == {"rewards": ["exact"], "describe": {"exact": {"name": "exact"}}}


def test_what_is_not_wanted_is_refused_unread():
    start = b"POST /score HTTP/1.1\r\nhost: x\r\n"
    with served.serving(served.exact, bytes=20_000) as url:
        announced = start + b"content-length: 99999999\r\n\r\n" + bytes(20_001)
        streamed = start + b"transfer-encoding: chunked\r\n\r\n5000\r\n" + bytes(0x5000)
        assert raw(url, announced).startswith(b"HTTP/1.1 413")
        assert raw(url, streamed).startswith(b"HTTP/1.1 413")
        assert raw(url, start + b"x: " + b"y" * 70_000).startswith(b"HTTP/1.1 400")
        assert raw(url, b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
        cut = start + b"content-length: 500\r\n\r\nabc"
        assert raw(url, cut, end=True) == b""  # it left, so there is nobody to answer
        assert get(url, "score").status_code == 405 and get(url, "nothing").status_code == 404
        assert ask(url).status_code == 200


def test_a_call_that_hangs_takes_neither_health_nor_the_next_caller_with_it():
    reward = served.Stuck()
    with served.serving(reward, seconds=0.3) as url:
        assert [ask(url, one(text)).status_code for text in ("hang", "a")] == [504, 504]
        assert get(url, "health").json()["pending"] == 0
        reward.go.set()
        assert ask(url, one("a")).status_code == 200


def test_a_body_that_does_not_come_frees_its_place():
    head = b"POST /score HTTP/1.1\r\nhost: here\r\ncontent-length: 9\r\n\r\n"
    with served.serving(served.exact, seconds=0.3) as url:
        assert raw(url, head).startswith(b"HTTP/1.1 504")
        assert get(url, "health").json()["pending"] == 0


def test_a_full_queue_turns_away_and_calls_are_made_one_at_a_time():
    reward, calls = served.Stuck(), []

    def Stuck(images, prompts, metadata):
        calls.append("in")
        scores = reward(images, prompts, metadata)
        calls.append("out")
        return scores

    with served.serving(Stuck, queue=2) as url, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, url, one("hang")) for _ in range(2)]
        until = time.monotonic() + 5
        while time.monotonic() < until and not (
            calls and get(url, "health").json()["pending"] == 2
        ):
            time.sleep(0.01)
        refused = ask(url)
        assert refused.status_code == 503 and refused.headers["retry-after"] and calls == ["in"]
        reward.go.set()
        assert [future.result().status_code for future in waiting] == [200, 200]
    assert calls == ["in", "out"] * 2


def test_the_command_refuses_what_cannot_be_served(capsys, monkeypatch) -> None:
    monkeypatch.delenv(wire.TOKEN, raising=False)
    for argv, said in (
        (["ocrr"], "'ocr'"),
        (["ocr", "engin=rapidocr"], "'engin'"),
        (["ocr", "rapidocr"], "rapidocr"),
        (["served:exact", "--host", "0.0.0.0"], wire.TOKEN),
    ):
        assert main(["serve-reward", *argv]) == 2, argv
        assert said in capsys.readouterr().err, argv


def test_without_fastapi_it_says_what_to_install(capsys, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, server.__name__)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve-reward", "ocr"]) == 2
    assert "[serve]" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve-reward", "served:exact", "--port", port]) == 2
    assert f"port {port}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end():
    process, url = served.process("served:exact", environment={wire.TOKEN: "abc"})
    try:
        assert ask(url).status_code == 401
        assert ask(url, authorization="Bearer abc").status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
        assert process.stdout
        process.stdout.close()
