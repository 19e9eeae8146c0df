"""Questions about images to an endpoint that speaks OpenAI's chat completions, many at a time."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from flowalign.http import Client
from flowalign.rewards.service.wire import read_token

Question = Callable[[], tuple[str, str]]  # makes a text and the URL of an image, in a thread


@dataclass(frozen=True)
class Endpoint:
    """Where the judge is, and how it is asked.

    url: the base, as in http://127.0.0.1:8000/v1; model: its name there.
    concurrency: questions at once. timeout: seconds without a sign of life, per request.
    retries: further attempts at a question, as `flowalign.http` has it.
    token_env: the environment variable that holds the API key, if there is one.
    max_tokens: length of an answer. The temperature is 0.
    """

    url: str
    model: str
    concurrency: int = 8
    timeout: float = 120.0
    retries: int = 3
    token_env: str | None = None
    max_tokens: int = 2048

    def answers(self, questions: Sequence[Question]) -> list[str | Exception]:
        """The answer to each question, in order; the exception in place of one that failed.

        Raises ConnectionError or TimeoutError if the endpoint answered none (see `Client.map`).
        """

        def ask(question: Question) -> str:
            text, image = question()
            content = [
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "text", "text": text},
            ]
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": self.max_tokens,
            }
            answer = client.request("POST", f"{self.url.rstrip('/')}/chat/completions", json=body)
            try:
                said = json.loads(answer.body)["choices"][0]["message"]["content"]
            except (ValueError, LookupError, TypeError):
                said = None
            if not isinstance(said, str):
                shown = client.clean(answer.body.decode("utf-8", "replace"))
                raise ValueError(f"no text choices[0].message.content in the answer {shown!r}")
            return said

        token = read_token(os.environ, self.token_env) if self.token_env else None
        with Client(timeout=self.timeout, retries=self.retries, token=token) as client:
            return client.map(ask, questions, self.concurrency)


def image_url(image: np.ndarray, size: int | None) -> str:
    """An image uint8 RGB [H,W,3] as the data URL of a PNG, resized to size x size if given."""
    picture, file = Image.fromarray(image), BytesIO()
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BICUBIC)
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
