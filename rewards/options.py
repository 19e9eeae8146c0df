"""Options of rewards and detectors: declared once, in a signature, and checked by pydantic.

The annotation of a parameter has the possible values: a type, with a range or a check in
`Annotated`.

    def __init__(self, model: str, *, batch_size: Count = 64, device: Device = None) -> None:

Nothing here loads a model.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints
from urllib.parse import urlsplit

import torch
from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from flowalign.config.section import did_you_mean
from flowalign.system.devices import resolve
from flowalign.system.hub_address import HubAddress, secrets
from flowalign.system.hub_files import TEXTS, WEIGHTS, HubFiles


def _check_device(value: Any) -> Any:
    try:
        torch.device(value or "cpu")
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"no device such as cpu or cuda:1: {error}") from error
    return value


def check_model(name: str) -> str:
    folder = Path(name).expanduser()
    if folder.is_dir() and not any(folder.glob("*config.json")):
        raise ValueError(f"folder {folder} holds no config.json")
    address = HubAddress.parse(name)
    if not folder.is_dir() and (address is None or address.path):
        raise ValueError("there is no such folder, and it is no Hub id")
    return name


def located(model: str) -> tuple[str, dict[str, Any]]:
    """The folder or Hub id of a `Pretrained`, and its revision as `from_pretrained` takes it."""
    folder = Path(model).expanduser()
    address = None if folder.is_dir() else HubAddress.parse(model)
    if address is None:
        return str(folder), {}
    return address.repository, {"revision": address.revision} if address.revision else {}


def hub_files(model: str, patterns: tuple[str, ...] = TEXTS + WEIGHTS) -> list[HubFiles]:
    """What `from_pretrained` reads of a `Pretrained` on the Hub; [] if it is no model there."""
    repository, at = located(model)
    on_hub = HubAddress.parse(repository) and not Path(repository).is_dir()
    return [HubFiles(repository, patterns, **at)] if on_hub else []


hub_texts = partial(hub_files, patterns=TEXTS)  # of a tokenizer or an image processor


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number
        plain = False
    if not plain or not url.isprintable() or any(sign in url for sign in " @?#"):
        raise ValueError("want http(s)://host[:port][/path] and no more (see `token_env`)")
    return url


def read_token(variable: str) -> str | None:
    """The token in an environment variable; None if unset or empty. Raises ValueError."""
    token = os.environ.get(variable, "").strip() or None
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{variable} holds spaces or other characters that no HTTP header can.")
    return token


def _check_variable(name: str) -> str:
    # A config also names the server, so a stranger's config could send any secret anywhere.
    if not re.fullmatch(r"FLOWALIGN_\w+", name, re.ASCII):
        raise ValueError("a config may only have variables sent that begin with FLOWALIGN_")
    if read_token(name) is None:
        raise ValueError("that variable is not set here, or empty")
    return name


Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Divisor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Device = Annotated[str | torch.device | None, PlainValidator(_check_device)]
OpenClip = Annotated[str, Field(min_length=1)]  # open_clip's name of a model, such as ViT-L-14
TokenEnv = Annotated[str, AfterValidator(_check_variable)] | None
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Retries = Annotated[int, Field(ge=0)]
Url = Annotated[str, AfterValidator(_check_url)]  # the address of a server, without a password
# the folder of a model, or owner/name[@revision] on the Hub
Pretrained = Annotated[str, AfterValidator(check_model)]


def with_device(
    function: Callable[..., Any], options: Mapping[str, Any], device: str | torch.device | None
) -> Mapping[str, Any]:
    """The options with that device, if the function has the option and they do not give it.
    device: None = this thread's accelerator, or the CPU."""
    if options.get("device") is not None or "device" not in inspect.signature(function).parameters:
        return options
    return {**options, "device": str(resolve(device))}


def check_call(what: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError, naming every fault, if a function or class does not take these options.

    Types are strict: "3" and true are no numbers. Annotations that pydantic cannot read, and
    values that JSON cannot hold, are left to the function. Last, its static method
    `check_options(**options)`, if it has one, checks the options against each other.
    what: for the message, such as "reward 'ocr'".
    """
    if leaks := list(secrets(options, what)):
        raise ValueError("\n".join(leaks))
    parameters = list(inspect.signature(function).parameters.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    annotations = _annotations(function)
    faults = [
        f"{what} cannot be built without `{name}`."
        for name, parameter in takes.items()
        if parameter.default is parameter.empty and name not in options
    ]
    for name, value in options.items():
        if name in takes:
            faults += _faults(what, name, annotations.get(name, Any), value)
        elif not takes_any:
            hint = did_you_mean(name, takes)
            faults.append(f"{what} has no option {name!r}.{hint} It takes {list(takes)}.")
    if faults:
        raise ValueError("\n".join(faults))
    if check_options := getattr(function, "check_options", None):
        check_options(**options)


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        target = function.__init__ if inspect.isclass(function) else function
        return get_type_hints(target, include_extras=True)
    except Exception:  # names that exist for a type checker only, or an object without annotations
        return {}


def _faults(what: str, option: str, annotation: Any, value: Any) -> Iterator[str]:
    """Sentences on why an option cannot have a value. It is checked as JSON, in which a list may be
    a tuple and a text a Path. For a reward within a reward, the inner sentence is enough."""
    try:
        TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except (PydanticUserError, TypeError):
        return
    except ValidationError as error:
        for fault in error.errors():
            key = ".".join(map(str, (option, *fault["loc"])))
            text = str(fault.get("ctx", {}).get("error", fault["msg"])).rstrip(".")
            seen = "" if isinstance(fault["input"], Mapping) else f" is {fault['input']!r}"
            yield f"`{key}` of {what}{seen}: {text}."
