"""The base of all sections: types of values, and a model with errors that say what to write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from flowalign.config.safe_yaml import inline_yaml
from flowalign.system.files import expanded
from flowalign.types import Problem

# The upper limits are far beyond any run. They keep a slip of the keyboard from filling the memory.
Count = Annotated[int, Field(ge=1, le=100_000)]
Many = Annotated[int, Field(ge=1, le=10_000_000)]  # of updates, prompts of a file
Steps = Annotated[int, Field(ge=1, le=10_000)]
Pixels = Annotated[int, Field(gt=0, le=8192, multiple_of=16)]  # the VAE's factor 8, patches of 2
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # 3 years; a timer of the system cannot hold more
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
FileName = Annotated[str, Field(pattern=r"^[\w-]{1,60}$")]  # part of file names and tables
Location = Annotated[str, AfterValidator(expanded)]  # a path, or the name of another source
# YAML has lists only, and a strict pydantic takes no list for a tuple.
as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
# Later layers of a config can only add to a mapping; null empties it.
null_is_empty = BeforeValidator(lambda value: {} if value is None else value)
Size = tuple[int, int]  # height and width in pixels

ADAPTER = "pytorch_lora_weights.safetensors"  # what an adapter folder holds


class ConfigError(ValueError):
    """A config that cannot be run; `problems` holds one for each place where it is wrong. A text
    becomes a problem without a key."""

    def __init__(self, problems: Sequence[Problem | str], source: str = "config") -> None:
        self.problems = [Problem("", p) if isinstance(p, str) else p for p in problems]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  - ".join([f"{source}: {count}", *map(str, problems)]))


def did_you_mean(
    word: object, possible: Iterable[str], quote: str = "'", cutoff: float = 0.5
) -> str:
    """A sentence that names the closest possible word; "" if none is close."""
    spelt = {name.lower(): name for name in possible}
    close = difflib.get_close_matches(str(word).lower(), spelt, n=1, cutoff=cutoff)
    close = [spelt[name] for name in close]
    return f" Did you mean {quote}{close[0]}{quote}?" if close else ""


class Section(BaseModel):
    """A part of the config: frozen, no unknown keys, no silent conversion of types."""

    # strict: `steps: 2.5` or `guidance: yes` is a mistake, and must not become 2 or 1.0
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )  # fmt: skip

    def problems(self) -> Iterator[Problem]:
        """Values that are possible alone but not together; keys are relative to this section."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: ModelWrapValidatorHandler[Section]) -> Section:
        """Errors of pydantic as sentences, all at once; those of inner sections are."""
        try:
            section = handler(data)
        except ValidationError as error:
            problems = [(d["loc"], cls._sentence(d), d["input"]) for d in error.errors()]
        else:
            problems = [((p.key,), p.text, data) for p in section.problems()]
        if problems:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    InitErrorDetails(
                        type=PydanticCustomError("explained", "{text}", {"text": text}),
                        loc=tuple(part for part in place if not str(part).startswith("[")),
                        input=value,
                    )  # pydantic marks a key of a mapping by [key], and we the form of a value
                    for place, text, value in problems
                ],
            )
        return section

    @classmethod
    def _sentence(cls, error: Any) -> str:
        kind, place, seen = error["type"], error["loc"], error["input"]
        fields = cls.model_fields
        name = str(place[0]) if place else ""
        if kind in ("explained", "value_error"):
            return error["msg"].removeprefix("Value error, ")
        if kind == "extra_forbidden":
            hint = did_you_mean(name, fields, "`")
            return f"unknown key.{hint} Possible keys: {', '.join(fields)}."
        example = _example(fields[name]) if name in fields and len(place) == 1 else ""
        if kind == "missing" and len(place) == 1:
            inner: Any = fields[name].annotation
            section = isinstance(inner, type) and issubclass(inner, Section)
            keys = f" with the keys {', '.join(inner.model_fields)}" if section else ""
            return f"missing. Add `{name}:`{keys}.{example}"
        wanted = re.sub(r"^\w+ should (be |have )?|valid | after validation", "", error["msg"])
        if kind.startswith("model_"):
            wanted = f"the keys {', '.join(fields)}"
        elif kind == "bool_type":
            wanted = "true or false"
        elif kind == "literal_error":
            example = did_you_mean(seen, re.findall(r"'(.*?)'", wanted))
        elif kind == "string_type" and isinstance(seen, int | float):
            example = f" Put it in quotes if it is meant as text.{example}"
        return f"got {shown_value(seen)}; want {wanted}.{example}"


def _example(field: Any) -> str:
    example = field.examples[0] if field.examples else field.default
    if (
        field.is_required()
        and not field.examples
        or example is None
        or isinstance(example, Section)
    ):
        return ""
    return f" For example: {inline_yaml(example)}."


def shown_value(value: Any) -> str:
    """A value for a message, with its kind, cut to a line."""
    kinds = {str: "text", int: "whole number", float: "number", bool: "true/false", list: "list"}
    if value is None:
        return "nothing (null)"
    value = list(value) if isinstance(value, tuple) else value
    return f"the {kinds.get(type(value), 'mapping')} {value!r:.80}"


def about(annotation: Any) -> str:
    """The first paragraph about the section that a key holds: one, a list, or several by name."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation.__doc__ or "").partition("\n\n")[0]
    return next(filter(None, map(about, get_args(annotation))), "")
