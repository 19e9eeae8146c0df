"""UniRL's reward protocol, `POST /score`: pure functions between tensors and JSON.

A request is {"requests": [{"history": [{"text": prompt, "image_b64": file}], "required_rewards":
[name], "metadata": {} or null}]}, one per image: a PNG, JPEG or WebP file in base64, all of one
size. The last turn of a history counts. Other keys are ignored.

An answer is {"results": [{name: {name: value, part: number}}], "errors": [{name: reason}]}, one of
each per request. An invalid image has an error and no result. Our servers add "notes": [{name:
text}], the reward's remarks on a valid image. Nothing is ever unpickled.
Source: Tencent-Hunyuan/UniRL, unirl-reward-service (schemas.py, server.py).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from flowalign.system.escape import shown
from flowalign.system.images import as_rgb, png_base64, to_uint8
from flowalign.types import Metadata, Scores

TOKEN = "FLOWALIGN_REWARD_TOKEN"  # the environment variable that holds the token
FORMATS = ("PNG", "JPEG", "WEBP")  # the decoders of others run programs or fill the memory
_VALUES = 2**17  # of the JSON: each takes up to a hundred bytes of memory
_REASON = 500  # characters of a reason that are sent
FLOAT32 = torch.finfo(torch.float32).max

Name = Annotated[str, Field(pattern=r"^(?: |[^\p{C}\p{Z}]){1,100}$")]  # printable, on one line


class Turn(BaseModel):
    text: str
    image_b64: str | None = None


class Request(BaseModel):
    history: list[Turn] = Field(min_length=1)
    required_rewards: list[str]
    metadata: dict[str, Any] | None = None


class Asked(BaseModel):
    requests: list[Request] = Field(min_length=1)


class Answered(BaseModel):
    results: list[dict[str, dict[Name, float | None]]]
    errors: list[dict[str, str]] = []
    notes: list[dict[str, str]] = []


class Roster(BaseModel):
    """A server's answer at /rewards. describe {name: description}: only our servers send it."""

    rewards: list[str]
    describe: dict[str, dict[str, Any]] = {}


Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True)
class Limits:
    """What a server takes, at most."""

    images: int = 64  # a request
    pixels: int = 2048 * 2048  # of an image
    bytes: int = 256 * 2**20  # of the body, and of the decoded images
    queue: int = 16  # requests being read, waiting or being scored; more are answered 503
    seconds: float = 300.0  # for the body to arrive; again for the scores, with waiting; then 504


def encode_request(
    reward: str, images: Tensor, prompts: Sequence[str], metadata: Metadata
) -> bytes:
    """images [B,3,H,W] in [0,1] (rounded to 8 bits) and their rows -> the body of a request.

    Raises ValueError for pixels that are NaN or infinite and for metadata that JSON cannot hold.
    JSON turns tuples into lists, and keys into text.
    """
    files = [png_base64(Image.fromarray(to_uint8(image))) for image in images]
    requests = [
        {
            "history": [{"text": text, "image_b64": file}],
            "required_rewards": [reward],
            "metadata": dict(row),
        }
        for file, text, row in zip(files, prompts, metadata, strict=True)
    ]
    try:
        return json.dumps({"requests": requests}, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"this cannot be sent to another process: {error}") from error


def decode_request(
    reward: str, body: bytes | bytearray, limits: Limits
) -> tuple[Tensor, list[str], list[dict[str, Any]]]:
    """The body of a request for this reward -> uint8 images [B,3,H,W], prompts, metadata.

    Raises ValueError, and nothing else.
    """
    if sum(map(body.count, (b"{", b"[", b","))) > _VALUES:  # base64 has none of these
        raise ValueError(f"the JSON has more than {_VALUES} values.")
    requests = parse_body(body, Asked).requests
    if len(requests) > limits.images:
        raise ValueError(f"{len(requests)} images in a request; at most {limits.images} fit.")
    images = []
    left = limits.bytes
    for row, request in enumerate(requests):
        if set(request.required_rewards) != {reward}:
            wanted = shown(str(request.required_rewards), 100)
            raise ValueError(f"request {row} requires {wanted}; served is [{reward!r}].")
        try:
            file = request.history[-1].image_b64 or ""
            images.append(_decode_image(file, min(limits.pixels, left // 3)))
        except Exception as error:  # PIL raises whatever its decoders do
            reason = shown(f"{type(error).__name__}: {error}")
            raise ValueError(f"`image_b64` of request {row}: {reason}") from error
        left -= images[-1].numel()
        if images[-1].shape != images[0].shape:
            raise ValueError(
                f"request {row} has an image of another size; send one size at a time."
            )
    prompts = [request.history[-1].text for request in requests]
    return torch.stack(images), prompts, [request.metadata or {} for request in requests]


def _decode_image(file: str, most: int) -> Tensor:
    """The uint8 image [3,H,W] of a file in base64, of at most so many pixels."""
    with Image.open(BytesIO(base64.b64decode(file, validate=True)), formats=FORMATS) as image:
        if image.width * image.height > most:  # before they are decoded
            raise ValueError(f"{image.width}x{image.height} pixels; at most {most} fit.")
        return torch.from_numpy(np.array(as_rgb(image))).permute(2, 0, 1)


def encode_answer(reward: str, scores: Scores) -> bytes:
    """Scores of B images -> the body of an answer. UniRL's client takes the first number of a
    result for the value. A part of the reward's own name is left out."""
    answer: dict[str, list[Any]] = {"results": [], "errors": [], "notes": []}
    columns = {reward: scores.value.tolist()}
    columns |= {name: part.tolist() for name, part in scores.parts.items() if name != reward}
    for row, valid in enumerate(scores.valid.tolist()):
        numbers = {n: column[row] for n, column in columns.items() if math.isfinite(column[row])}
        reason = {reward: shown(scores.reasons[row], _REASON)} if row in scores.reasons else {}
        answer["results"].append({reward: numbers} if valid else {})
        answer["errors"].append({} if valid else reason or {reward: "no score"})
        answer["notes"].append(reason if valid else {})
    return json.dumps(answer).encode()


def decode_answer(reward: str, body: bytes, count: int) -> Scores:
    """The body of an answer about `count` images -> Scores. Raises ValueError.

    The value is the number of the reward's name, or else the first, and the others are parts. A row
    is invalid if it has no value, or one that float32 cannot hold. Reasons are as they were sent.
    """
    answer = parse_body(body, Answered)
    if len(answer.results) != count:
        raise ValueError(f"the answer has {len(answer.results)} results, not {count}.")
    rows = []
    for result in answer.results:
        numbers = {
            name: math.nan if number is None or abs(number) > FLOAT32 else number
            for name, number in result.get(reward, {}).items()
        }
        value = numbers.pop(reward, next(iter(numbers.values()), math.nan))
        rows.append(numbers | {"value": value})
    reasons = [*enumerate(answer.notes[:count]), *enumerate(answer.errors[:count])]
    return Scores.of_rows(rows, {row: texts[reward] for row, texts in reasons if reward in texts})


def parse_body(data: bytes | bytearray, kind: type[Kind]) -> Kind:
    """A document of strict JSON. Raises ValueError for any other."""
    try:
        return kind.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = shown(".".join(map(str, first["loc"])), 60)
        raise ValueError(f"`{where}` of the JSON: {shown(first['msg'], 200)}") from error
