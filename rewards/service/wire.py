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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

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
PREFIX = "FLOWALIGN_"  # of all variables that a config may name
CONTENT_TYPE = "application/x-safetensors"
# Of the safetensors header. Two tensors take 200 bytes, and the library would parse up to 100 MB.
_HEADER_BYTES = 16 * 1024
PARTS = 64  # of an answer

PartName = Annotated[str, Field(pattern=r"^[^\p{C}]{1,100}$")]  # no control characters
Values = list[float | None]


class Document(BaseModel):
    """Base of what is sent as JSON."""

    model_config = ConfigDict(strict=True)


class Asked(Document, extra="forbid"):
    """The JSON of a request."""

    version: int
    prompts: list[str] = Field(min_length=1)
    metadata: list[dict[str, Any]]


class Answered(Document):
    """The JSON of an answer."""

    version: int = VERSION
    reward: str = ""
    value: Values
    valid: list[bool]
    parts: dict[PartName, Values] = Field(max_length=PARTS)
    reasons: dict[str, str]


class Info(Document):
    """What a client reads of /v1/info."""

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
    prompt: int = 10_000  # characters
    json: int = 4 * 2**20  # bytes of prompts and metadata


@dataclass(frozen=True)
class Request:
    """pixels uint8 [B,3,H,W], B prompts, B metadata."""

    pixels: Tensor
    prompts: list[str]
    metadata: list[dict[str, Any]]


# Requests ----------------------------------------------------------------------------------------


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


def decode_request(body: bytes, limits: Limits) -> Request:
    """The body of a request -> Request. Raises WireError: 400, 413 or 422, and nothing else."""
    if len(body) > limits.bytes:
        raise WireError(413, f"the body has {len(body)} bytes; at most {limits.bytes} are taken.")
    if int.from_bytes(body[:8], "little") > _HEADER_BYTES:
        raise WireError(400, "the body does not begin as a safetensors file of two tensors does.")
    try:
        tensors = dict(safetensors.deserialize(body))
    except Exception as error:  # SafetensorError, or what its Rust side raises
        raise WireError(400, f"the body is no safetensors file: {str(error)[:200]}") from error
    if "request" not in tensors:
        raise WireError(400, f"no tensor `request` among {_some(tensors)}.")
    prompts, metadata = _rows(bytes(tensors.pop("request")["data"]), limits)

    if set(tensors) != {"images"}:
        raise WireError(422, f"tensors {_some(tensors)} beside `request`; send `images`.")
    dtype, shape = tensors["images"]["dtype"], tensors["images"]["shape"]
    if dtype != "U8" or len(shape) != 4 or shape[3] != 3 or 0 in shape:
        raise WireError(422, f"`images` is {dtype} of shape {shape[:8]}; send U8 [B,H,W,3].")
    if shape[0] != len(prompts):
        raise WireError(422, f"{shape[0]} images and {len(prompts)} prompts; send one each.")
    if shape[1] * shape[2] > limits.pixels:
        size = f"{shape[2]}x{shape[1]}"
        raise WireError(413, f"images of {size} pixels; at most {limits.pixels} each are taken.")
    pixels = np.frombuffer(tensors["images"]["data"], np.uint8).reshape(shape)
    # a copy: contiguous, writable, and it does not keep the body in memory
    return Request(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), prompts, metadata)


def _rows(data: bytes, limits: Limits) -> tuple[list[str], list[dict[str, Any]]]:
    """Prompts and metadata of the tensor `request`."""
    if len(data) > limits.json:
        raise WireError(413, f"the JSON has {len(data)} bytes; at most {limits.json} are taken.")
    asked = _parse(data, Asked, status=422)
    prompts, metadata = asked.prompts, asked.metadata
    if len(prompts) != len(metadata):
        raise WireError(
            422, f"{len(prompts)} prompts and {len(metadata)} metadata; send one each per image."
        )
    if len(prompts) > limits.images:
        raise WireError(413, f"{len(prompts)} images; at most {limits.images} a request are taken.")
    longest = max(map(len, prompts))
    if longest > limits.prompt:
        raise WireError(422, f"a prompt of {longest} characters; {limits.prompt} are taken.")
    return prompts, metadata


# Answers -----------------------------------------------------------------------------------------


def encode_answer(reward: str, scores: Scores) -> bytes:
    """Scores of B images -> the body of an answer."""

    answer = Answered.model_construct(
        version=VERSION,
        reward=reward,
        value=scores.value.tolist(),
        valid=scores.valid.tolist(),
        parts={name: part.tolist() for name, part in scores.parts.items()},
        reasons={str(row): text for row, text in scores.reasons.items()},
    )
    return answer.model_dump_json().encode()  # what is not finite becomes null


def answer_bytes(count: int) -> int:
    """How many bytes an answer about `count` images may have: some four times what it needs."""
    return 64 * 2**10 + count * 16 * 2**10


def decode_answer(body: bytes, count: int) -> Scores:
    """The body of an answer about `count` images -> Scores. Raises WireError (502).

    Numbers that float32 cannot hold become NaN, and a row without a value is invalid. The reasons
    are as the server sent them.
    """
    answer = _parse(body, Answered, status=502)
    columns = {"value": answer.value, "valid": answer.valid, **answer.parts}
    for name, column in columns.items():
        if len(column) != count:
            raise WireError(502, f"`{name}` of the answer has {len(column)} rows, not {count}.")
    rows = {str(row): row for row in range(count)}
    if not answer.reasons.keys() <= rows.keys():
        raise WireError(502, "`reasons` of the answer are not by row.")
    value = _numbers(answer.value)
    return Scores(
        value,
        torch.tensor(answer.valid, dtype=torch.bool) & torch.isfinite(value),
        {name: _numbers(part) for name, part in answer.parts.items()},
        {rows[row]: text for row, text in answer.reasons.items()},
    )


def _numbers(values: Values) -> Tensor:
    """float32 of numbers and nulls; NaN for what float32 cannot hold."""
    tensor = torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)
    tensor = tensor.to(torch.float32)
    return tensor.masked_fill(~tensor.isfinite(), math.nan)


def decode_info(body: bytes) -> dict[str, Any]:
    """`describe` of the body of /v1/info: what the served reward says of itself.

    Raises WireError (502).
    """
    return _parse(body, Info, status=502).describe


# JSON and the token ------------------------------------------------------------------------------


def _parse(data: bytes, kind: type[Kind], status: int) -> Kind:
    """A document of strict JSON, of this version. Raises WireError: `status` if it has another
    form, and 400 instead of 422 if it is no JSON or of another version."""
    unreadable = 400 if status == 422 else status
    try:
        document = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        reason = shown(str(error), 200)
        raise WireError(unreadable, f"the JSON cannot be read: {reason}") from error
    if not isinstance(document, dict):
        kind_name = type(document).__name__
        raise WireError(unreadable, f"the JSON is a {kind_name}, not an object.")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise WireError(
            unreadable,
            f"the other side speaks version {shown(str(version), 20)} of the wire format, this one "
            f"{VERSION}; run the same release of flowalign on both.",
        )
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = shown(".".join(map(str, first["loc"])), 60)
        raise WireError(status, f"`{where}` of the JSON: {shown(first['msg'], 200)}") from error


def _some(names: Mapping[str, Any]) -> list[str]:
    return [name[:50] for name in list(names)[:8]]  # a caller may send thousands, of any length


def read_token(environment: Mapping[str, str], name: str = TOKEN) -> str | None:
    """The token of an environment variable; None if unset or empty. Raises ValueError."""
    token = environment.get(name, "").strip() or None
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{name} holds spaces or other characters that no HTTP header can.")
    return token


# Options of rewards that are asked over HTTP ------------------------------------------------------


def _may_be_sent(name: str | None) -> str | None:
    if name is None:
        return None
    if not re.fullmatch(PREFIX + r"\w+", name, re.ASCII):
        # A config names the server, too: a stranger's could have any secret sent to any place.
        own = PREFIX + re.sub(r"\W", "", name, flags=re.ASCII)[:50]
        raise ValueError(
            f"a config may only have variables sent whose names begin with {PREFIX}. Export it "
            f'under such a name, as in `export {own}="$..."`, and give that.'
        )
    if read_token(os.environ, name) is None:
        raise ValueError("that variable is not set here, or empty. Export it, or leave this out.")
    return name


TokenEnv = Annotated[str | None, AfterValidator(_may_be_sent)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, description="seconds")]
Retries = Annotated[int, Field(ge=0, description="further attempts")]
