"""`flowalign serve-reward NAME`: the web server of one reward. The client is `client.py`.

POST /score takes what `wire.py` describes. GET /rewards tells what is served, /health the state.
This module imports no diffusers or transformers, so that a reward can be served from the old
environment that its model needs.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from flowalign.config import assignments
from flowalign.rewards import RewardBase, RewardSpec, describe
from flowalign.rewards.options import read_token
from flowalign.rewards.scoring import Worker, score
from flowalign.rewards.service import wire
from flowalign.rewards.service.wire import Limits
from flowalign.system.exit import refusing
from flowalign.system.images import to_float
from flowalign.system.packages import require
from flowalign.types import Metadata, Scores

if require("fastapi", "flowalign serve-reward needs"):
    import uvicorn
    from fastapi import Depends, FastAPI, HTTPException, Request, Response
    from starlette.concurrency import run_in_threadpool


def app(reward: RewardBase, token: str | None, limits: Limits) -> FastAPI:
    """The web application that serves one reward. token: what callers must show; None = nothing."""
    routes = _Routes(reward, token, limits)
    # no page names the routes, and no answer sends callers to the host that they name
    application = FastAPI(openapi_url=None, redirect_slashes=False)
    guards = [Depends(routes.check_token)]
    application.get("/health")(routes.health)
    application.get("/rewards", dependencies=guards)(routes.rewards)
    application.post("/score", dependencies=guards)(routes.score)
    return application


class _Routes:
    """Everything runs on the event loop, except decoding and the reward's call."""

    def __init__(self, reward: RewardBase, token: str | None, limits: Limits) -> None:
        self.reward = reward
        self.token = token
        self.limits = limits
        self.worker = Worker()
        self.pending = 0  # requests that are read, wait or are scored
        self.decoding = asyncio.Lock()  # one at a time, for the memory that it takes

    async def check_token(self, request: Request) -> None:
        """Refuse a request without the token, before its body is read."""
        header = request.headers.get("authorization", "").encode("latin-1")
        # compare_digest takes as long for a token that is almost right as for any other
        if self.token and not hmac.compare_digest(header, f"Bearer {self.token}".encode()):
            raise HTTPException(401, "wrong or no token; send `Authorization: Bearer TOKEN`.")

    async def health(self) -> dict[str, Any]:
        """The state of the server; no token is needed."""
        ready = {self.reward.name: ["ready"]}
        return {"status": "ok", "pending": self.pending, "rewards": ready}

    async def rewards(self) -> dict[str, Any]:
        """What is served."""
        name = self.reward.name
        return {"rewards": [name], "describe": {name: describe(self.reward)}}

    async def score(self, request: Request) -> Response:
        """The scores of a request. Raises HTTPException for one that is refused."""
        if self.pending >= self.limits.queue:
            raise HTTPException(503, f"{self.pending} requests wait already.", {"retry-after": "1"})
        self.pending += 1
        try:
            body = await asyncio.wait_for(self._read(request), self.limits.seconds)
            async with self.decoding:
                rows = await run_in_threadpool(self._decode, body)
            del body  # not kept in memory while the request waits
            future = asyncio.wrap_future(self.worker.submit(partial(self._score, *rows)))
            scores = await asyncio.wait_for(future, self.limits.seconds)
        except asyncio.TimeoutError:  # before Python 3.11 not the built-in TimeoutError
            raise HTTPException(504, f"not done within {self.limits.seconds:g} s.") from None
        finally:
            self.pending -= 1
        answer = wire.encode_answer(self.reward.name, scores)
        return Response(answer, media_type="application/json")

    async def _read(self, request: Request) -> bytearray:
        """The body, as far as it may be long; h11 holds the sender to its length."""
        body = bytearray()  # `request.body()` holds it twice
        limit = self.limits.bytes
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise HTTPException(413, f"the body is too large; at most {limit} bytes fit.")
        return body

    def _decode(self, body: bytearray) -> tuple[Tensor, list[str], Metadata]:
        try:
            return wire.decode_request(self.reward.name, body, self.limits)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    def _score(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        return score(self.reward, to_float(images), prompts, metadata)


def server(application: FastAPI) -> uvicorn.Server:
    """A uvicorn server of the application; `run(sockets=[...])` serves until a signal comes."""
    config = uvicorn.Config(
        application,
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_level="critical",  # a body that is no HTTP would be a stack trace in the log
        access_log=False,
        proxy_headers=False,  # a caller must not choose its own address
        server_header=False,
        h11_max_incomplete_event_size=2**14,  # bytes of the head of a request
        timeout_graceful_shutdown=5,  # seconds for the request being scored
    )
    return uvicorn.Server(config)


@refusing("serve-reward")
def main(args: argparse.Namespace) -> int:
    """Exit status: 0 = ended, 2 = refused, or there is no such reward or port."""
    options, token = assignments(args.pairs), read_token(wire.TOKEN)
    spec = RewardSpec(args.name, options)
    spec.check()
    if token is None and not args.insecure and args.host not in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(f"to serve other machines, set {wire.TOKEN}, or say --insecure.")
    # asyncio sets TCP_NODELAY only on a socket that names its protocol; else +40 ms a request
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.socket(family, proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((args.host, args.port))  # before the model loads, as it may fail
        except OSError as error:
            raise OSError(f"{args.host}, port {args.port}: {error}") from error
        reward = spec.build()
        limits = Limits(**{k: v for k, v in vars(args).items() if k in vars(Limits())})
        web = server(app(reward, token, limits))
        listener.listen()  # whoever reads the line below may call at once
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        guard = f"the token in {wire.TOKEN}" if token else "no token"
        print(f"serving reward {reward.name} on http://{address}, guarded by {guard}", flush=True)
        web.run(sockets=[listener])
    return 0
