"""The reward `remote`: the client of `flowalign serve-reward` and of UniRL's reward service."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from torch import Tensor

from flowalign.rewards.base import RewardBase, question_counts
from flowalign.rewards.options import Count, Divisor, Retries, Seconds, TokenEnv, Url, read_token
from flowalign.rewards.scoring import assemble, failed
from flowalign.rewards.service import wire
from flowalign.system.http import UNREACHABLE, Client
from flowalign.types import Metadata, Scores

log = logging.getLogger(__name__)

ASKED = ("dpg", "geneval2")  # served rewards whose prompts have questions

Urls = Annotated[
    Sequence[Url],
    Field(min_length=1),
    BeforeValidator(lambda urls: [urls] if isinstance(urls, str) else urls),
]


class Remote(RewardBase):
    """A reward that a server elsewhere scores; it has that reward's range and parts.

    Options: docs/rewards/remote.md.
    Rows that the server could not score are invalid, with its reasons, and so are those of requests
    that got no answer. If no request got one, ConnectionError or TimeoutError is raised. A request
    that is refused raises ValueError: `flowalign.rewards.score` then asks image by image, so that
    one at fault does not cost the others.
    """

    name = "remote"

    def __init__(
        self,
        urls: Urls,
        *,
        reward: str | None = None,
        token_env: TokenEnv = None,
        batch_size: Count = 16,
        normalizer: Divisor = 1.0,
        headline: str | None = None,
        timeout: Seconds = 120.0,
        deadline: Seconds = 600.0,
        retries: Retries = 8,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else urls
        self.urls = [url.rstrip("/") for url in urls]
        self.reward = reward  # None = the only one that is served; known once a server was asked
        self.batch_size = batch_size
        self.normalizer = normalizer
        self.headline = headline
        self._client = partial(
            Client,
            timeout=timeout,
            deadline=deadline,
            retries=retries,
            backoff=1.0,
            token=read_token(token_env or wire.TOKEN),
            max_bytes=2**16 + batch_size * 2**14,  # some four times what an answer needs
            proxies=False,  # images go to the named host and nowhere else
        )
        # to ask who is there, within seconds
        self._greet = partial(self._client, retries=2, timeout=min(timeout, 5.0))

    def connect(self) -> None:
        """Ask every server whether it serves us, and warn of those that do not answer, within
        seconds. Raises ConnectionError or TimeoutError if none does, or if one serves others."""
        with self._greet() as client:
            answers = client.map(partial(self._ask, client), self.urls, len(self.urls))
        for answer in answers:
            if isinstance(answer, UNREACHABLE):
                log.warning("the others must do its work: %s", answer)
            elif isinstance(answer, Exception):
                raise ConnectionError(str(answer)) from answer

    def describe(self) -> dict[str, Any]:
        """The first server's description of its reward, without the server's address.

        Calls it: raises ConnectionError, TimeoutError or ValueError.
        """
        with self._greet(retries=0) as client:
            served = self._ask(client, self.urls[0])
        return {"name": self.name, "served": served, "normalizer": self.normalizer}

    def counts(
        self, metadata: Mapping[str, Any], parts: Mapping[str, float]
    ) -> Mapping[str, float]:
        return question_counts(metadata, parts) if self.reward in ASKED else {}

    def _ask(self, client: Client, *urls: str) -> dict[str, Any]:
        """The first answering server's description of our reward. Raises ValueError if it has none,
        or several of which none is named."""
        body = client.request("GET", *(f"{url}/rewards" for url in urls))
        roster = wire.parse_body(body, wire.Roster)
        if self.reward is None and len(roster.rewards) == 1:
            self.reward = roster.rewards[0]
        if self.reward not in roster.rewards:
            served = client.clean(", ".join(roster.rewards))
            raise ValueError(f"served is {served}, and not {self.reward}: name one as `reward`")
        return roster.describe.get(self.reward, {"name": self.reward})

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        starts = range(0, len(images), self.batch_size)
        chunks = [range(s, min(s + self.batch_size, len(images))) for s in starts]

        def call(chunk: range) -> Scores:
            rows = slice(chunk.start, chunk.stop)
            sent = wire.encode_request(reward, images[rows], prompts[rows], metadata[rows])
            head = {"content-type": "application/json"}
            turn = chunk.start // self.batch_size % len(self.urls)  # round robin
            servers = [f"{url}/score" for url in (*self.urls[turn:], *self.urls[:turn])]
            body = client.request("POST", *servers, content=sent, headers=head)
            scores = wire.decode_answer(reward, body, len(chunk))
            reasons = {row: client.clean(text) for row, text in scores.reasons.items()}
            return replace(scores, reasons=reasons)

        with self._client() as client:
            if self.reward is None and chunks:
                self._ask(client, *self.urls)
            reward = self.reward or ""
            results = client.map(call, chunks, concurrency=len(self.urls))
        pieces: list[tuple[range, Scores]] = []
        for chunk, result in zip(chunks, results, strict=True):
            if isinstance(result, Exception) and not isinstance(result, UNREACHABLE):
                raise result
            lost = isinstance(result, Exception)
            pieces.append((chunk, failed(len(chunk), result) if lost else result))
        scores = assemble(len(images), pieces)
        if self.normalizer == 1:
            return scores
        parts = {"raw": scores.value, **scores.parts}  # the server's own raw value, if it has one
        return replace(scores, value=scores.value / self.normalizer, parts=parts)
