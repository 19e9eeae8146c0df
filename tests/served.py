"""Rewards that tests serve, and a server of them in a thread or a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from fastapi import FastAPI
from torch import Tensor

from flowalign.rewards.base import RewardBase, Wrapped
from flowalign.rewards.service.server import app, server
from flowalign.rewards.service.wire import Limits
from flowalign.types import Reward, Scores

ROOT = Path(__file__).parent.parent


# Rewards -----------------------------------------------------------------------------------------


def exact(images: Tensor, prompts, metadata) -> Scores:
    """Redness in whole 8-bit steps plus what prompt and metadata add: no rounding, any batch."""
    pixels = (images * 255).round().long()
    red, rest = pixels[:, 0].sum((1, 2)), pixels[:, 1:].sum((1, 2, 3))
    extra = torch.tensor(
        [len(p) + m.get("bonus", 0) for p, m in zip(prompts, metadata, strict=True)]
    )
    value = (2 * red - rest).double() / (255 * images[0, 0].numel())
    return Scores.of((value + extra).float(), red=red.float())


class Lost(BaseException):
    """`score` lets it pass, so the server answers 500."""


class Touchy:
    """`exact`, but an image of the prompt `bad` raises an error that names a file, and one of
    `worst` calls sys.exit."""

    headline = "red"

    def __call__(self, images: Tensor, prompts, metadata) -> Scores:
        if "bad" in prompts:
            raise FileNotFoundError("no file /home/me/secret/weights.bin for 3/4 of it")
        if "worst" in prompts:
            raise SystemExit(3)
        return exact(images, prompts, metadata)


class Stuck:
    """`exact`, but the prompt `hang` hangs until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, images: Tensor, prompts, metadata) -> Scores:
        if "hang" in prompts:
            assert self.go.wait(20)
        return exact(images, prompts, metadata)


# Servers -----------------------------------------------------------------------------------------


@contextmanager
def serving(reward: Reward, token: str | None = None, **limits) -> Iterator[str]:
    """The URL of a server of this reward."""
    known = reward if isinstance(reward, RewardBase) else Wrapped(reward)
    with running(app(known, token, Limits(**limits))) as url:
        yield url


@contextmanager
def running(application: FastAPI) -> Iterator[str]:
    """The URL of a server of this application, in a thread, on a port that was free."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY on such only
    listener.bind(("127.0.0.1", 0))
    web = server(application)
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def process(
    *argv: str, port: int = 0, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[str], str]:
    """`flowalign serve-reward` in a process of its own, and its URL."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    command = [sys.executable, "-m", "flowalign.commands.cli", "serve-reward"]
    started = subprocess.Popen(
        [*command, *argv, "--port", str(port)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout
    line = started.stdout.readline()
    url = next((word.rstrip(",") for word in line.split() if word.startswith("http")), "")
    return started, url
