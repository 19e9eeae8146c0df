"""The wire format of the reward service: pure functions between tensors and bytes.

A request is one safetensors file of two uint8 tensors. `images` [B,H,W,3] holds RGB pixels.
`request` [bytes] is UTF-8 JSON: {"version": 2, "prompts": [B texts], "metadata": [B objects]}. (It
is a tensor and not safetensors' `__metadata__`, which the library reads from files only.)

An answer is JSON: {"version": 2, "reward": name, "value": [B numbers or null], "valid": [B
booleans], "parts": {name: [B numbers or null]}, "reasons": {row: text}}. Numbers that are not
finite are sent as null and arrive as NaN. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import safetensors
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from safetensors.numpy import save
from torch import Tensor

from flowalign.system.escape import shown
from flowalign.system.images import to_uint8
from flowalign.types import Metadata, Scores

VERSION = 2  # 1 had a tensor per image, raw or PNG
TOKEN = "FLOWALIGN_REWARD_TOKEN"  # the environment variable that holds the token
CONTENT_TYPE = "application/x-safetensors"
# Of the safetensors header. Two tensors take 200 bytes, and the library would parse up to 100 MB.
_HEADER_BYTES = 16 * 1024
_REASON = 500  # characters of a reason that are sent

PartName = Annotated[str, Field(pattern=r"^[^\p{C}]{1,100}$")]  # no control characters
Values = list[float | None]


class Document(BaseModel):
    """Base of what is sent as JSON."""

    model_config = ConfigDict(strict=True)
    version: Literal[2]


class Asked(Document, extra="forbid"):
    """The JSON of a request."""

    prompts: list[str] = Field(min_length=1)
    metadata: list[dict[str, Any]]


class Answered(Document):
    """The JSON of an answer."""

    reward: str = ""
    value: Values
    valid: list[bool]
    parts: dict[PartName, Values] = Field(max_length=64)
    reasons: dict[str, str]


class Info(Document):
    """What a client reads of /v1/info: what the served reward says of itself."""

    describe: dict[str, Any]


Kind = TypeVar("Kind", bound=Document)


class WireError(ValueError):
    """A request or answer that is refused. status: the HTTP status of the refusal."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What a request may hold, at most."""

    images: int = 64
    pixels: int = 2048 * 2048  # of one image
    bytes: int = 256 * 2**20  # of the body
    json: int = 4 * 2**20  # bytes of prompts and metadata


def encode_request(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> bytes:
    """images [B,3,H,W] in [0,1] (rounded to 8 bits) and their rows -> the body of a request.

    Raises WireError (422) for pixels that are NaN or infinite and for metadata that JSON cannot
    hold. JSON turns tuples into lists, and keys into text.
    """
    try:
        text = json.dumps(
            {"version": VERSION, "prompts": list(prompts), "metadata": [dict(m) for m in metadata]},
            allow_nan=False,
        )
        pixels = np.stack([to_uint8(image) for image in images])
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(422, f"this cannot be sent to another process: {error}") from error
    return save({"request": np.frombuffer(text.encode(), np.uint8), "images": pixels})


def decode_request(body: bytes, limits: Limits) -> tuple[Tensor, list[str], list[dict[str, Any]]]:
    """The body of a request -> pixels uint8 [B,3,H,W], B prompts, B metadata.

    Raises WireError: 400, 413 or 422, and nothing else.
    """
    try:
        if int.from_bytes(body[:8], "little") > _HEADER_BYTES:
            raise ValueError("its header is too long")
        tensors = dict(safetensors.deserialize(body))
        text = bytes(tensors.pop("request")["data"])
    except Exception as error:  # SafetensorError, or what its Rust side raises
        reason = str(error)[:200]
        raise WireError(400, f"no safetensors file with a tensor `request`: {reason}") from error
    if len(text) > limits.json:
        raise WireError(413, f"the JSON has {len(text)} bytes; at most {limits.json} are taken.")
    asked = parse(text, Asked, status=422)
    prompts, metadata = asked.prompts, asked.metadata
    if set(tensors) != {"images"}:
        raise WireError(422, f"send the tensors `request` and `images`, not {len(tensors)} others.")
    dtype, shape = tensors["images"]["dtype"], tensors["images"]["shape"]
    if dtype != "U8" or len(shape) != 4 or shape[3] != 3 or 0 in shape:
        raise WireError(422, f"`images` is {dtype} of shape {shape[:8]}; send U8 [B,H,W,3].")
    if not shape[0] == len(prompts) == len(metadata):
        counts = f"{shape[0]} images, {len(prompts)} prompts and {len(metadata)} metadata"
        raise WireError(422, f"{counts}; send one each.")
    if shape[0] > limits.images or shape[1] * shape[2] > limits.pixels:
        most = f"{limits.images} images of {limits.pixels} pixels"
        raise WireError(413, f"{shape[0]} images of {shape[2]}x{shape[1]}; at most {most}.")
    pixels = np.frombuffer(tensors["images"]["data"], np.uint8).reshape(shape)
    # a copy: contiguous, writable, and it does not keep the body in memory
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), prompts, metadata


def encode_answer(reward: str, scores: Scores) -> bytes:
    """Scores of B images -> the body of an answer."""
    answer = Answered.model_construct(
        version=VERSION,
        reward=reward,
        value=scores.value.tolist(),
        valid=scores.valid.tolist(),
        parts={name: part.tolist() for name, part in scores.parts.items()},
        reasons={str(row): shown(text, _REASON) for row, text in scores.reasons.items()},
    )
    return answer.model_dump_json().encode()  # what is not finite becomes null


def decode_answer(body: bytes, count: int) -> Scores:
    """The body of an answer about `count` images -> Scores. Raises WireError (502).

    Numbers that float32 cannot hold become NaN, and a row without a value is invalid. The reasons
    are as the server sent them.
    """
    answer = parse(body, Answered, status=502)
    for name, column in {"value": answer.value, "valid": answer.valid, **answer.parts}.items():
        if len(column) != count:
            raise WireError(502, f"`{name}` of the answer has {len(column)} rows, not {count}.")
    value = _numbers(answer.value)
    return Scores(
        value,
        torch.tensor(answer.valid, dtype=torch.bool) & torch.isfinite(value),
        {name: _numbers(part) for name, part in answer.parts.items()},
        {row: answer.reasons[str(row)] for row in range(count) if str(row) in answer.reasons},
    )


def _numbers(values: Values) -> Tensor:
    """float32 of numbers and nulls; NaN for what float32 cannot hold."""
    tensor = torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)
    tensor = tensor.to(torch.float32)
    return tensor.masked_fill(~tensor.isfinite(), math.nan)


def parse(data: bytes, kind: type[Kind], status: int) -> Kind:
    """A document of strict JSON, of this version. Raises WireError: `status` if it has another
    form, and 400 instead of 422 if it is no JSON or of another version."""
    unreadable = 400 if status == 422 else status
    try:
        return kind.model_validate(from_json(data, allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = shown(".".join(map(str, first["loc"])), 60)
        status = unreadable if where in ("", "version") else status
        raise WireError(status, f"`{where}` of the JSON: {shown(first['msg'], 200)}") from error
    except ValueError as error:
        text = f"the JSON cannot be read: {shown(str(error), 200)}"
        raise WireError(unreadable, text) from error


# Options of rewards that are asked over HTTP ------------------------------------------------------


def read_token(name: str = TOKEN) -> str | None:
    """The token of an environment variable; None if unset or empty. Raises ValueError."""
    token = os.environ.get(name, "").strip() or None
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{name} holds spaces or other characters that no HTTP header can.")
    return token


def _check_variable(name: str) -> str:
    # A config names the server, too: a stranger's could have any secret sent to any place.
    if not re.fullmatch(r"FLOWALIGN_\w+", name, re.ASCII):
        raise ValueError("a config may only have variables sent that begin with FLOWALIGN_")
    if read_token(name) is None:
        raise ValueError("that variable is not set here, or empty")
    return name


TokenEnv = Annotated[str, AfterValidator(_check_variable)] | None
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Retries = Annotated[int, Field(ge=0)]
