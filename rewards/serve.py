"""Serve a reward over HTTP: `flowalign serve-reward NAME`. The client is `rewards/remote.py`.

POST /v1/score takes the wire format of `rewards/wire.py`, GET /v1/health says whether scoring
goes on, GET /v1/info what is served. This module imports no diffusers and no transformers, so
that a reward can be served from the old environment that its model needs.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from flowalign.images import to_float
from flowalign.rewards import build, check, describe, wire
from flowalign.rewards.lazy import SERVE, require
from flowalign.rewards.scoring import Worker, score
from flowalign.rewards.wire import TOKEN, Limits, WireError, read_token
from flowalign.types import Reward, Scores

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

_HEADER_BYTES = 16 * 1024
_CONNECTIONS = 256
# An absolute path, which is not the caller's business: two or more names with slashes before them.
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[\\/](?:[\w.~@+-]+[\\/])+[\w.~@+-]*")


@dataclass(frozen=True)
class Settings:
    """What is served, to whom and within which limits.

    name, options: of the reward, for the info route. token: what callers must show; None = none.
    queue: requests that are read, wait or are scored at once; more are answered 503.
    max_seconds: for a request once it is read, waiting included; then it is answered 504.
    read_seconds, header_seconds: for the sender to deliver the body and the head; then 408.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    token: str | None = None
    limits: Limits = Limits()
    queue: int = 16
    max_seconds: float = 300.0
    read_seconds: float = 60.0
    header_seconds: float = 10.0


def app(reward: Reward, settings: Settings) -> FastAPI:
    """The web application that serves one reward. Raises ImportError without fastapi."""
    fastapi = require("fastapi", *SERVE)
    found = fastapi.FastAPI(title="flowalign reward", openapi_url=None)
    api = _Api(reward, settings)
    found.add_route("/v1/health", api.health, methods=["GET"])
    found.add_route("/v1/info", api.info, methods=["GET"])
    found.add_route("/v1/score", api.score, methods=["POST"])
    return found


class _Api:
    """The routes. All of it runs on the event loop, but for decoding and the reward's call."""

    def __init__(self, reward: Reward, settings: Settings) -> None:
        self.reward, self.settings, self.worker = reward, settings, Worker()
        self.pending = 0

    async def health(self, request: Request) -> Response:
        """200, or 503 while a call hangs; anybody may ask."""
        busy = self.worker.busy
        stuck = busy > self.settings.max_seconds
        state = {"status": "stuck" if stuck else "ok", "busy": round(busy, 3)}
        return _json({**state, "pending": self.pending}, 503 if stuck else 200)

    async def info(self, request: Request) -> Response:
        """What is served."""
        try:
            self._authorize(request)
        except WireError as error:
            return _refusal(error)
        s = self.settings
        return _json(
            {
                "version": wire.VERSION,
                "flowalign": _release(),
                "reward": s.name,
                "options": json.loads(json.dumps(s.options, default=str)),
                "describe": describe(self.reward),
                "headline": getattr(self.reward, "headline", None),
                "limits": asdict(s.limits) | {"queue": s.queue, "seconds": s.max_seconds},
            }
        )

    async def score(self, request: Request) -> Response:
        """Scores, or a refusal that tells the caller what to change and nothing about us."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        try:
            answer = await self._answer(request)
        except WireError as error:
            return _refusal(error)
        except ClientDisconnect:  # nobody hears this
            return _refusal(WireError(400, "the sender left."))
        except Exception:
            log.exception("a request failed")
            return _refusal(WireError(500, "the server failed; its log says why."))
        return Response(answer, media_type="application/json")

    async def _answer(self, request: Request) -> bytes:
        from starlette.concurrency import run_in_threadpool

        self._authorize(request)
        self._check_head(request)
        if self.worker.busy > self.settings.max_seconds:
            raise WireError(503, "a call of the reward hangs; restart the server if it lasts.")
        if self.pending >= self.settings.queue:
            raise WireError(503, f"{self.pending} requests wait already; come again.")
        self.pending += 1
        try:
            body = await self._read(request)
            asked = await run_in_threadpool(wire.decode_request, body, self.settings.limits)
            del body
            future = self.worker.submit(partial(self._score, asked))
            del asked
            found = await asyncio.wait_for(asyncio.wrap_future(future), self.settings.max_seconds)
        except asyncio.TimeoutError:
            raise WireError(504, f"not scored within {self.settings.max_seconds:g} s.") from None
        finally:
            self.pending -= 1
        return wire.encode_answer(self.settings.name, found)

    def _authorize(self, request: Request) -> None:
        if self.settings.token is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, f"Bearer {self.settings.token}".encode()):
            raise WireError(401, "wrong or no token; send `Authorization: Bearer TOKEN`.")

    def _check_head(self, request: Request) -> None:
        """Refuse by its headers what need not be read."""
        headers = request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != wire.CONTENT_TYPE:
            raise WireError(415, f"content-type {kind[:50]!r}; send {wire.CONTENT_TYPE}.")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise WireError(415, "send the body without content-encoding.")
        self._check_length(int(headers.get("content-length", "0")))

    def _check_length(self, length: int) -> None:
        limit = self.settings.limits.bytes
        if length > limit:
            raise WireError(413, f"the body has more than the {limit} bytes that are taken.")

    async def _read(self, request: Request) -> bytes:
        try:
            return await asyncio.wait_for(self._collect(request), self.settings.read_seconds)
        except asyncio.TimeoutError:
            seconds = self.settings.read_seconds
            raise WireError(408, f"the body did not come within {seconds:g} s.") from None

    async def _collect(self, request: Request) -> bytes:
        found = bytearray()
        async for chunk in request.stream():
            found += chunk
            self._check_length(len(found))
        return bytes(found)

    def _score(self, asked: wire.Request) -> Scores:
        try:
            found = score(self.reward, to_float(asked.pixels), asked.prompts, asked.metadata)
        except (KeyboardInterrupt, SystemExit) as error:  # it would end the server's event loop
            raise RuntimeError(f"the reward raised {type(error).__name__}") from error
        return replace(found, reasons={row: clean(text) for row, text in found.reasons.items()})


def clean(reason: str) -> str:
    """A reason as callers may see it: no absolute paths, and 500 characters of it."""
    return _PATH.sub("<path>", reason)[:500]


def _release() -> str:
    try:
        return version("flowalign")
    except PackageNotFoundError:  # run from a clone
        return "not installed"


def _json(content: Mapping[str, Any], status: int = 200, **headers: str) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=status, headers=headers)


def _refusal(error: WireError) -> Response:
    more = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}
    content = {"version": wire.VERSION, "error": str(error)}
    return _json(content, error.status, **more.get(error.status, {}))


# The server --------------------------------------------------------------------------------------


def server(reward: Reward, settings: Settings) -> uvicorn.Server:
    """A uvicorn server of the application; `run(sockets=[...])` serves until a signal comes."""
    uvicorn = require("uvicorn", *SERVE)
    config = uvicorn.Config(
        app(reward, settings),
        http=_protocol(settings.header_seconds),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


def _protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP, which waits for the head of a request and for an unwanted body forever,
    with an end to both."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Patient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait()

        def eof_received(self) -> None:  # the transport closes after this
            answered = self.cycle is not None and self.cycle.response_started
            if self.conn.their_state is h11.SEND_BODY and not answered:
                self._refuse(b"400 Bad Request")  # cut off in the middle of its body

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:  # answered before it was all read
                self.transport.close()

        def _wait(self) -> None:
            """The timer runs while the head of a request is due."""
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self._late)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self._timer = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._refuse(b"408 Request Timeout")

        def _refuse(self, status: bytes) -> None:
            head = b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head)
            self.transport.close()

    return Patient


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 ended, 1 the reward cannot be loaded or the port be had, 2 refused."""
    args = _parser().parse_intermixed_args(argv)  # NAME --port 8000 key=value
    try:
        options = parse_options(args.options, args.pairs)
        check(args.name, options)
        token = read_token(os.environ)
        if token is None and not args.insecure and not _is_loopback(args.host):
            raise ValueError(
                f"--host {args.host} can be reached from other machines, and no token guards it. "
                f"Set {TOKEN} (on the client too), or say --insecure."
            )
    except ValueError as error:
        print(f"flowalign serve-reward: {error}", file=sys.stderr)
        return 2
    defaults = Limits()
    settings = Settings(
        name=args.name,
        options=options,
        token=token,
        limits=replace(
            defaults, images=args.max_batch, pixels=args.max_pixels, bytes=args.max_bytes
        ),
        queue=args.queue,
        max_seconds=args.max_seconds,
        read_seconds=args.read_seconds,
        header_seconds=args.header_seconds,
    )
    try:
        for module in ("fastapi", "uvicorn"):
            require(module, *SERVE)
        listener = _bind(args.host, args.port)
        found = server(build(args.name, **options), settings)
    except (OSError, ImportError, ValueError) as error:
        print(f"flowalign serve-reward: {error}", file=sys.stderr)
        return 1
    listener.listen()  # whoever reads the line below may call at once
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    guard = f"the token in {TOKEN}" if token else "no token"
    print(f"serving reward {args.name} on http://{address}, guarded by {guard}", flush=True)
    found.run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    limits, settings = Limits(), Settings("")
    parser = argparse.ArgumentParser(
        "flowalign serve-reward",
        description="Serve a reward over HTTP, for `name: remote` in a config elsewhere. "
        f"The token that callers must show is read from {TOKEN}.",
    )
    parser.add_argument("name", help="a reward's name, or its path as package.module:attribute")
    parser.add_argument("pairs", nargs="*", metavar="key=value", help="options of the reward")
    parser.add_argument("--options", default="{}", help="options of the reward, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--insecure", action="store_true", help="serve other machines untokened")
    parser.add_argument("--max-batch", type=int, default=limits.images, help="images a request")
    parser.add_argument("--max-bytes", type=int, default=limits.bytes, help="of a request")
    parser.add_argument("--max-pixels", type=int, default=limits.pixels, help="of an image")
    parser.add_argument("--max-seconds", type=float, default=settings.max_seconds,
                        help="for a request, waiting included")  # fmt: skip
    parser.add_argument("--read-seconds", type=float, default=settings.read_seconds,
                        help="for a request to arrive")  # fmt: skip
    parser.add_argument("--header-seconds", type=float, default=settings.header_seconds,
                        help="for its head")  # fmt: skip
    parser.add_argument("--queue", type=int, default=settings.queue, help="requests at once")
    return parser


def parse_options(text: str, pairs: Sequence[str]) -> dict[str, Any]:
    """A JSON object and key=value pairs (the value as YAML) -> options. Raises ValueError."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--options {text!r} is no JSON: {error}.") from error
    if not isinstance(options, dict):
        raise ValueError(f'--options {text!r} is no JSON object such as {{"model": "tiny"}}.')
    import yaml

    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{pair!r} is no option; write key=value.")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"the value of {pair!r} cannot be read: {error}.") from error
    return options


def _is_loopback(host: str) -> bool:
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(f"--host {host!r}: {error}.") from error
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the port but does not listen: callers are let in once all is loaded."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    found = socket.socket(family, kind, protocol)  # without its protocol, no TCP_NODELAY: +40 ms
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise OSError(f"cannot have {host}, port {port}: {error}.") from error
    return found
