"""The web server of one reward, for `flowalign serve-reward`. The client is `client.py`.

POST /v1/score takes the format of `wire.py`. GET /v1/health tells the state, /v1/info the settings.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from flowalign.rewards import as_reward, describe
from flowalign.rewards.scoring import Worker, score
from flowalign.rewards.service import wire
from flowalign.rewards.service.wire import Limits, WireError
from flowalign.system.escape import shown
from flowalign.system.images import to_float
from flowalign.system.packages import DISTRIBUTION, version
from flowalign.types import Reward, Scores

log = logging.getLogger(__name__)

_HEADER_BYTES = 16 * 1024  # of the head of a request
_REASON = 500  # characters
# An absolute path, which is not the caller's business: two or more names with slashes before them.
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[\\/](?:[\w.~@+-]+[\\/])+[\w.~@+-]*")


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

    async def refuse(request: Request, error: Exception) -> Response:
        """An answer that tells the caller what to change, and nothing about this machine."""
        if not isinstance(error, WireError):
            gone = isinstance(error, ClientDisconnect)  # then nobody hears this
            text = "the sender left." if gone else "the server failed; its log says why."
            error = WireError(400 if gone else 500, text)  # never str(error): it may hold paths
        more = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}
        content = {"version": wire.VERSION, "error": str(error)}
        return JSONResponse(content, error.status, more.get(error.status))

    routes = _Routes(reward, settings)
    # no page that names the routes, and no answer that sends callers to the host that they name
    application = FastAPI(title="flowalign reward", openapi_url=None, redirect_slashes=False)
    for kind in (WireError, ClientDisconnect, Exception):
        application.add_exception_handler(kind, refuse)
    application.add_route("/v1/health", routes.health, methods=["GET"])
    application.add_route("/v1/info", routes.info, methods=["GET"])
    application.add_route("/v1/score", routes.score, methods=["POST"])
    return application


class _Routes:
    """Everything runs on the event loop, except decoding and the reward's call."""

    def __init__(self, reward: Reward, settings: Settings) -> None:
        self.reward, self.settings, self.worker = as_reward(reward), settings, Worker()
        self.pending = 0  # requests that are read, wait or are scored
        self.decoding = asyncio.Lock()  # one at a time, as it takes four times a body's memory

    async def health(self, request: Request) -> Response:
        """200, or 503 while a call hangs; anybody may ask."""
        busy = self.worker.busy
        stuck = busy > self.settings.max_seconds
        state = {"status": "stuck" if stuck else "ok", "busy": round(busy, 3)}
        return JSONResponse({**state, "pending": self.pending}, 503 if stuck else 200)

    async def info(self, request: Request) -> Response:
        """What is served."""
        self._check_token(request)
        settings = self.settings
        more = {"queue": settings.queue, "seconds": settings.max_seconds}
        return JSONResponse(
            {
                "version": wire.VERSION,
                "flowalign": version(DISTRIBUTION),
                "reward": settings.name,
                "options": json.loads(json.dumps(settings.options, default=str)),
                "describe": describe(self.reward),
                "headline": self.reward.headline,
                "limits": asdict(settings.limits) | more,
            }
        )

    async def score(self, request: Request) -> Response:
        """The scores of a request. Raises WireError for one that is refused."""
        settings = self.settings
        limit = settings.max_seconds
        self._check_head(request)  # before its body of up to 256 MB is read
        if self.worker.busy > limit:
            raise WireError(503, "a call of the reward hangs; restart the server if it lasts.")
        if self.pending >= settings.queue:
            raise WireError(503, f"{self.pending} requests wait already; come again.")
        self.pending += 1
        try:
            body = await self._read(request)
            async with self.decoding:
                rows = await run_in_threadpool(self._decode, body)
            del body  # not kept in memory while the request waits
            future = self.worker.submit(partial(self._score, rows))
            del rows
            scores = await asyncio.wait_for(asyncio.wrap_future(future), limit)
        except asyncio.TimeoutError:
            raise WireError(504, f"not scored within {limit:g} s.") from None
        finally:
            self.pending -= 1
        answer = wire.encode_answer(settings.name, scores)
        return Response(answer, media_type="application/json")

    def _check_head(self, request: Request) -> None:
        """Refuse by its headers what need not be read."""
        self._check_token(request)
        headers = request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != wire.CONTENT_TYPE:
            raise WireError(415, f"content-type {kind[:50]!r}; send {wire.CONTENT_TYPE}.")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise WireError(415, "send the body without content-encoding.")
        if "content-length" not in headers:  # its end would be the sender's to choose
            raise WireError(411, "send the content-length, and no transfer-encoding.")
        length, limit = int(headers["content-length"]), self.settings.limits.bytes
        if length > limit:
            raise WireError(413, f"the body has {length} bytes; at most {limit} are taken.")

    def _check_token(self, request: Request) -> None:
        token = self.settings.token
        given = request.headers.get("authorization", "").encode("latin-1")
        # compare_digest takes as long for a token that is almost right as for any other
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise WireError(401, "wrong or no token; send `Authorization: Bearer TOKEN`.")

    async def _read(self, request: Request) -> bytearray:
        """The body; h11 holds the sender to its length."""

        async def collect() -> bytearray:
            body = bytearray()  # `request.body()` would hold it twice
            async for chunk in request.stream():
                body += chunk
            return body

        seconds = self.settings.read_seconds
        try:
            return await asyncio.wait_for(collect(), seconds)
        except asyncio.TimeoutError:  # before Python 3.11 not the built-in TimeoutError
            raise WireError(408, f"the body did not come within {seconds:g} s.") from None

    def _decode(self, body: bytearray) -> wire.Request:
        return wire.decode_request(bytes(body), self.settings.limits)

    def _score(self, rows: wire.Request) -> Scores:
        scores = score(self.reward, to_float(rows.pixels), rows.prompts, rows.metadata)
        return replace(scores, reasons={row: clean(text) for row, text in scores.reasons.items()})


def clean(reason: str) -> str:
    """A reason as callers may see it: without absolute paths, printable, and its beginning."""
    return shown(_PATH.sub("<path>", reason[: 10 * _REASON]), _REASON)


# The server --------------------------------------------------------------------------------------


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
