"""What all sections share: the types of values, and a model that says what does not go together."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from flowalign.system import files


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[\w-]{1,60}", name):
        raise PydanticCustomError(
            "file_name",
            "letters, digits, _ and - only, at most 60, as it stands in file names and tables",
        )
    return name


def _path(text: str) -> str:
    if problem := files.impossible(text):
        raise PydanticCustomError("path", "a path; this one {problem}", {"problem": problem})
    return text


# The upper limits are far beyond any run. They keep a slip of the keyboard from filling the memory.
Count = Annotated[int, Field(ge=1, le=100_000)]
Many = Annotated[int, Field(ge=1, le=10_000_000)]  # of updates, prompts of a file
Steps = Annotated[int, Field(ge=1, le=10_000)]
Pixels = Annotated[int, Field(gt=0, le=8192, multiple_of=16)]  # the VAE's factor 8, patches of 2
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # 3 years; a timer of the system cannot hold more
Place = Annotated[str, AfterValidator(_path)]  # a file, a folder or a Hub id
LISTED = 200  # tasks, benchmarks, models, teachers, adapters or stages of one config
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
FileName = Annotated[str, AfterValidator(_file_name)]
# YAML has lists only, and a strict pydantic takes no list for a tuple.
as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)

MARKS = ("[fixed]", "[moving]", "[one]", "[several]")  # forms of a value in pydantic's errors
Size = tuple[int, int]  # height and width in pixels
Pair = Annotated[tuple[Pixels, Pixels], as_tuple]

RENAMED = {"train.mixed_precision": "model.dtype"}  # keys of past versions, and what they are now
REMOVED = {  # and those that have no successor, with what to do
    "train.disk_full": "a full disk always stops the run, with its last checkpoint. Leave it out."
}
ADAPTER = "pytorch_lora_weights.safetensors"  # what an adapter folder holds


class ConfigError(ValueError):
    """A config that cannot be run; `problems` holds one text for each place where it is wrong, and
    `lines` one for each thing that is: a file that is missing in many places is one line."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = list(problems)
        places: dict[str, list[str]] = {}  # by what is wrong there
        for problem in self.problems:
            place, colon, text = problem.partition(": ")
            places.setdefault(colon + text, []).append(place)
        self.lines = [_places(where) + text for text, where in places.items()]
        count = "1 problem" if len(self.lines) == 1 else f"{len(self.lines)} problems"
        super().__init__("\n  - ".join([f"{source}: {count}", *self.lines]))


def _places(names: Sequence[str]) -> str:
    shown, more = (names, 0) if len(names) <= 3 else (names[:2], len(names) - 2)
    return ", ".join(shown) + (f" and {more} more places" if more else "")


def close_to(word: str, possible: Iterable[str], cutoff: float = 0.6) -> str | None:
    """What may have been meant, of the possible words; cutoff: similarity in 0..1 at least."""
    return next(iter(difflib.get_close_matches(word, possible, n=1, cutoff=cutoff)), None)


class Section(BaseModel):
    """A part of the config: frozen, no unknown keys, no silent conversion of types."""

    # strict: `steps: 2.5` or `guidance: yes` is a mistake, and must not become 2 or 1.0
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        """Values that are possible alone but not together: "key: what was seen, what to do", the
        key relative to this section."""
        yield from ()

    @model_validator(mode="after")
    def _refuse(self) -> Section:
        # One error for all problems, since pydantic stops at the first validator that raises.
        if problems := list(self.problems()):
            raise PydanticCustomError("problems", "{problems}", {"problems": problems})
        return self
