"""The wire format of rewards that live elsewhere: pure functions between tensors and bytes.

A request is one safetensors file of uint8 tensors: `request`, the UTF-8 bytes of a JSON object
{"version": 1, "prompts": [B texts], "metadata": [B objects]}, and for each image i = 0 .. B-1
either `image.i` [H,W,3], its RGB pixels, or `png.i` [N], the bytes of a PNG (8-bit RGB). All
images of a request have one size. (The JSON is a tensor, and no safetensors `__metadata__`, as
the library hands that out for files only.)

An answer is JSON: {"version": 1, "reward": name, "value": [B numbers or null], "valid": [B
booleans], "parts": {name: [B numbers or null]}, "reasons": {row: text}}. Numbers that are not
finite travel as null and arrive as NaN. Nothing here is ever unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import safetensors
import torch
from PIL import Image
from safetensors.numpy import save
from torch import Tensor

from flowalign.images import to_uint8
from flowalign.types import Scores

VERSION = 1
TOKEN = "FLOWALIGN_REWARD_TOKEN"  # the environment variable that holds the token
CONTENT_TYPE = "application/x-safetensors"
ENCODINGS = ("raw", "png")
_PNG_LEVEL = 1  # of zlib's 9: a third of the time of PIL's 6, about a tenth more bytes


class WireError(ValueError):
    """A request or answer that is refused; status: the HTTP status that says so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """What a request may hold, at most.

    images; pixels of one image; bytes of the body, and of all its images unpacked; characters of
    a prompt; json: bytes of the JSON part (prompts and metadata); depth: levels of nesting in it.
    """

    images: int = 64
    pixels: int = 2048 * 2048
    bytes: int = 256 * 2**20
    prompt: int = 10_000
    json: int = 4 * 2**20
    depth: int = 16

    @property
    def header(self) -> int:
        """Bytes of the safetensors header that so many tensors can need."""
        return 4096 + 256 * self.images


@dataclass(frozen=True)
class Request:
    """pixels uint8 [B,3,H,W], B prompts, B metadata."""

    pixels: Tensor
    prompts: list[str]
    metadata: list[dict[str, Any]]


# Requests ----------------------------------------------------------------------------------------


def encode_request(
    images: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    encoding: str = "raw",
) -> bytes:
    """images [B,3,H,W] in [0,1] (rounded to 8 bits) and their rows -> the body of a request.

    encoding: "raw" or "png". Raises WireError (422) for pixels that are no numbers and for
    metadata that JSON cannot hold. JSON has no tuples and no keys but text: they become lists and
    text.
    """
    try:
        text = json.dumps(
            {"version": VERSION, "prompts": list(prompts), "metadata": [dict(m) for m in metadata]},
            allow_nan=False,
        )
        pictures = [to_uint8(image) for image in images]
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(422, f"this cannot be sent to another process: {error}") from error
    tensors = {"request": np.frombuffer(text.encode(), np.uint8)}
    for row, picture in enumerate(pictures):
        if encoding == "png":
            tensors[f"png.{row}"] = np.frombuffer(_to_png(picture), np.uint8)
        else:
            tensors[f"image.{row}"] = picture
    return save(tensors)


def decode_request(body: bytes, limits: Limits) -> Request:
    """The body of a request -> Request. Raises WireError: 400, 413 or 422, and nothing else."""
    tensors = _tensors(body, limits)
    if "request" not in tensors:
        raise WireError(400, f"no tensor `request` among {_some(tensors)}.")
    prompts, metadata = _rows(tensors.pop("request"), limits)
    count = len(prompts)
    kinds = [kind for kind in ("image", "png") if f"{kind}.0" in tensors]
    wanted = {f"{kinds[0]}.{row}" for row in range(count)} if kinds else set()
    if not wanted or set(tensors) != wanted:
        raise WireError(
            422,
            f"{count} prompts need the tensors image.0 to image.{count - 1}, or png.0 to "
            f"png.{count - 1}, and no others; found {_some(tensors)}.",
        )
    pictures: list[np.ndarray] = []
    for row in range(count):
        name = f"{kinds[0]}.{row}"
        unpack = _from_raw if kinds[0] == "image" else _from_png
        pictures.append(unpack(name, tensors.pop(name), count, limits))
        if pictures[row].shape != pictures[0].shape:
            sizes = [f"{p.shape[1]}x{p.shape[0]}" for p in (pictures[0], pictures[row])]
            raise WireError(
                422, f"{name} has {sizes[1]} pixels and image 0 has {sizes[0]}; send one size."
            )
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()
    return Request(pixels, prompts, metadata)


def _tensors(body: bytes, limits: Limits) -> dict[str, np.ndarray]:
    """The uint8 tensors of a safetensors file, of whatever shape."""
    if len(body) > limits.bytes:
        raise WireError(413, f"the body has {len(body)} bytes; at most {limits.bytes} are taken.")
    # The library takes headers of up to 100 MB; so many tensors would cost gigabytes. This bounds
    # what it is handed, it parses nothing.
    if int.from_bytes(body[:8], "little") > limits.header:
        raise WireError(400, "the body does not begin as a safetensors file of a few tensors does.")
    try:
        found = safetensors.deserialize(body)
    except Exception as error:  # SafetensorError, and whatever its Rust side turns a fault into
        raise WireError(400, f"the body is no safetensors file: {str(error)[:200]}") from error
    tensors = {}
    for name, tensor in found:
        if tensor["dtype"] != "U8":
            raise WireError(422, f"tensor {name[:50]!r} has dtype {tensor['dtype']}; send U8.")
        tensors[name] = np.frombuffer(tensor["data"], np.uint8).reshape(tensor["shape"])
    return tensors


def _rows(data: np.ndarray, limits: Limits) -> tuple[list[str], list[dict[str, Any]]]:
    """Prompts and metadata of the tensor `request`."""
    if data.ndim != 1:
        raise WireError(422, f"tensor `request` has shape {list(data.shape)}; send [bytes].")
    if len(data) > limits.json:
        raise WireError(413, f"the JSON has {len(data)} bytes; at most {limits.json} are taken.")
    found = _parse(data.tobytes(), 400, limits.depth)
    _check_version(found, 400)
    if set(found) != {"version", "prompts", "metadata"}:
        raise WireError(422, f"keys {_some(found)}; send version, prompts and metadata.")
    prompts, metadata = found["prompts"], found["metadata"]
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise WireError(422, "`prompts` is no list of texts.")
    if not isinstance(metadata, list) or not all(isinstance(m, dict) for m in metadata):
        raise WireError(422, "`metadata` is no list of objects.")
    if len(prompts) != len(metadata) or not prompts:
        raise WireError(
            422, f"{len(prompts)} prompts and {len(metadata)} metadata; send one each an image."
        )
    if len(prompts) > limits.images:
        raise WireError(413, f"{len(prompts)} images; at most {limits.images} a request are taken.")
    longest = max(map(len, prompts))
    if longest > limits.prompt:
        raise WireError(422, f"a prompt of {longest} characters; {limits.prompt} are taken.")
    return prompts, metadata


def _from_raw(name: str, data: np.ndarray, count: int, limits: Limits) -> np.ndarray:
    if data.ndim != 3 or data.shape[2] != 3:
        raise WireError(422, f"{name} has shape {list(data.shape)}; send [H,W,3].")
    _check_size(name, data.shape[1], data.shape[0], count, limits)
    return data


def _from_png(name: str, data: np.ndarray, count: int, limits: Limits) -> np.ndarray:
    """uint8 [H,W,3] of a PNG, unpacked only after its header was found to be within limits."""
    try:
        with Image.open(BytesIO(data.tobytes()), formats=("PNG",)) as picture:
            _check_size(name, picture.width, picture.height, count, limits)
            if picture.mode != "RGB":
                raise WireError(422, f"{name} is a PNG of mode {picture.mode}; send 8-bit RGB.")
            return np.asarray(picture)
    except WireError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise WireError(413, f"{name} has more pixels than are taken.") from error
    except Exception as error:  # PIL raises what its parsers stumble over
        raise WireError(422, f"{name} is no PNG that can be read.") from error


def _check_size(name: str, width: int, height: int, count: int, limits: Limits) -> None:
    if width < 1 or height < 1:
        raise WireError(422, f"{name} has {width}x{height} pixels.")
    if width * height > limits.pixels:
        raise WireError(
            413, f"{name} has {width}x{height} pixels; at most {limits.pixels} are taken."
        )
    if 3 * width * height * count > limits.bytes:
        raise WireError(
            413,
            f"{count} images of {width}x{height} pixels unpack to more than {limits.bytes} bytes; "
            "send fewer a request.",
        )


def _to_png(picture: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=_PNG_LEVEL)
    return file.getvalue()


# Answers -----------------------------------------------------------------------------------------


def encode_answer(reward: str, scores: Scores) -> bytes:
    """Scores of B images -> the body of an answer."""
    return json.dumps(
        {
            "version": VERSION,
            "reward": reward,
            "value": _finite(scores.value),
            "valid": scores.valid.tolist(),
            "parts": {name: _finite(part) for name, part in scores.parts.items()},
            "reasons": {str(row): text for row, text in scores.reasons.items()},
        },
        allow_nan=False,
    ).encode()


def decode_answer(body: bytes, count: int) -> Scores:
    """The body of an answer about `count` images -> Scores. Raises WireError (502)."""
    found = _parse(body, 502, depth=3)
    _check_version(found, 502)
    parts, valid, reasons = (found.get(key) for key in ("parts", "valid", "reasons"))
    if not isinstance(parts, dict) or not isinstance(reasons, dict):
        raise WireError(502, "`parts` or `reasons` of the answer is no object.")
    if (
        not isinstance(valid, list)
        or len(valid) != count
        or not all(type(v) is bool for v in valid)
    ):
        raise WireError(502, f"`valid` of the answer is no list of {count} booleans.")
    rows = {str(row): row for row in range(count)}
    if not all(row in rows and isinstance(text, str) for row, text in reasons.items()):
        raise WireError(502, "`reasons` of the answer are not texts by row.")
    return Scores(
        _numbers("value", found.get("value"), count),
        torch.tensor(valid, dtype=torch.bool),
        {name: _numbers(name, part, count) for name, part in parts.items()},
        {rows[row]: text for row, text in reasons.items()},
    )


def error_text(body: bytes) -> str:
    """What an answer that refuses says, in one line of at most 500 characters."""
    try:
        found = json.loads(body)
        text = found["error"] if isinstance(found["error"], str) else ""
    except (ValueError, TypeError, KeyError, RecursionError):
        text = body[:500].decode("utf-8", "replace")
    return " ".join(text.split())[:500]


def _finite(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _numbers(name: str, values: Any, count: int) -> Tensor:
    """float32 [count] of a list of numbers and nulls."""
    if not isinstance(values, list) or len(values) != count:
        raise WireError(502, f"`{name[:50]}` of the answer is no list of {count} numbers.")
    if not all(v is None or type(v) in (int, float) for v in values):
        raise WireError(502, f"`{name[:50]}` of the answer holds what is no number and not null.")
    try:
        return torch.tensor(
            [math.nan if v is None else float(v) for v in values], dtype=torch.float32
        )
    except OverflowError as error:
        raise WireError(502, f"`{name[:50]}` of the answer holds too large a number.") from error


# JSON --------------------------------------------------------------------------------------------


def _parse(data: bytes, status: int, depth: int) -> dict[str, Any]:
    """A JSON object of strict UTF-8 JSON; NaN, lone surrogates and deep nesting are refused."""
    try:
        found = json.loads(data.decode(), parse_constant=_refuse)
        _check_depth(found, depth)
        json.dumps(found, ensure_ascii=False).encode()  # lone surrogates have no UTF-8
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise WireError(status, f"the JSON cannot be read: {reason}") from error
    if not isinstance(found, dict):
        raise WireError(status, f"the JSON is a {type(found).__name__}, not an object.")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON; use null")


def _check_depth(found: Any, depth: int) -> None:
    level = [found]
    for _ in range(depth + 1):
        nested = [v for v in level if isinstance(v, (dict, list))]
        level = [w for v in nested for w in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {depth} levels")


def _check_version(found: Mapping[str, Any], status: int) -> None:
    version = found.get("version")
    if type(version) is not int or version != VERSION:
        raise WireError(
            status,
            f"the other side speaks version {str(version)[:20]} of the wire format and this one "
            f"{VERSION}; run the same release of flowalign on both.",
        )


def _some(names: Any) -> list[str]:
    """A few of the names, short enough for a message."""
    return [str(name)[:50] for name in list(names)[:8]]


# Both sides' surroundings -------------------------------------------------------------------------


def read_token(environment: Mapping[str, str], name: str = TOKEN) -> str | None:
    """The token of an environment variable; None if unset or empty. Raises ValueError."""
    token = environment.get(name) or None
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{name} holds spaces or other characters that no HTTP header can.")
    return token
