"""Questions about images to an endpoint that speaks OpenAI's chat completions, many at a time."""

from __future__ import annotations

import base64
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from flowalign.rewards.lazy import require

Question = Callable[[], tuple[str, str]]  # makes a text and the URL of an image, in a thread
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before the second request; it doubles from there
ELSEWHERE = (401, 403, 404)  # no image's fault: the token, the URL or the model's name


class GivenUp(RuntimeError):
    """A question that the endpoint left without an answer, for no fault of its own."""


@dataclass(frozen=True)
class Endpoint:
    """Where the judge lives, and how it is asked.

    url: the base, as in http://127.0.0.1:8000/v1; model: its name there.
    concurrency: questions under way at once. timeout: seconds without a sign of life, per request.
    retries: further requests after a 429, a 5xx, a timeout or a broken connection, after waits
        that double from .5 to 30 s.
    token_env: the environment variable that holds the API key, if there is one.
    max_tokens: length of an answer. The temperature is 0.
    Raises ValueError for what cannot work; asks nobody before `answers`.
    """

    url: str
    model: str
    concurrency: int = 8
    timeout: float = 120.0
    retries: int = 3
    token_env: str | None = None
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        _check_url(self.url)
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(
                f"`model` is {self.model!r}; give the name that the endpoint serves it under, "
                f"which {self.url.rstrip('/')}/models lists."
            )
        for name, least in (("concurrency", 1), ("retries", 0), ("max_tokens", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"`{name}` is {value!r}; use a whole number from {least} on.")
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if not number or not math.isfinite(self.timeout) or self.timeout <= 0:
            raise ValueError(f"`timeout` is {self.timeout!r}; use seconds above 0.")
        self.token()

    def token(self) -> str | None:
        """The API key. Raises ValueError, which never shows it, where the variable has none."""
        if self.token_env is None:
            return None
        found = os.environ.get(self.token_env, "").strip()
        if not found or not found.isascii() or not found.isprintable():
            state = "is not set or empty" if not found else "holds what no HTTP header can carry"
            raise ValueError(
                f"`token_env` names the environment variable {self.token_env!r}, which {state}. "
                "Export it, or leave `token_env` out for an endpoint without a key."
            )
        return found

    def answers(self, questions: Sequence[Question]) -> list[str | Exception]:
        """The answer to each question, in order; the exception in place of one that failed.

        Once `concurrency` questions in a row were given up, the endpoint counts as dead, and the
        rest is not asked: a hung judge costs a run one round of timeouts and not one an image.
        Raises ConnectionError if no question was answered at all for such a reason.
        """
        call = _Call(self)
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            with call.client:
                found = list(pool.map(call.ask, questions))
        finally:  # also of a KeyboardInterrupt
            call.over.set()
            pool.shutdown(cancel_futures=True)
        dead = [error for error in found if isinstance(error, GivenUp)]
        if dead and not call.answered:
            raise ConnectionError(str(dead[0]))
        return found


class _Call:
    """The questions of one call: their connections, and whether the endpoint is still alive."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.httpx = require("httpx", "'flowalign[serve]'", "this reward asks its judge with")
        self.endpoint = endpoint
        self.token = endpoint.token()
        self.client = self.httpx.Client(
            timeout=endpoint.timeout,
            headers={"Authorization": f"Bearer {self.token}"} if self.token else {},
            limits=self.httpx.Limits(max_connections=endpoint.concurrency),
        )
        self.over, self.lock = threading.Event(), threading.Lock()
        self.answered, self.in_a_row, self.last = False, 0, ""

    def ask(self, question: Question) -> str | Exception:
        """The answer, or the exception that took its place."""
        if self.over.is_set():
            return GivenUp(f"not asked any more, as the endpoint seems dead: {self.last}")
        try:
            found = self._request(*question())
        except GivenUp as error:
            with self.lock:
                self.in_a_row, self.last = self.in_a_row + 1, str(error)
                if self.in_a_row >= self.endpoint.concurrency:
                    self.over.set()
            return error
        except Exception as error:  # of this question: its pixels, or a form that nobody expects
            return error
        with self.lock:
            self.answered, self.in_a_row = True, 0
        return found

    def _request(self, text: str, image: str) -> str:
        """Ask until there is an answer. Raises GivenUp; ValueError for a fault of this one."""
        to, fault = f"{self.endpoint.url.rstrip('/')}/chat/completions", "the call was stopped"
        for attempt in range(1 + self.endpoint.retries):
            if attempt and self.over.wait(min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)):
                break
            try:
                response = self.client.post(to, json=self._body(text, image))
            except self.httpx.TransportError as error:  # timeouts are among them
                fault = self._clean(f"{type(error).__name__}: {error}")
                continue
            status = response.status_code
            if status == 200:
                return self._content(response)
            fault = f"HTTP {status}: {beginning(self._clean(response.text))}"
            if status in ELSEWHERE:
                break
            if status != 429 and status < 500:
                raise ValueError(f"{to} refused the question with {fault}")
        raise GivenUp(f"no answer from {to} for model {self.endpoint.model!r}: {fault}")

    def _body(self, text: str, image: str) -> dict[str, Any]:
        content = [
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": text},
        ]
        return {
            "model": self.endpoint.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.endpoint.max_tokens,
        }

    def _content(self, response: Any) -> str:
        """The text of an answer. Raises ValueError for what is not in OpenAI's form."""
        try:
            found = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            found = None
        if not isinstance(found, str):
            seen = beginning(self._clean(response.text))
            raise ValueError(f"an answer without the text choices[0].message.content: {seen}")
        return found

    def _clean(self, text: str) -> str:
        """Without the key, which an endpoint may repeat. To be asked before a text is cut."""
        return text.replace(self.token, "***") if self.token else text


def image_url(image: np.ndarray, size: int | None) -> str:
    """An image uint8 RGB [H,W,3] as the data URL of a PNG, resized to size x size if given."""
    picture, file = Image.fromarray(image), BytesIO()
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BICUBIC)
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def beginning(text: str, length: int = 160) -> str:
    """The beginning of a text, on one line, for a message."""
    line = " ".join(text.split())
    return repr(line if len(line) <= length else f"{line[:length]}...")


def _check_url(url: Any) -> None:
    """Raise ValueError for what is not the base URL of an endpoint."""
    parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        seen = f"{url!r} is no http(s) address"
    elif parts.username or parts.password:
        seen = "holds a user or a password, which logs would show; use `token_env`"
    elif parts.path.rstrip("/").endswith("/completions"):
        seen = f"{url!r} is one call of an endpoint, not its base"
    elif parts.query or parts.fragment:
        seen = f"{url!r} has more than a path"
    else:
        return
    raise ValueError(f"`url`: {seen}. Give the base, such as http://127.0.0.1:8000/v1.")
