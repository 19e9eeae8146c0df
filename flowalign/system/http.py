"""The one HTTP client: httpx, with one retry policy (tenacity).

The rewards `remote` and `vlm` and `flowalign data fetch` use it. Lost connections, timeouts and the
statuses 408, 429 and 5xx are tried again, after waits that double, with a jitter of a quarter, and
that are at least the server's Retry-After and at most LONGEST_WAIT. Other statuses are final.

The bytes of an answer, the seconds of an attempt and the number of redirects are limited, and
nothing is inflated. What servers say is shown printable and cut.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import tenacity

from flowalign.system.escape import shown

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0  # seconds between two attempts
UNREACHABLE = (ConnectionError, TimeoutError)  # no answer, for no fault of the request
REDIRECTS = 5  # of one request
_ERROR_BYTES = 64 * 2**10  # that are read of an answer without status 200
_FINAL = (401, 403, 404)  # wrong token, URL or model name: every other request would fail too
_jitter = random.Random()  # a run's numbers must not depend on what the network did

Item = TypeVar("Item")
Result = TypeVar("Result")


class Refused(ValueError):
    """An answer that says that the request is at fault. status: its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """Connections to a service, for one batch of requests.

    timeout: seconds without a sign of life; connect_timeout: for a connection, by default the same.
    total: seconds for an answer, however lively; by default twice the timeout.
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
        self.stopped = threading.Event()
        self.warned: set[str] = set()  # addresses
        self.failed: set[str] = set()  # URLs that were tried in vain
        self.last: Exception | str = "the time for all requests is over"
        self._client = httpx.Client(
            headers={
                "Accept-Encoding": "identity",
                **(headers or {}),
                **({"Authorization": f"Bearer {token}"} if token else {}),
            },
            verify=_certificates(),
            trust_env=proxies,
            follow_redirects=redirects,
            max_redirects=REDIRECTS,
            event_hooks={"request": [self._check_scheme]},
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def request(self, method: str, *urls: str, **content: Any) -> bytes:
        """The body of the answer to a request. Each further attempt takes the next of the URLs.

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
            return retrying(self._attempt, method, itertools.cycle(urls), content)
        except _Again as again:
            raise again.cause from again

    def _wait(self, state: tenacity.RetryCallState, servers: int) -> float:
        """Seconds before the next attempt; none while there are servers that were not tried."""
        again = state.outcome and state.outcome.exception()
        if not isinstance(again, _Again) or state.attempt_number < servers:
            return 0.0
        doublings = min(state.attempt_number - servers, 20)  # no overflow
        jitter = _jitter.uniform(0.75, 1.25)  # so that many clients do not come back at once
        seconds = min(self.backoff * 2.0**doublings, LONGEST_WAIT) * jitter
        return max(seconds, min(again.after, LONGEST_WAIT))

    def _warn(self, state: tenacity.RetryCallState) -> None:
        """Remember a URL that failed; log the first failed attempt at an address, unless its server
        asks for time."""
        again = state.outcome and state.outcome.exception()
        if not isinstance(again, _Again):
            return
        self.failed.add(again.url)
        if not again.after:
            address = urlsplit(again.url).netloc
            if address not in self.warned:
                log.warning("%s; trying again", again.cause)
            self.warned.add(address)

    def map(
        self, call: Callable[[Item], Result], items: Sequence[Item], concurrency: int
    ) -> list[Result | Exception]:
        """call(item) for each item, in order, so many at a time; what it raises takes its place.

        Once `concurrency` calls in a row got no answer the rest is not made: a service that hangs
        costs one round of timeouts, not one per item. If no call succeeded for want of an answer,
        that ConnectionError or TimeoutError is raised. An interrupt does not wait for open calls.
        """
        lock, in_a_row = threading.Lock(), 0

        def guarded(item: Item) -> Result | Exception:
            nonlocal in_a_row
            try:
                self._check_running()
                result = call(item)
            except UNREACHABLE as error:
                with lock:
                    in_a_row += 1
                    if not self.stopped.is_set():
                        self.last = error
                    if in_a_row >= concurrency:
                        self.stopped.set()
                return error
            except Exception as error:  # of this item alone
                return error
            with lock:
                in_a_row = 0
            return result

        pool = ThreadPoolExecutor(concurrency)
        try:
            results = list(pool.map(guarded, items))
        finally:  # an interrupt ends the waits of all threads
            self.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
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

    def _attempt(self, method: str, urls: Iterator[str], content: Any) -> bytes:
        """Raises _Again for what may pass, and what `request` raises for what will not."""
        self._check_running()
        url = next(urls)
        left = max(0.01, self.until - time.monotonic())
        seconds = min(self.timeout, left)
        timeout = httpx.Timeout(seconds, connect=min(seconds, self.connect_timeout))
        end = time.monotonic() + min(self.total, left)
        try:
            with self._client.stream(
                method, url, timeout=timeout, extensions={"first": url}, **content
            ) as response:
                body = self._read(response, end)
        except httpx.RequestError as error:
            kind = type(error).__name__
            if isinstance(error, httpx.TimeoutException):
                cause: Exception = TimeoutError(f"{url} gave no answer in time ({kind})")
            else:
                cause = ConnectionError(f"{url}: {kind}: {self.clean(str(error))}")
            raise _Again(url, cause) from error
        except httpx.InvalidURL as error:  # of a redirect
            raise Refused(200, f"{url} leads astray: {self.clean(str(error))}") from error
        status = response.status_code
        if status == 200:
            return body
        text = f"{url} answered {status}: {self.clean(_message(body))}"
        if status in (408, 429) or status >= 500:
            cause = TimeoutError(text) if status in (408, 504) else ConnectionError(text)
            raise _Again(url, cause, response.headers.get("retry-after", ""))
        if status in _FINAL:
            raise ConnectionError(text)
        raise Refused(status, text)

    def _check_scheme(self, request: httpx.Request) -> None:
        """Redirects must not leave https."""
        first = request.extensions.get("first", "")
        if first.startswith("https:") and request.url.scheme != "https":
            there = self.clean(str(request.url))
            raise Refused(200, f"{first} leads to {there}, which is not https.")

    def _read(self, response: httpx.Response, end: float) -> bytes:
        """The body of an answer as it was sent, or the beginning of an error's."""
        good, body = response.status_code == 200, bytearray()
        for piece in response.iter_raw():
            body += piece
            if good and len(body) > self.max_bytes:
                raise Refused(200, f"{response.url} sends more than {self.max_bytes} bytes.")
            if not good and len(body) > _ERROR_BYTES:
                break
            if time.monotonic() > end:
                raise httpx.ReadTimeout("the body takes too long")
        return bytes(body)


class _Again(Exception):
    """A failed attempt that may succeed later. after: its Retry-After; a date counts as none."""

    def __init__(self, url: str, cause: Exception, after: str = "") -> None:
        super().__init__(str(cause))
        self.url, self.cause = url, cause
        self.after = float(after) if after.isascii() and after.isdigit() else 0.0


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

    option, example: for the message, which does not show the URL: it may hold a password.
    """
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        plain = False
    if not plain or not url.isprintable() or any(sign in url for sign in " @?#"):
        raise ValueError(
            f"`{option}`: want http(s)://host[:port][/path] and no more: logs would show a "
            f"password (use `token_env`). Give {example}."
        )
