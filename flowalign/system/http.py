"""The one HTTP client: httpx, with one retry policy (tenacity).

The rewards `remote` and `vlm` and `flowalign data fetch` use it. Lost connections, timeouts and the
statuses 408, 429 and 5xx are tried again, after waits that double, with a jitter of a quarter, and
that are at least the server's Retry-After and at most LONGEST_WAIT. Other statuses are final.
The first failure of an address is logged at once, further ones after SAY_AGAIN seconds and then
more and more seldom.

No server can hold or fill this process: the bytes of an answer, the seconds of an attempt and the
number of redirects are limited. Compressed answers are refused, so nothing is inflated. What
servers say is shown printable and cut.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import tenacity

from flowalign.system.escape import shown

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0  # seconds between two attempts
SAY_AGAIN, SELDOM = 30.0, 600.0  # seconds between two warnings about an address: first, longest
UNREACHABLE = (ConnectionError, TimeoutError)  # no answer, for no fault of the request
REDIRECTS = 5  # of one request
_ERROR_BYTES = 64 * 2**10  # that are read of an answer without status 200
_FINAL = (401, 403, 404)  # wrong token, URL or model name: every other request would fail too

Item = TypeVar("Item")
Result = TypeVar("Result")


class Refused(ValueError):
    """An answer that says that the request is at fault. status: its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """A body that came with status 200. failed: the URLs that were tried before, in vain."""

    body: bytes
    headers: Mapping[str, str]
    failed: list[str]
    url: str  # that answered


class Client:
    """Connections to a service, for one batch of requests.

    timeout: seconds without a sign of life; connect_timeout: for a connection, by default the same.
    total: seconds for an attempt, however lively; by default twice the timeout.
    deadline: seconds from now until all requests end. retries: further attempts at a request.
    backoff: seconds before the second attempt. max_bytes: of an answer.
    token: sent as `Authorization: Bearer`, to no other host, and cut out of every error text.
    proxies: use those of the environment? redirects: follow up to REDIRECTS of them, but never from
        https to http?
    """

    def __init__(
        self,
        *,
        timeout: float,
        connect_timeout: float | None = None,
        total: float | None = None,
        deadline: float = math.inf,
        retries: int = 3,
        backoff: float = 0.5,
        max_bytes: int = 16 * 2**20,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        proxies: bool = True,
        redirects: bool = False,
    ) -> None:
        self.timeout, self.connect_timeout = timeout, connect_timeout or timeout
        self.total = total or 2 * timeout
        self.until = time.monotonic() + deadline
        self.retries, self.backoff, self.max_bytes, self.token = retries, backoff, max_bytes, token
        self.redirects = redirects
        self.stopped = threading.Event()
        self.last: Exception | str = "the time for all requests is over"
        self._client = httpx.Client(
            headers={
                "Accept-Encoding": "identity",
                **(headers or {}),
                **({"Authorization": f"Bearer {token}"} if token else {}),
            },
            verify=_certificates(),
            trust_env=proxies,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # none is kept
            # `map` bounds how many connections are open. None is kept: see _Clock.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def request(self, method: str, *urls: str, **content: Any) -> Answer:
        """The answer to a request. Each further attempt takes the next of the URLs.

        content: httpx's `content` or `json`. Raises Refused if the request is at fault, and
        ConnectionError or TimeoutError if there is no answer.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Again),
            stop=tenacity.stop_after_attempt(1 + self.retries)
            | tenacity.stop_before_delay(self.until - time.monotonic())
            | tenacity.stop_when_event_set(self.stopped),
            wait=lambda state: self._wait(state, len(urls)),
            before_sleep=self._warn,
            sleep=tenacity.sleep_using_event(self.stopped),  # `map` ends the waits of all threads
            reraise=True,
        )
        try:
            answer = retrying(self._attempt, method, urls, [], content)
        except _Again as again:
            raise again.cause from again
        _silences.over(answer.url)
        return answer

    def _wait(self, state: tenacity.RetryCallState, servers: int) -> float:
        """Seconds before the next attempt; none while there are servers that were not tried."""
        again = state.outcome and state.outcome.exception()
        if not isinstance(again, _Again) or state.attempt_number < servers:
            return 0.0
        jitter = _jitter.uniform(0.75, 1.25)  # so that many clients do not come back at once
        seconds = self._planned(state.attempt_number, servers) * jitter
        return max(seconds, min(again.after, LONGEST_WAIT))

    def _planned(self, attempt: int, servers: int) -> float:
        """Seconds after the n-th attempt, without jitter."""
        if attempt < servers:
            return 0.0
        return min(self.backoff * 2.0 ** min(attempt - servers, 20), LONGEST_WAIT)  # no overflow

    def _warn(self, state: tenacity.RetryCallState) -> None:
        """Say that an attempt failed, unless that was said a short while ago."""
        again = state.outcome and state.outcome.exception()
        if not isinstance(again, _Again) or again.after:  # a server that asks for time is well
            return
        _, urls, tried, _ = state.args
        attempts = range(state.attempt_number, 1 + self.retries)
        left = sum(self._planned(attempt, len(urls)) for attempt in attempts)
        left = min(left, self.until - time.monotonic())
        _silences.note(tried[-1], again.cause, f"trying again for about {left:.0f} s")

    def map(
        self, call: Callable[[Item], Result], items: Sequence[Item], concurrency: int
    ) -> list[Result | Exception]:
        """call(item) for each item, in order, so many at a time; what it raises takes its place.

        Once `concurrency` calls in a row got no answer the rest is not made: a service that hangs
        costs one round of timeouts, not one per item. If no call succeeded for want of an answer,
        that ConnectionError or TimeoutError is raised. An interrupt does not wait for open calls.
        """
        results: list[Any] = [None] * len(items)
        rows = iter(range(len(items)))  # shared by the threads: each takes the next row
        lock, in_a_row = threading.Lock(), 0

        def work() -> None:
            nonlocal in_a_row
            for row in rows:
                try:
                    self._check_running()
                    results[row] = call(items[row])
                except UNREACHABLE as error:
                    results[row] = error
                    with lock:
                        in_a_row += 1
                        if not self.stopped.is_set():
                            self.last = error
                        if in_a_row >= concurrency:
                            self.stopped.set()
                except Exception as error:  # of this item alone
                    results[row] = error
                else:
                    with lock:
                        in_a_row = 0

        threads = [
            threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(items)))
        ]  # no executor: at exit it would wait for calls that hang
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self.stopped.set()
        lost = [result for result in results if isinstance(result, UNREACHABLE)]
        if lost and all(isinstance(result, Exception) for result in results):
            raise lost[0]
        return results

    def clean(self, text: str) -> str:
        """The beginning of a text on one line, without the token, which a server may repeat."""
        return shown(text.replace(self.token, "***") if self.token else text)

    def _check_running(self) -> None:
        if time.monotonic() >= self.until:
            self.stopped.set()
        if self.stopped.is_set():
            raise ConnectionError(f"not asked any more: {self.last}")

    def _attempt(self, method: str, urls: Sequence[str], tried: list[str], content: Any) -> Answer:
        """Raises _Again for what may pass, and what `request` raises for what will not."""
        self._check_running()
        tried.append(url := urls[len(tried) % len(urls)])
        left = max(0.01, self.until - time.monotonic())
        seconds, clock = min(self.timeout, left), _Clock(min(self.total, left))
        timeout = httpx.Timeout(seconds, connect=min(seconds, self.connect_timeout))
        request = self._client.build_request(
            method, url, timeout=timeout, extensions={"trace": clock.trace}, **content
        )
        try:
            with clock:
                response, body = self._receive(request)
            if clock.over:  # a body of unknown length looks whole when it is cut off
                raise httpx.ReadTimeout("cut off")
        except httpx.RequestError as error:
            kind = type(error).__name__
            if clock.over or isinstance(error, httpx.TimeoutException):
                waited = clock.seconds if clock.over else seconds
                text = f"{url} gave no answer within {waited:g} s ({kind})"
                raise _Again(TimeoutError(text)) from error
            text = f"{url}: {kind}: {self.clean(str(error))}"
            raise _Again(ConnectionError(text)) from error
        status = response.status_code
        if status == 200:
            return Answer(body, response.headers, tried[:-1], url)
        text = f"{url} answered {status}: {self.clean(_message(body))}"
        if status in (408, 429) or status >= 500:
            cause = TimeoutError(text) if status in (408, 504) else ConnectionError(text)
            raise _Again(cause, response.headers.get("retry-after", ""))
        if status in _FINAL:
            raise ConnectionError(text)
        raise Refused(status, text)

    def _receive(self, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        """The answer to a request and its redirects, and the body, or an error's beginning.

        httpx itself would read the whole body of a redirect, and inflate a compressed one.
        """
        first = request.url
        for _ in range(1 + REDIRECTS):
            response = self._client.send(request, stream=True)
            try:
                if not self.redirects or response.next_request is None:
                    return response, self._read(first, response)
                request = response.next_request
            finally:
                response.close()
            if first.scheme == "https" != request.url.scheme:
                there = self.clean(str(request.url))
                raise Refused(200, f"{first} leads to {there}, which is not https.")
        raise Refused(200, f"{first} leads on more than {REDIRECTS} times.")

    def _read(self, url: httpx.URL, response: httpx.Response) -> bytes:
        """The body of an answer, as it was sent; the first _ERROR_BYTES of an error's."""
        good = response.status_code == 200
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if good and encoding not in ("", "identity"):
            raise Refused(
                200, f"{url} sends an answer encoded as {shown(encoding, 50)!r}, though only plain "
                "ones are taken. Switch the compression off there."
            )  # fmt: skip
        body = bytearray()
        for piece in response.iter_raw():
            body += piece
            if good and len(body) > self.max_bytes:
                raise Refused(200, f"{url} sends more than {self.max_bytes} bytes.")
            if not good and len(body) > _ERROR_BYTES:
                return bytes(body[:_ERROR_BYTES])
        return bytes(body)


class _Clock:
    """Ends the connection of an attempt after so many seconds, while `with` lasts.

    httpx times each piece of what is sent and received, not their sum. So `trace`, which its
    transport calls (https://www.encode.io/httpcore/extensions/#trace), keeps the newest connection,
    and a timer shuts it down: whatever waits for it returns at once. A connection that an earlier
    request left open would be unknown here, hence there is none.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.over = seconds, False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.over:
                self._shut()

    def _end(self) -> None:
        self.over = True
        self._shut()

    def _shut(self) -> None:
        with suppress(OSError):  # closed already, or wrapped by TLS just now: `trace` sees that
            if self._socket is not None:
                # not the method of an SSLSocket, which would drop its state under a reading thread
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _Again(Exception):
    """A failed attempt that may succeed later. after: its Retry-After; a date counts as none."""

    def __init__(self, cause: Exception, after: str = "") -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.after = float(after) if after.isascii() and after.isdigit() else 0.0


class _Silences:
    """When each address was last warned of, for all clients of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}  # address -> when it began to fail
        self._next: dict[str, tuple[float, float]] = {}  # -> when to say it again, the pause after

    def note(self, url: str, cause: Exception, plan: str) -> None:
        """An attempt failed."""
        now, address = time.monotonic(), _address(url)
        with self._lock:
            since = self._since.setdefault(address, now)
            due, pause = self._next.get(address, (now, SAY_AGAIN))
            if now < due:
                return
            self._next[address] = now + pause, min(2 * pause, SELDOM)
        lasting = f" (for {now - since:.0f} s now)" if since < now else ""
        log.warning("%s%s; %s", cause, lasting, plan)

    def over(self, url: str) -> None:
        """An attempt succeeded."""
        with self._lock:
            since = self._since.pop(address := _address(url), None)
            if since is None:
                return
            due, _ = self._next.get(address, (0.0, 0.0))
            self._next[address] = due, SAY_AGAIN  # one that comes and goes is not said each time
        log.warning("%s answers again, after %.0f s", address, time.monotonic() - since)


def _address(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


_silences = _Silences()

# Its own generator: a run's numbers must not depend on what the network did.
_jitter = random.Random()


@cache
def _certificates() -> ssl.SSLContext:
    context = httpx.create_ssl_context()  # trusts Mozilla's certificates
    context.load_default_certs()  # and the system's, such as a company's own
    return context


def _message(body: bytes) -> str:
    """What went wrong: `error` of our servers' JSON or OpenAI's, or else the whole text."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, RecursionError):
        return text


def check_url(option: str, url: Any, example: str) -> None:
    """Raise ValueError for what is not the plain address http(s)://host[:port][/path].

    option, example: for the message.
    """
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        host, _ = parts.hostname, parts.port  # raises for a port that is no number below 65536
        if host and ":" in host:  # IPv6, which urlsplit checks from Python 3.11.4 only
            ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(f"`{option}`: {url!r} is no URL ({error}). Give {example}.") from error
    if parts.username or parts.password:  # not shown
        fault = "the URL holds a user or a password, which logs would show; use `token_env`"
    elif parts.scheme not in ("http", "https") or not host:
        fault = f"{url!r} is no http(s) address of a server"
    elif parts.query or parts.fragment or not url.isprintable() or " " in url:
        fault = f"{url!r} has more than a host, a port and a path"
    else:
        return
    raise ValueError(f"`{option}`: {fault}. Give {example}.")
