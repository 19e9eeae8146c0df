"""Options of rewards and detectors: declared once, in a signature, and checked by pydantic.

The annotation of a parameter says what is possible: a type, with a range or a check in `Annotated`.

    def __init__(self, model: str, *, batch_size: Count = 64, device: Device = None) -> None:

Nothing here loads a model.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainValidator,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from flowalign.system.hub_address import HubAddress

Class = TypeVar("Class", bound=type)
PLAIN = (Any, bool, int, float, str, NoneType)
CONTAINERS = (Union, UnionType, list, dict, Sequence, Mapping)


def _device(value: Any) -> Any:
    try:
        torch.device(value or "cpu")
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"use cpu, cuda, cuda:1 and the like, or leave it out ({str(error).splitlines()[0]})."
        ) from error
    return value


Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Divisor = Annotated[float, Field(gt=0, allow_inf_nan=False, description="it divides the score")]
Device = Annotated[str | torch.device | None, PlainValidator(_device)]
OpenClip = Annotated[
    str, Field(min_length=1, description="open_clip's name of a model, such as ViT-L-14")
]
TextCache = Annotated[int, Field(ge=0, description="how many prompts to keep, 0 for none")]


def pretrained(possible: str, *names: str) -> AfterValidator:
    """For `Annotated[str, ...]`: the folder of a pretrained model, a Hub id, or one of the names.

    possible: what the option takes, for the message.
    """

    def check(name: str) -> str:
        folder = Path(name).expanduser()
        if name in names:
            return name
        if folder.is_dir() and not any(folder.glob("*config.json")):
            raise ValueError(f"folder {folder} holds no config.json. Give {possible}.")
        if not folder.is_dir() and HubAddress.parse(name) != HubAddress(name):
            raise ValueError(f"there is no such folder, and it is no Hub id. Give {possible}.")
        return name

    return AfterValidator(check)


def check_call(
    what: str, function: Callable[..., Any], options: Mapping[str, Any], inputs: int = 0
) -> None:
    """Raise ValueError, naming every fault, if a function or class does not take these options.

    Types are strict: "3" and true are no numbers. Only annotations of what YAML can hold are
    checked, and those with a pydantic validator; of any other (a Path, a tuple, a class of the
    user's) the function itself must judge. Then its static method `check_options(**options)` is
    asked, if it has one, for what concerns several options at once.
    what: for the message, such as "reward 'ocr'". inputs: parameters that are no options.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[inputs:]
    except ValueError:  # a builtin without a signature: its own error must do
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    annotations = _annotations(function)
    needed = [name for name, p in takes.items() if p.default is p.empty and name not in options]
    faults = []
    if needed:
        missing = ", ".join(f"`{name}`" for name in needed)
        faults.append(f"{what} cannot be built without {missing}; it takes {list(takes)}. Add it.")
    for name, value in options.items():
        if name in takes:
            if value is not takes[name].default:
                faults += _faults(what, name, annotations.get(name, Any), value)
        elif not takes_any:
            faults.append(
                f"{what} has no option {name!r}{suggestion(name, takes)}; it takes "
                f"{list(takes)}. Correct the name or leave it out."
            )
    if faults:
        raise ValueError("\n".join(faults))
    check_options = getattr(function, "check_options", None)
    if check_options is not None:
        check_options(**options)


def checked(owner: Class) -> Class:
    """Class decorator: the constructor checks its options before it does anything."""
    construct = owner.__init__
    names = list(inspect.signature(construct).parameters)[1:]

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **options: Any) -> None:
        check_call(owner.__name__, owner, dict(zip(names, args, strict=False)) | options)
        construct(self, *args, **options)

    owner.__init__ = init
    return owner


def makes(factory: Any, inputs: int) -> bool:
    """Whether what it makes can be called with so many values, without calling it: it is a class
    with such a `__call__`, or a function whose annotation promises an object of such a class."""
    if inspect.isclass(factory):
        calls = [vars(base)["__call__"] for base in factory.__mro__ if "__call__" in vars(base)]
        try:
            inspect.signature(calls[0]).bind(*range(1 + inputs))
        except (IndexError, TypeError, ValueError):  # none, another one, or one without a signature
            return False
        return True
    try:
        promised = get_type_hints(factory).get("return")
    except Exception:  # names that exist for a type checker only, or an object without annotations
        promised = None
    return inspect.isclass(promised) and makes(promised, inputs)


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that pydantic can judge, by parameter."""
    target = function.__init__ if inspect.isclass(function) else function
    try:
        hints = get_type_hints(target, include_extras=True)
    except Exception:  # names that exist for a type checker only, or an object without annotations
        return {}
    return {name: hint for name, hint in hints.items() if _is_plain(hint)}


def _is_plain(annotation: Any) -> bool:
    """Is it made of what YAML can hold, or does it bring its own validator?"""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        validated = any(isinstance(extra, PlainValidator) for extra in arguments[1:])
        return validated or _is_plain(arguments[0])
    if origin in CONTAINERS:
        return all(map(_is_plain, arguments))
    model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return origin is Literal or model or annotation in PLAIN


def _faults(what: str, option: str, annotation: Any, value: Any) -> list[str]:
    """What pydantic has against a value: where it is, what was seen, what is possible."""
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except PydanticUserError:  # a stranger's annotation that pydantic cannot read
        return []
    except ValidationError as error:
        extras = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
        meaning = [e.description for e in extras if isinstance(e, FieldInfo) and e.description]
        members = [a for a in get_args(annotation) if a is not NoneType]
        if get_origin(annotation) in (Union, UnionType) and len(members) > 1:
            return [f"`{option}` of {what} is {value!r}; it should be {annotation}."]
        faults = []
        for detail in error.errors():
            where = ".".join(map(str, (option, *detail["loc"])))
            wanted = detail["msg"].replace("Input should", "it should")
            wanted = re.sub(r"dictionary( or instance of \w+)?", "mapping", wanted)
            wanted = {"extra_forbidden": "there is no such key", "missing": "it lacks the key"}.get(
                detail["type"], wanted
            )
            wanted = "".join([wanted, *(f" ({text})" for text in meaning), "."])
            if detail["type"] == "value_error":
                wanted = str(detail.get("ctx", {})["error"])
            faults.append(f"`{where}` of {what} is {detail['input']!r}; {wanted}")
        return faults
    return []
