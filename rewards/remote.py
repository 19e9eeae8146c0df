"""A reward that another process scores: the client of `flowalign serve-reward`.

Every chunk of a batch goes to whichever server is free next, so that two servers halve the time.
"""

from __future__ import annotations

import ipaddress
import math
import os
import random
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from flowalign.rewards import wire
from flowalign.rewards.lazy import SERVE, require
from flowalign.rewards.wire import TOKEN, WireError, read_token
from flowalign.types import Scores

MAX_REST = 60.0  # seconds that a server is left alone at most after it failed
_ANSWER_BYTES = 16 * 2**20
_SPLIT = (413, 422)  # the request is at fault, perhaps by one of its rows, or too large


class Remote:
    """Whatever reward a `flowalign serve-reward` elsewhere serves; it has its range and parts.

    urls: of one server, or a list; a server that is named twice gets two requests at once.
    token_env: the environment variable that holds the servers' token; None = FLOWALIGN_REWARD_TOKEN
        if that is set.
    encoding: "raw" pixels or "png", fewer bytes and more time; the values are the same. Images are
        rounded to 8 bits either way.
    batch_size: images a request. It should divide the batch well: servers work on whole requests.
    normalizer: the value is the server's divided by it, and the part "raw" the server's own.
    headline: the part that a benchmark of the served reward is known by, if there is one.
    timeout: seconds for an answer; connect_timeout: for a connection; deadline: for a whole batch.
    retries: further attempts at a request after lost connections, timeouts and the statuses 408,
        429 and 5xx. A server that fails rests for `backoff` seconds, then twice as long (with
        jitter; at most 60 s, at least its Retry-After), while others take its requests.

    Rows that the server could not score are invalid, with its reasons; so are the rows of requests
    that it refuses, where one refused as too large or malformed (413, 422) is split first until the
    row at fault stands alone. Where no row could be scored, for want of an answer, it raises
    ConnectionError or TimeoutError (`flowalign.rewards.score` masks).
    """

    name = "remote"

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token_env: str | None = None,
        encoding: str = "raw",
        batch_size: int = 16,
        normalizer: float = 1.0,
        headline: str | None = None,
        timeout: float = 120.0,
        connect_timeout: float = 5.0,
        deadline: float = 600.0,
        retries: int = 8,
        backoff: float = 1.0,
    ) -> None:
        self.check_options(
            urls,
            token_env=token_env,
            encoding=encoding,
            batch_size=batch_size,
            normalizer=normalizer,
            timeout=timeout,
            connect_timeout=connect_timeout,
            deadline=deadline,
            retries=retries,
            backoff=backoff,
        )
        httpx = require("httpx", *SERVE)
        token = read_token(os.environ, token_env or TOKEN)
        self.encoding, self.batch_size, self.normalizer = encoding, batch_size, normalizer
        self.headline = headline
        self.timeout, self.deadline, self.retries = timeout, deadline, retries
        self.connect_timeout = connect_timeout
        self.rest = _Rest(backoff)
        headers = {"content-type": wire.CONTENT_TYPE, "accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        # No proxies and no .netrc of the environment; certificates as the system trusts them.
        self._client = httpx.Client(
            headers=headers, trust_env=False, verify=ssl.create_default_context()
        )
        self._close = weakref.finalize(self, self._client.close)
        self.servers = [_Server(url.rstrip("/")) for url in _listed(urls)]

    @staticmethod
    def check_options(
        urls: str | Sequence[str],
        *,
        token_env: str | None = None,
        encoding: str = "raw",
        batch_size: int = 16,
        retries: int = 8,
        **numbers: Any,
    ) -> None:
        """Raise ValueError for options that cannot work; asks no server."""
        for url in _listed(urls):
            _check_url(url)
        if encoding not in wire.ENCODINGS:
            raise ValueError(
                f"`encoding` of reward remote is {encoding!r}; use one of {list(wire.ENCODINGS)}."
            )
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(
                f"`batch_size` of reward remote is {batch_size!r}; use 1 or more images."
            )
        if type(retries) is not int or retries < 0:
            raise ValueError(f"`retries` of reward remote is {retries!r}; use 0 or more.")
        numbers.pop("headline", None)
        for name, number in numbers.items():
            if type(number) not in (int, float) or not math.isfinite(number) or number <= 0:
                raise ValueError(f"`{name}` of reward remote is {number!r}; use a number above 0.")
        if read_token(os.environ, token_env or TOKEN) is None and token_env:
            raise ValueError(
                f"`token_env` of reward remote is {token_env!r}, which is not set in this "
                "environment. Set it to the servers' token, or leave the option out."
            )

    def describe(self) -> dict[str, Any]:
        """What the first server says of its reward; not where it is. Asks it, so it may raise."""
        response = self._client.get(f"{self.servers[0].url}/v1/info", timeout=self.connect_timeout)
        response.raise_for_status()
        served = response.json()["describe"]
        return {"name": self.name, "served": served, "normalizer": self.normalizer}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] and their rows -> Scores of B, on the CPU."""
        rows = range(len(images))
        chunks = [rows[i : i + self.batch_size] for i in rows[:: self.batch_size]]
        call = _Call(chunks, self.servers, self.rest, self.retries, self.deadline)

        def work(server: _Server) -> None:
            while (chunk := call.take(server)) is not None:
                r = slice(chunk.rows.start, chunk.rows.stop)
                try:
                    body = wire.encode_request(images[r], prompts[r], metadata[r], self.encoding)
                    call.answered(server, chunk, self._post(server.url, body, chunk, call.until))
                except _Again as again:
                    call.again(server, chunk, again)
                except Exception as error:
                    call.refused(chunk, error)

        threads = [
            threading.Thread(target=work, args=(server,), name=server.url, daemon=True)
            for server in self.servers
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, call.until - time.monotonic()) + 1.0)
        finally:  # an interrupted run waits for nobody
            call.stop()
        return self._scaled(call.result(len(images)))

    def _post(self, url: str, body: bytes, chunk: _Chunk, until: float) -> Scores:
        """One attempt. Raises _Again for what may pass, WireError for what will not."""
        httpx = require("httpx", *SERVE)
        seconds = max(0.01, min(self.timeout, until - time.monotonic()))
        end = time.monotonic() + seconds
        timeout = httpx.Timeout(seconds, connect=min(seconds, self.connect_timeout))
        try:
            with self._client.stream(
                "POST", f"{url}/v1/score", content=body, timeout=timeout
            ) as response:
                status, headers, answer = response.status_code, response.headers, bytearray()
                for piece in response.iter_raw():
                    answer += piece
                    if len(answer) > _ANSWER_BYTES:
                        raise WireError(502, f"{url} answered with more than scores.")
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("the answer drips")
        except httpx.TimeoutException as error:
            text = f"{url} gave no answer within {seconds:g} s ({type(error).__name__})"
            raise _Again(TimeoutError(text)) from error
        except httpx.TransportError as error:
            raise _Again(ConnectionError(f"{url}: {type(error).__name__}: {error}")) from error
        if status == 200:
            return wire.decode_answer(bytes(answer), len(chunk.rows))
        text = f"{url} answered {status}: {wire.error_text(bytes(answer))}"
        if status == 504:
            raise _Again(TimeoutError(text))
        if status in (408, 429) or status >= 500:
            raise _Again(ConnectionError(text), _seconds(headers.get("retry-after")))
        raise WireError(status, text)

    def _scaled(self, found: Scores) -> Scores:
        if self.normalizer == 1:
            return found
        parts = {"raw": found.value, **found.parts}  # the server's own raw value, if it has one
        return Scores(found.value / self.normalizer, found.valid, parts, found.reasons)


class _Again(Exception):
    """An attempt that failed and may succeed later, or elsewhere; after: seconds to wait."""

    def __init__(self, cause: ConnectionError | TimeoutError, after: float = 0.0) -> None:
        super().__init__(str(cause))
        self.cause, self.after = cause, after


@dataclass(eq=False)
class _Server:
    """failures in a row, over all calls; ready: when it may be asked again (monotonic seconds)."""

    url: str
    failures: int = 0
    ready: float = 0.0


@dataclass(eq=False)
class _Chunk:
    rows: range
    attempts: int = 0
    tried: set[_Server] = field(default_factory=set)


class _Rest:
    """How long a server that failed is left alone: exponential, with a jitter of a quarter.

    The jitter has its own generator: a run's numbers must not depend on what the network did.
    """

    def __init__(self, backoff: float) -> None:
        self.backoff, self._random = backoff, random.Random()

    def __call__(self, failures: int, at_least: float) -> float:
        seconds = max(self.backoff * 2 ** min(failures - 1, 20), at_least)
        return min(seconds, MAX_REST) * self._random.uniform(0.75, 1.25)


class _Call:
    """The chunks of one batch, to be had by whichever server is free.

    A server that failed more than `retries` times in a row is out for this call; a chunk is given
    up after as many attempts, once every server that is not out has tried it. So neither a dead
    server costs a chunk that another could score, nor one bad chunk all the servers.
    """

    def __init__(
        self,
        chunks: Sequence[range],
        servers: Sequence[_Server],
        rest: _Rest,
        retries: int,
        deadline: float,
    ) -> None:
        self.until = time.monotonic() + deadline
        self._todo = deque(_Chunk(rows) for rows in chunks)
        self._open = len(chunks)
        self._misses = dict.fromkeys(servers, 0)
        self._rest, self._retries = rest, retries
        self._changed = threading.Condition()
        self._answers: list[tuple[range, Scores]] = []
        self._reasons: dict[int, str] = {}
        self._lost: list[ConnectionError | TimeoutError] = []
        self._last: ConnectionError | TimeoutError = TimeoutError("the time for a batch was over")
        if all(server.ready > time.monotonic() for server in servers):
            for server in servers:  # nobody else is there to ask
                server.ready = 0.0

    def take(self, server: _Server) -> _Chunk | None:
        """The next chunk for a server, once it is ready; None when it is done with this call."""
        with self._changed:
            while self._open and self._misses[server] <= self._retries:
                now = time.monotonic()
                if now >= self.until:
                    break
                if self._todo and now >= server.ready:
                    return self._todo.popleft()
                wake = server.ready if server.ready > now else self.until
                self._changed.wait(min(wake, self.until) - now)
            return None

    def answered(self, server: _Server, chunk: _Chunk, found: Scores) -> None:
        with self._changed:
            server.failures = self._misses[server] = 0
            self._answers.append((chunk.rows, found))
            self._settle()

    def again(self, server: _Server, chunk: _Chunk, again: _Again) -> None:
        """A failed attempt: the server rests, the chunk is to be had again."""
        with self._changed:
            self._last = again.cause
            self._misses[server] += 1
            server.failures += 1
            server.ready = time.monotonic() + self._rest(server.failures, again.after)
            chunk.attempts += 1
            chunk.tried.add(server)
            here = {s for s, misses in self._misses.items() if misses <= self._retries}
            if chunk.attempts > self._retries and here <= chunk.tried:
                self._reasons |= dict.fromkeys(chunk.rows, f"{type(again.cause).__name__}: {again}")
                self._lost.append(again.cause)
                self._settle()
            else:
                self._todo.appendleft(chunk)
                self._changed.notify_all()

    def refused(self, chunk: _Chunk, error: Exception) -> None:
        """A request that will not pass as it is: its halves are tried, or its rows are invalid."""
        with self._changed:
            rows = chunk.rows
            if isinstance(error, WireError) and error.status in _SPLIT and len(rows) > 1:
                half = len(rows) // 2
                self._todo.extendleft((_Chunk(rows[half:]), _Chunk(rows[:half])))
                self._open += 2
            else:
                self._reasons |= dict.fromkeys(rows, f"{type(error).__name__}: {error}")
            self._settle()

    def _settle(self) -> None:
        self._open -= 1
        self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._open = 0
            self._changed.notify_all()

    def result(self, count: int) -> Scores:
        """Scores of all rows; raises the last failure where nobody answered about any of them."""
        value = torch.full((count,), math.nan)
        valid, parts = torch.zeros(count, dtype=torch.bool), {}
        reasons = dict(self._reasons)
        for rows, found in self._answers:
            index = slice(rows.start, rows.stop)
            value[index], valid[index] = found.value, found.valid
            for name, part in found.parts.items():
                parts.setdefault(name, torch.full_like(value, math.nan))[index] = part
            reasons |= {rows[row]: text for row, text in found.reasons.items()}
        answered = {row for rows, _ in self._answers for row in rows}
        silent = [row for row in range(count) if row not in answered and row not in self._reasons]
        if count and not answered and (silent or self._lost):
            raise self._last
        reasons |= dict.fromkeys(silent, f"{type(self._last).__name__}: {self._last}")
        return Scores(value, valid, parts, reasons)


def _listed(urls: str | Sequence[str]) -> list[str]:
    found = [urls] if isinstance(urls, str) else list(urls)
    if not found or not all(isinstance(url, str) for url in found):
        raise ValueError(f"`urls` of reward remote is {urls!r}; give one URL or a list of them.")
    return found


def _check_url(url: str) -> None:
    """Raise ValueError for what is no http(s)://host[:port][/path]."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # the port is parsed when asked for
        if host and ":" in host:
            ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(f"`urls` of reward remote: {url!r} is no URL ({error}).") from error
    spaceless = url.isprintable() and " " not in url
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not host or not plain or not spaceless:
        raise ValueError(
            f"`urls` of reward remote: {url!r} is not the address of a server; write "
            "http://host:port (the token goes into an environment variable, see `token_env`)."
        )


def _seconds(header: str | None) -> float:
    """The seconds of a Retry-After; 0 for none, and for a date."""
    return float(header) if header and header.isascii() and header.isdigit() else 0.0
