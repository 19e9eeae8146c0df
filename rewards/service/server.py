"""`flowalign serve-reward NAME`: the web server of one reward. The client is `client.py`.

POST /v1/score takes the format of `wire.py`. GET /v1/health tells the state, /v1/info the settings.
This module imports no diffusers or transformers, so that a reward can be served from the old
environment that its model needs.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from flowalign.config import assignments
from flowalign.rewards import as_reward, build_on, check, describe
from flowalign.rewards.scoring import Worker, score
from flowalign.rewards.service import wire
from flowalign.rewards.service.wire import Limits, WireError
from flowalign.system.images import to_float
from flowalign.system.packages import DISTRIBUTION, require, version
from flowalign.types import Metadata, Reward, Scores

if require("fastapi", "flowalign serve-reward needs"):
    import uvicorn
    from fastapi import Depends, FastAPI, Request, Response
    from fastapi.responses import JSONResponse
    from starlette.concurrency import run_in_threadpool

_HEADER_BYTES = 16 * 1024  # of the head of a request


@dataclass(frozen=True)
class Settings:
    """What is served, to whom and within which limits. name, options: of the reward."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # for the info route only
    token: str | None = None  # what callers must show; None = nothing
    limits: Limits = Limits()
    queue: int = 16  # requests being read, waiting or being scored; more are answered 503
    max_seconds: float = 300.0  # for a request once it is read, waiting included; then 504
    read_seconds: float = 60.0  # for the sender to deliver the body; then 408


# The application ---------------------------------------------------------------------------------


def app(reward: Reward, settings: Settings) -> FastAPI:
    """The web application that serves one reward."""
    routes = _Routes(reward, settings)
    application = FastAPI(
        exception_handlers={WireError: _refuse, Exception: _refuse},
        openapi_url=None,  # no page names the routes
        redirect_slashes=False,  # no answer sends callers to the host that they name
    )
    guards = [Depends(routes.check_token)]
    application.get("/v1/health")(routes.health)
    application.get("/v1/info", dependencies=guards)(routes.info)
    application.post("/v1/score", dependencies=guards)(routes.score)
    return application


async def _refuse(request: Request, error: Exception) -> Response:
    """An answer that tells the caller what to change, and nothing about this machine."""
    if not isinstance(error, WireError):  # never its str: it may hold paths
        error = WireError(500, "the server failed.")
    headers = {"retry-after": "1"} if error.status == 503 else None
    content = {"version": wire.VERSION, "error": str(error)}
    return JSONResponse(content, error.status, headers)


class _Routes:
    """Everything runs on the event loop, except decoding and the reward's call."""

    def __init__(self, reward: Reward, settings: Settings) -> None:
        self.reward, self.settings, self.worker = as_reward(reward), settings, Worker()
        self.pending = 0  # requests that are read, wait or are scored
        self.began: float | None = None  # when the current call of the reward did
        self.decoding = asyncio.Lock()  # one at a time, as it takes four times a body's memory

    @property
    def busy(self) -> float:
        """For how many seconds the current call has run; 0 if there is none."""
        began = self.began  # read once: the worker may reset it in between
        return 0.0 if began is None else time.monotonic() - began

    async def check_token(self, request: Request) -> None:
        """Raises WireError for a request without the token, before its body is read."""
        token = self.settings.token
        given = request.headers.get("authorization", "").encode("latin-1")
        # compare_digest takes as long for a token that is almost right as for any other
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise WireError(401, "wrong or no token; send `Authorization: Bearer TOKEN`.")

    async def health(self) -> Response:
        """200, or 503 while a call hangs; anybody may ask."""
        stuck = self.busy > self.settings.max_seconds
        state = {"status": "stuck" if stuck else "ok", "busy": round(self.busy, 3)}
        return JSONResponse({**state, "pending": self.pending}, 503 if stuck else 200)

    async def info(self) -> dict[str, Any]:
        """What is served."""
        settings = self.settings
        more = {"queue": settings.queue, "seconds": settings.max_seconds}
        return {
            "version": wire.VERSION,
            "flowalign": version(DISTRIBUTION),
            "reward": settings.name,
            "options": json.loads(json.dumps(settings.options, default=str)),
            "describe": describe(self.reward),
            "headline": self.reward.headline,
            "limits": asdict(settings.limits) | more,
        }

    async def score(self, request: Request) -> Response:
        """The scores of a request. Raises WireError for one that is refused."""
        settings = self.settings
        if self.busy > settings.max_seconds:
            raise WireError(503, "a call of the reward hangs; restart the server if it lasts.")
        if self.pending >= settings.queue:
            raise WireError(503, f"{self.pending} requests wait already; come again.")
        self.pending += 1
        try:
            body = await _within(settings.read_seconds, self._read(request), 408)
            async with self.decoding:
                rows = await run_in_threadpool(wire.decode_request, bytes(body), settings.limits)
            del body  # not kept in memory while the request waits
            future = asyncio.wrap_future(self.worker.submit(partial(self._score, *rows)))
            del rows
            scores = await _within(settings.max_seconds, future, 504)
        finally:
            self.pending -= 1
        answer = wire.encode_answer(settings.name, scores)
        return Response(answer, media_type="application/json")

    async def _read(self, request: Request) -> bytearray:
        """The body, as far as it may be long; h11 holds the sender to its length."""
        body, limit = bytearray(), self.settings.limits.bytes  # `request.body()` holds it twice
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise WireError(413, f"the body is too large; at most {limit} bytes are taken.")
        return body

    def _score(self, pixels: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        self.began = time.monotonic()
        try:
            return score(self.reward, to_float(pixels), prompts, metadata)
        finally:
            self.began = None


async def _within(seconds: float, result: Any, status: int) -> Any:
    """What is awaited. Raises WireError of this status if it takes longer."""
    try:
        return await asyncio.wait_for(result, seconds)
    except asyncio.TimeoutError:  # before Python 3.11 not the built-in TimeoutError
        raise WireError(status, f"not done within {seconds:g} s.") from None


# The command -------------------------------------------------------------------------------------


def server(reward: Reward, settings: Settings) -> uvicorn.Server:
    """A uvicorn server of the application; `run(sockets=[...])` serves until a signal comes."""
    config = uvicorn.Config(
        app(reward, settings),
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_level="critical",  # a body that is no HTTP would be a stack trace in the log
        access_log=False,
        proxy_headers=False,  # a caller must not choose its own address
        server_header=False,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_graceful_shutdown=5,  # seconds for the request being scored
    )
    return uvicorn.Server(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 ended, 1 no reward could be loaded or no port be had, 2 refused."""
    args = _parser().parse_intermixed_args(argv)  # NAME --port 8000 key=value
    try:
        options = {**json.loads(args.options), **assignments(args.pairs)}
        check(args.name, options)
        token = wire.read_token()
        local = args.host in ("localhost", "127.0.0.1", "::1")
        if token is None and not args.insecure and not local:
            raise ValueError(f"to serve other machines, set {wire.TOKEN}, or say --insecure.")
    except (ValueError, TypeError) as error:
        print(f"flowalign serve-reward: {error}", file=sys.stderr)
        return 2
    limits = Limits(args.max_batch, args.max_pixels, args.max_bytes)
    waits = args.queue, args.max_seconds, args.read_seconds
    settings = Settings(args.name, options, token, limits, *waits)
    # asyncio sets TCP_NODELAY only on a socket that names its protocol; else +40 ms a request
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    listener = socket.socket(family, proto=socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((args.host, args.port))  # before the model loads, as it may fail
        web = server(build_on(None, args.name, options), settings)
    except (OSError, ImportError, ValueError) as error:
        listener.close()
        text = f"no reward {args.name} on {args.host}, port {args.port}: {error}"
        print(f"flowalign serve-reward: {text}", file=sys.stderr)
        return 1
    listener.listen()  # whoever reads the line below may call at once
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    guard = f"the token in {wire.TOKEN}" if token else "no token"
    print(f"serving reward {args.name} on http://{address}, guarded by {guard}", flush=True)
    web.run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = Settings("")
    parser = argparse.ArgumentParser(
        "flowalign serve-reward",
        description="Serve a reward over HTTP, for `name: remote` in a config elsewhere. "
        f"The token that callers must show is read from {wire.TOKEN}.",
    )
    parser.add_argument("name", help="a reward's name, or its path as package.module:attribute")
    parser.add_argument("pairs", nargs="*", metavar="key=value", help="options of the reward")
    parser.add_argument("--options", default="{}", help="options of the reward, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--insecure", action="store_true", help="serve other machines untokened")
    for flag, default, text in (
        ("--max-batch", defaults.limits.images, "images a request"),
        ("--max-bytes", defaults.limits.bytes, "of a request"),
        ("--max-pixels", defaults.limits.pixels, "of an image"),
        ("--max-seconds", defaults.max_seconds, "for a request, waiting included"),
        ("--read-seconds", defaults.read_seconds, "for a request to arrive"),
        ("--queue", defaults.queue, "requests at once"),
    ):
        parser.add_argument(
            flag, type=type(default), default=default, help=f"{text} (default: {default:g})"
        )
    return parser
