"""The reward `remote`: the client of `flowalign serve-reward`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from flowalign.rewards.base import RewardBase
from flowalign.rewards.options import Count, Divisor
from flowalign.rewards.scoring import assemble, failed
from flowalign.rewards.service import wire
from flowalign.rewards.service.wire import Retries, Seconds, TokenEnv, WireError
from flowalign.system.http import Client, Refused, check_url
from flowalign.types import Metadata, Scores

log = logging.getLogger(__name__)

TRIES = 3  # at finding a server before a run
REST = 30.0  # seconds that a server which failed is called last, if there are others
_SPLIT = (413, 422)  # the request is too large, or one of its rows is at fault


class Remote(RewardBase):
    """The reward that a `flowalign serve-reward` elsewhere serves; it has its range and parts.

    Options: docs/rewards/remote.md.
    Rows that the server could not score are invalid, with its reasons; so are the rows of requests
    that it refuses. A request refused as too large or malformed (413, 422) is halved until the row
    at fault stands alone. If no row was scored because no server answered, ConnectionError or
    TimeoutError is raised (`flowalign.rewards.score` makes the rows invalid).
    """

    name = "remote"

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token_env: TokenEnv = None,
        batch_size: Count = 16,
        normalizer: Divisor = 1.0,
        headline: str | None = None,
        timeout: Seconds = 120.0,
        connect_timeout: Seconds = 5.0,
        deadline: Seconds = 600.0,
        retries: Retries = 8,
        backoff: Seconds = 1.0,
    ) -> None:
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        self.batch_size, self.normalizer, self.headline = batch_size, normalizer, headline
        self._resting: dict[str, float] = {}  # URL -> monotonic seconds until which it is last
        self._connect = partial(
            Client,
            timeout=timeout,
            connect_timeout=connect_timeout,
            deadline=deadline,
            retries=retries,
            backoff=backoff,
            token=wire.read_token(token_env or wire.TOKEN),
            max_bytes=2**16 + batch_size * 2**14,  # some four times what an answer needs
            headers={"content-type": wire.CONTENT_TYPE},
            proxies=False,  # images go to the named host and nowhere else
        )
        # to ask who is there, within seconds
        self._greet = partial(self._connect, retries=TRIES - 1, timeout=connect_timeout)

    @classmethod
    def check_options(cls, urls: str | Sequence[str], **others: Any) -> None:
        """Raise ValueError for URLs that cannot work, without their passwords."""
        for url in [urls] if isinstance(urls, str) else urls or [""]:
            check_url("urls", url, "the server's address, such as http://host:8000")

    def connect(self) -> None:
        """Ask every server whether it serves us, and warn of those that do not, within seconds.

        Raises ConnectionError or TimeoutError if none does.
        """
        with self._greet() as client:
            ask = partial(client.request, "GET")
            answers = client.map(ask, [f"{url}/v1/info" for url in self.urls], len(self.urls))
        for answer in answers:
            if isinstance(answer, Exception):
                log.warning("the others must do its work: %s", answer)

    def describe(self) -> dict[str, Any]:
        """What the first server says of its reward; not where it is.

        Calls it: raises ConnectionError, TimeoutError or ValueError.
        """
        with self._greet(retries=0) as client:
            body = client.request("GET", f"{self.urls[0]}/v1/info")
        served = wire.parse(body, wire.Info, status=502).describe
        return {"name": self.name, "served": served, "normalizer": self.normalizer}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        starts = range(0, len(images), self.batch_size)
        chunks = [range(s, min(s + self.batch_size, len(images))) for s in starts]

        def call(chunk: range) -> list[tuple[range, Scores]]:
            """Scores of the rows of a chunk, in pieces."""
            pieces: list[tuple[range, Scores]] = []
            left = [chunk]
            while left:
                part = left.pop(0)
                rows = slice(part.start, part.stop)
                try:
                    body = wire.encode_request(images[rows], prompts[rows], metadata[rows])
                    answer = client.request("POST", *self._servers(chunk), content=body)
                    self._resting |= dict.fromkeys(client.failed, time.monotonic() + REST)
                    scores = wire.decode_answer(answer, len(part))
                    reasons = {row: client.clean(text) for row, text in scores.reasons.items()}
                    pieces.append((part, replace(scores, reasons=reasons)))
                except (WireError, Refused) as error:
                    half = len(part) // 2
                    if error.status in _SPLIT and half:  # 2 log2(B) requests a bad row
                        left += [part[:half], part[half:]]
                    else:
                        pieces.append((part, failed(len(part), error)))
            return pieces

        pieces = []
        with self._connect() as client:
            results = client.map(call, chunks, concurrency=len(self.urls))
        for chunk, result in zip(chunks, results, strict=True):
            lost = isinstance(result, Exception)
            pieces += [(chunk, failed(len(chunk), result))] if lost else result
        scores = assemble(len(images), pieces)
        if self.normalizer == 1:
            return scores
        parts = {"raw": scores.value, **scores.parts}  # the server's own raw value, if it has one
        return replace(scores, value=scores.value / self.normalizer, parts=parts)

    def _servers(self, chunk: range) -> list[str]:
        """Where to send a chunk, in the order of attempts: round robin, failed servers last."""
        turn = chunk.start // self.batch_size % len(self.urls)
        urls = [f"{url}/v1/score" for url in (*self.urls[turn:], *self.urls[:turn])]
        now = time.monotonic()
        return sorted(urls, key=lambda url: self._resting.get(url, 0.0) > now)  # a stable sort
