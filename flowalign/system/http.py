"""The one HTTP client: httpx, with one retry policy.

The rewards `remote` and `vlm` and `flowalign data fetch` use it. Lost connections, timeouts and the
statuses 408, 429 and 5xx are tried again, after waits that double, with a jitter of a quarter, and
that are at least the server's Retry-After and at most LONGEST_WAIT. Other statuses are final.
Bytes, seconds and redirects are limited, nothing is inflated, and what servers say is shown cut.
"""

from __future__ import annotations

import logging
import math
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any, TypeVar

import httpx

from flowalign.system.escape import shown

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0  # seconds between two attempts
CONNECT = 5.0  # seconds for a connection
UNREACHABLE = (ConnectionError, TimeoutError)  # no answer, for no fault of the request
_FINAL = (401, 403, 404)  # wrong token, URL or model name: every other request would fail too
_jitter = random.Random()  # a run's numbers must not depend on what the network did

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Again(Exception):
    """A failed attempt that may succeed later. after: its Retry-After; a date is ignored."""

    def __init__(self, cause: Exception, after: str = "") -> None:
        self.cause = cause
        self.after = float(after) if after.isascii() and after.isdigit() else 0.0


@dataclass(kw_only=True)
class Client:
    """Connections to a service, for one batch of requests."""

    timeout: float  # seconds without data; a whole answer may take twice as long
    deadline: float = math.inf  # seconds from now until all requests end
    retries: int = 3  # further attempts at a request
    backoff: float = 0.5  # seconds before the second attempt
    max_bytes: int = 16 * 2**20  # of an answer
    # sent as `Authorization: Bearer`, to no other host, and cut out of every error text
    token: str | None = field(default=None, repr=False)
    proxies: bool = True  # whether to use the environment's proxies
    redirects: bool = False  # follow up to five of them, but never from https to http?

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.deadline
        self.stopped = threading.Event()
        self.failed: set[str] = set()  # URLs that did not answer
        self.last: Exception | str = "the time for all requests is over"
        headers = {"Accept-Encoding": "identity"}
        self._client = httpx.Client(
            headers=headers | ({"Authorization": f"Bearer {self.token}"} if self.token else {}),
            verify=_certificates(),
            trust_env=self.proxies,
            follow_redirects=self.redirects,
            max_redirects=5,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def request(self, method: str, *urls: str, **content: Any) -> bytes:
        """Send a request; returns the body of the answer. Each further attempt takes the next of
        the URLs; those that failed before come last.

        content: httpx's `content`, `json` or `headers`. Raises ValueError if the request is at
        fault, and ConnectionError or TimeoutError if there is no answer.
        """
        for attempt, url in enumerate(cycle(sorted(urls, key=self.failed.__contains__)), start=1):
            try:
                return self._attempt(method, url, content)
            except _Again as again:
                if url not in self.failed and not again.after and attempt <= self.retries:
                    log.warning("%s; trying again", again.cause)
                self.failed.add(url)
                wait = 0.0  # while there are servers that were not tried
                if (doublings := attempt - len(urls)) >= 0:
                    wait = min(self.backoff * 2.0 ** min(doublings, 20), LONGEST_WAIT)
                    wait = max(wait * _jitter.uniform(0.75, 1.25), min(again.after, LONGEST_WAIT))
                over = attempt > self.retries or time.monotonic() + wait >= self.until
                if over or self.stopped.wait(wait):  # `map` ends the waits of all threads
                    raise again.cause from again
        raise ValueError("no URL is given")

    def map(
        self, call: Callable[[Item], Result], items: Sequence[Item], concurrency: int
    ) -> list[Result | Exception]:
        """Run call(item) for each item, in order, so many at a time; an exception takes the place
        of its result.

        Once `concurrency` calls in a row got no answer the rest is not made: a service that hangs
        costs one round of timeouts, not one per item. If no call succeeded for want of an answer,
        that ConnectionError or TimeoutError is raised. An interrupt does not wait for open calls.
        """
        in_a_row = 0

        def guarded(item: Item) -> Result | Exception:
            nonlocal in_a_row
            try:
                self._left()
                result: Result | Exception = call(item)
            except Exception as error:
                result = error
            in_a_row = in_a_row + 1 if isinstance(result, UNREACHABLE) else 0
            if isinstance(result, UNREACHABLE) and not self.stopped.is_set():
                self.last = result
            if in_a_row >= concurrency:
                self.stopped.set()
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

    def _left(self) -> float:
        """Seconds until all requests end. Raises ConnectionError if none may be made any more."""
        left = self.until - time.monotonic()
        if left <= 0:
            self.stopped.set()
        if self.stopped.is_set():
            raise ConnectionError(f"not asked any more: {self.last}")
        return left

    def _attempt(self, method: str, url: str, content: Any) -> bytes:
        """Raises _Again for what may pass, and what `request` raises for what will not."""
        left = self._left()
        body = bytearray()
        seconds = min(self.timeout, left)
        end = time.monotonic() + min(2 * self.timeout, left)
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT))
        try:
            with self._client.stream(method, url, timeout=timeout, **content) as response:
                for hop in (*response.history, response):
                    if url.startswith("https:") and hop.url.scheme != "https":
                        there = self.clean(str(hop.url))
                        raise ValueError(f"{url} leads to {there}, which is not https.")
                for piece in response.iter_raw():
                    body += piece
                    if len(body) > self.max_bytes:
                        break
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("the body takes too long")
        except httpx.TimeoutException as error:
            kind = type(error).__name__
            raise _Again(TimeoutError(f"{url} gave no answer in time ({kind})")) from error
        except httpx.RequestError as error:
            text = f"{url}: {type(error).__name__}: {self.clean(str(error))}"
            raise _Again(ConnectionError(text)) from error
        except httpx.InvalidURL as error:  # of a redirect
            raise ValueError(f"{url} leads astray: {self.clean(str(error))}") from error
        status = response.status_code
        if status == 200 and len(body) > self.max_bytes:
            raise ValueError(f"{url} sends more than {self.max_bytes} bytes.")
        if status == 200:
            return bytes(body)
        text = f"{url} answered {status}: {self.clean(body.decode('utf-8', 'replace'))}"
        if status in (408, 429) or status >= 500:
            cause = TimeoutError(text) if status in (408, 504) else ConnectionError(text)
            raise _Again(cause, response.headers.get("retry-after", ""))
        raise ConnectionError(text) if status in _FINAL else ValueError(text)


@cache
def _certificates() -> ssl.SSLContext:
    context = httpx.create_ssl_context()  # trusts Mozilla's certificates
    context.load_default_certs()  # and the system's, such as a company's own
    return context
