"""Does a reward server survive whatever is sent to it?

    python benchmarks/fuzz_reward_server.py --requests 10000

Starts `flowalign serve-reward` in a process and an empty folder of its own and sends it seeded
hostile requests over raw sockets: wrong types, truncated and corrupted bodies, huge heads and
bodies, pickles that would write a file, wrong tokens, slow senders, no HTTP at all. Each must get a
4xx that tells nothing about the machine, or nothing if the sender left. Between them and at the end
the server must answer a good request as it did at first; at the end no file may have appeared and
its memory must not have grown past a bound. Prints what was counted, last as one line of JSON; exit
status 1 if anything was otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.numpy import save

from flowalign.rewards.service import wire
from flowalign.rewards.service.wire import Limits, WireError
from flowalign.types import Scores

TOKEN = "correct-horse"
LIMITS = Limits(images=8, pixels=512 * 512, bytes=4 * 2**20)
SECONDS = 1.0  # that a sender is given
GROWTH = 256  # MB that the server may grow by: a few requests at their limits, unpacked


def brightness(images, prompts, metadata) -> Scores:
    """What is served."""
    return Scores.of((images * 255).round().sum((1, 2, 3)))


@dataclass(frozen=True)
class Attack:
    """Bytes to send one after the other; slow: pause between them, then wait to be cut off."""

    kind: str
    parts: list[bytes]
    slow: bool = False
    end: bool = False  # the sender closes its side: nobody is there to be answered


# What is sent ------------------------------------------------------------------------------------


def head(length: int | None, *lines: str, token: str | None = TOKEN, kind: str = wire.CONTENT_TYPE,
         start: str = "POST /v1/score HTTP/1.1") -> bytes:  # fmt: skip
    """The head of a request."""
    head = [start, "host: x", f"content-type: {kind}", *lines]
    head += [] if token is None else [f"authorization: Bearer {token}"]
    head += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*head, "", ""]).encode("latin-1")


def post(kind: str, body: bytes, *lines: str, token: str | None = TOKEN) -> Attack:
    return Attack(kind, [head(len(body), *lines, token=token) + body])


def good() -> bytes:
    pixels = torch.arange(2 * 3 * 16 * 16).view(2, 3, 16, 16).remainder(256).to(torch.uint8)
    return wire.encode_request(pixels.float() / 255, ["a", "b"], [{}, {"x": 1}])


GOOD = good()


class Pickled:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return (os.system, ("touch pwned; touch /tmp/flowalign_pwned",))


def tensors(random: random.Random) -> bytes:
    """A safetensors file that is well-formed, and no request."""
    text = json.dumps({"version": 2, "prompts": ["a", "b"], "metadata": [{}, {}]}).encode()
    document, u8 = np.frombuffer(text, np.uint8), np.uint8
    good = np.zeros((2, 4, 4, 3), u8)
    other = random.choice([np.float32, np.int64, np.uint16, np.float64, np.int8, np.bool_])
    shape = random.choice(
        [(2, 4, 4), (2, 4, 4, 1), (2, 0, 4, 3), (96,), (2, 1, 4, 4, 3), (3, 4, 4, 3)]
    )
    return save(
        random.choice(
            [
                {"request": document, "image.0": good[0], "image.1": good[1]},
                {"request": document, "image": good},
                {"request": document, "images": good, "x": good},
                {"request": document, "images": np.zeros(shape, u8)},
                {"request": document, "images": good.astype(other)},
                {"request": document, "images": np.zeros((2, 600, 600, 3), u8)},
                {"request": document, "images": np.frombuffer(random.randbytes(99), u8)},
                {"request": document},
                {"images": good},
                {f"t{i}": good[0, 0, 0] for i in range(random.choice([1, 30, 500]))},
            ]
        )
    )


def document(random: random.Random) -> bytes:
    """A request whose JSON is wrong."""
    anything = [None, True, 7, -1.5, "text", [], {}, [None], {"a": 1}, [[]], "é" * 9, 10**30]
    fields = {"version": 2, "prompts": ["a", "b"], "metadata": [{}, {}]}
    wrong = random.choice(
        [
            lambda: {**fields, random.choice(list(fields)): random.choice(anything)},
            lambda: {k: v for k, v in fields.items() if k != random.choice(list(fields))},
            lambda: {**fields, "extra": random.choice(anything)},
            lambda: {**fields, "prompts": ["a", random.choice([None, 3, [], {}])]},
            lambda: {**fields, "metadata": [{}, random.choice([None, 3, [], "x"])]},
            lambda: {**fields, "prompts": ["a"] * 99, "metadata": [{}] * 99},
            lambda: {**fields, "prompts": ["a" * 20_000, "b"]},
            lambda: random.choice(anything),
        ]
    )()
    raw = random.choice(
        [
            b"",
            b"{" * 5000,
            b"[" * 100_000,
            b'{"version":2,"prompts":["a","b"],"metadata":[{},{"x":'
            + b"[" * 40
            + b"]" * 40
            + b"}]}",
            b'{"version":2,"prompts":["a","b"],"metadata":[{},{"x":NaN}]}',
            b'{"version":2,"prompts":["\\ud800","b"],"metadata":[{},{}]}',
            b'{"version":' + b"9" * 5000 + b"}",
            b'{"version":1e999}',
            b"\xff\xfe\x00",
            random.randbytes(50),
            pickle.dumps(fields),
        ]
    )
    text = raw if random.random() < 0.3 else json.dumps(wrong).encode()
    images = np.zeros((2, 4, 4, 3), np.uint8)
    return save({"request": np.frombuffer(text, np.uint8), "images": images})


def corrupted(random: random.Random) -> bytes:
    """A good request with a few bytes of its header changed, or cut somewhere."""
    if random.random() < 0.5:
        return GOOD[: random.randrange(len(GOOD))]
    size = 8 + int.from_bytes(GOOD[:8], "little")
    body = bytearray(GOOD)
    for _ in range(random.randrange(1, 6)):
        body[random.randrange(size)] = random.randrange(256)
    return bytes(body)


def not_http(random: random.Random) -> Attack:
    """What is no request, or one that HTTP forbids."""
    start = "POST /v1/score HTTP/1.1"
    return Attack(
        "no HTTP",
        [
            random.choice(
                [
                    random.randbytes(60) + b"\r\n\r\n",
                    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
                    + random.randbytes(90)
                    + b"\r\n\r\n",
                    pickle.dumps(Pickled()) + b"\r\n\r\n",
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    head(None, "content-length: -5"),
                    head(None, "content-length: 5, 6"),
                    head(None, "content-length: 1e3"),
                    head(7, "content-length: 8"),
                    head(None, "transfer-encoding: gzip, chunked"),
                    head(None, "transfer-encoding: chunked") + b"zz\r\n",
                    head(None, "transfer-encoding: chunked") + b"f" * 40 + b"\r\n",
                    head(0, "bad header"),
                    head(0, "x\0y: 1"),
                    head(0, start=f"POST /v1/score{random.choice(['', '?a'])} HTTP/3"),
                    head(0, start="POST /v1/sc ore HTTP/1.1"),
                    start.encode() + b"\r\ncontent-length: 0\r\n\r\n",  # no host
                ]
            )
        ],
    )


def huge(random: random.Random) -> Attack:
    """More than is taken, in the head or in the body."""
    big = "x" * random.choice([20_000, 100_000, 1_000_000])
    chunk = b"40000\r\n" + bytes(0x40000) + b"\r\n"
    return Attack(
        "huge",
        random.choice(
            [
                lambda: [head(0, f"x-big: {big}")],
                lambda: [head(0, start=f"POST /v1/score?{big} HTTP/1.1")],
                lambda: [head(0, *[f"x-{i}: {i}" for i in range(5000)])],
                lambda: [head(random.choice([5 * 2**20, 10**12]))],
                lambda: [head(5 * 2**20) + bytes(2**20)],
                lambda: [head(None, "transfer-encoding: chunked"), *[chunk] * 20],
            ]
        )(),
    )


def pickled(random: random.Random) -> Attack:
    """A pickle wherever one could be put."""
    data = pickle.dumps(Pickled(), protocol=random.randrange(6))
    kind = random.choice(
        [wire.CONTENT_TYPE, "application/octet-stream", "application/python-pickle"]
    )
    inside = save({"request": np.frombuffer(data, np.uint8)})
    body = random.choice([data, inside, len(data).to_bytes(8, "little") + data])
    return Attack("pickle", [head(len(body), kind=kind) + body])


def unwelcome(random: random.Random) -> Attack:
    """A good request of somebody without the token, or somewhere or somehow else."""
    wrong = random.choice([None, "", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\xe9" * 9])
    if random.random() < 0.5:
        return post("wrong token", GOOD, token=wrong)
    paths = "/ // /v1/ /v2/score /v1/score/../../etc/passwd /docs /v1/%00 /openapi.json".split()
    routes = ["GET /v1/score", "PUT /v1/score", "DELETE /v1/info", "POST /v1/health"]
    start = random.choice([f"GET {random.choice(paths)}", *routes]) + " HTTP/1.1"
    kinds = random.choice([("content-encoding: gzip",), ("content-encoding: br",)])
    return random.choice(
        [
            Attack("wrong place", [head(0, start=start)]),
            post("wrong encoding", GOOD, *kinds),
            Attack("wrong type", [head(len(GOOD), kind="multipart/form-data; boundary=x") + GOOD]),
        ]
    )


def slow(random: random.Random) -> Attack:
    """A sender who stops, or drips, or leaves in the middle."""
    cut = random.randrange(len(GOOD))
    whole = head(len(GOOD))
    return random.choice(
        [
            Attack("slow head", [whole[: random.randrange(1, 60)], b"x", b"y"], slow=True),
            Attack("slow head", [b""], slow=True),
            Attack("slow body", [whole + GOOD[:cut]], slow=True),
            Attack("slow body", [whole, *[GOOD[i : i + 1] for i in range(4)]], slow=True),
            Attack("leaves", [whole + GOOD[:cut]], end=True),
        ]
    )


def attacks(count: int, slow_ones: int, seed: int) -> Iterator[Attack]:
    """The requests; the slow ones are spread evenly."""
    source = random.Random(seed)
    bodies: dict[str, Callable[[random.Random], bytes]] = {
        "tensors": tensors, "JSON": document, "corrupted": corrupted,
        "garbage": lambda r: r.randbytes(r.randrange(3000)),
    }  # fmt: skip
    kinds = [*bodies, not_http, huge, pickled, unwelcome]
    every = max(1, count // max(1, slow_ones))
    for number in range(count):
        if slow_ones and number % every == 0:
            yield slow(source)
            continue
        kind = source.choice(kinds)
        yield kind(source) if callable(kind) else post(kind, hostile(bodies[kind], source))


def hostile(make: Callable[[random.Random], bytes], source: random.Random) -> bytes:
    """What is made, made again if it happens to be a valid request."""
    while True:
        body = make(source)
        try:
            wire.decode_request(body, LIMITS)
        except WireError:
            return body


# Who sends it ------------------------------------------------------------------------------------


def send(port: int, attack: Attack) -> bytes:
    """What the server answers, until it closes or the answer is whole."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            for part in attack.parts:
                connection.sendall(part)
                if attack.slow:
                    time.sleep(SECONDS / 20)
            if attack.end:
                connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered before it heard us out
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
                length = re.search(rb"content-length: (\d+)", answer)
                whole = answer.partition(b"\r\n\r\n")[2]
                if length and len(whole) >= int(length[1]):
                    break
        except ConnectionResetError:
            pass
        return answer


def verdict(attack: Attack, answer: bytes) -> str:
    """ "4xx" with its number, or what is wrong with the answer."""
    if attack.end and not answer:
        return "0"
    status = re.match(rb"HTTP/1.1 (\d{3})", answer)
    if not status:
        return f"no answer: {answer[:60]!r}"
    if re.search(rb"Traceback|/usr/|/work/|site-packages|\.py", answer):
        return f"tells too much: {answer[-200:]!r}"
    number = status[1].decode()
    return number if number[0] == "4" else f"{number}: {answer[-200:]!r}"


def memory(process: subprocess.Popen[str], field: str = "VmRSS") -> float:
    """MB of the process, now (VmRSS) or at most so far (VmHWM)."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", text)
    return int(kilobytes) / 1024


def start(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """The server and its port."""
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-m", "flowalign.cli", "serve-reward", "fuzz_reward_server:brightness",
         "--port", "0", "--max-batch", str(LIMITS.images), "--max-bytes", str(LIMITS.bytes),
         "--max-pixels", str(LIMITS.pixels), "--read-seconds", str(SECONDS),
         "--header-seconds", str(SECONDS), "--queue", "32"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}", wire.TOKEN: TOKEN},
        stdout=subprocess.PIPE,
        stderr=(folder.parent / "stderr").open("w"),
        text=True,
    )  # fmt: skip
    assert process.stdout
    port = re.search(r":(\d+),", process.stdout.readline())
    if not port:
        raise RuntimeError("the server did not start")
    return process, int(port[1])


def fuzz(count: int, slow_ones: int, seed: int, threads: int) -> dict:
    """Send `count` attacks; returns what was counted and what was wrong."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    with TemporaryDirectory() as name:
        folder = Path(name) / "empty"
        folder.mkdir()
        process, port = start(folder)
        asked = post("good", GOOD)
        expected = send(port, asked).partition(b"\r\n\r\n")[2]
        began, before, trace = time.monotonic(), memory(process), []
        try:
            with ThreadPoolExecutor(threads) as pool:
                todo = attacks(count, slow_ones, seed)
                for done in range(0, count, 250):
                    some = [attack for attack, _ in zip(todo, range(250), strict=False)]
                    for attack, answer in zip(
                        some, pool.map(lambda a: verdict(a, send(port, a)), some), strict=True
                    ):
                        counts[f"{attack.kind} {answer}" if answer.isdigit() else "wrong"] += 1
                        if not answer.isdigit():
                            wrong.append(f"{attack.kind}: {answer} to {attack.parts[0][:90]!r}")
                    trace.append(round(memory(process)))
                    if send(port, asked).partition(b"\r\n\r\n")[2] != expected:
                        wrong.append(
                            f"after {done + len(some)} requests a good one fared otherwise"
                        )
            seconds, peak = time.monotonic() - began, memory(process, "VmHWM")
            if process.poll() is not None:
                wrong.append("the server ended")
        finally:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()
        files = [str(path) for path in folder.rglob("*")]
        errors = (Path(name) / "stderr").read_text()
    pwned = Path("/tmp/flowalign_pwned")
    wrong += [f"a file appeared: {path}" for path in [*files, *([pwned] if pwned.exists() else [])]]
    if "Traceback" in errors:
        wrong.append(f"the server logged an error: {errors[-500:]}")
    if peak - before > GROWTH:
        wrong.append(f"memory rose from {before:.0f} to {peak:.0f} MB")
    for text in wrong[:20]:
        print(text)
    for kind, number in sorted(counts.items()):
        print(f"{kind:24}{number:7}")
    return {"requests": count, "wrong": len(wrong), "seconds": round(seconds, 1),
            "MB": {"before": round(before), "peak": round(peak),
                   "along the way": trace[:: max(1, len(trace) // 10)]}}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--slow", type=int, default=200, help="of these, slow senders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    result = fuzz(args.requests, args.slow, args.seed, args.threads)
    print(json.dumps(result))
    return int(result["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
