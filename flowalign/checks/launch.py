"""What all checks share: their arguments, and the message of an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowalign.config import Stage
from flowalign.training.inputs import Inputs
from flowalign.types import Problem


@dataclass(frozen=True)
class Launch:
    """How a run is started.

    processes: how many; any_world: another number may have written its checkpoints. resume: whether
    it is to continue what its folder holds; None = the folder is not looked at. trust: whether to
    run the code that the config names (`own_code`); without it, what needs that code is not
    checked. elsewhere: it is planned for another machine, so no GPU is looked for. pending: the
    adapters that earlier stages of a recipe write, each with its stage; None = that stage is not
    known. advise: whether to add the advice that the doctor gives.
    """

    processes: int = 1
    resume: bool | None = None
    any_world: bool = False
    trust: bool = True
    elsewhere: bool = False
    pending: Mapping[str, Stage | None] = field(default_factory=dict)
    advise: bool = False


LaunchCheck = Callable[[Any, Launch, Inputs], Iterator[Problem]]


def message(error: Exception) -> str:
    """The message of an error; str() of a KeyError would put it in quotes."""
    return str(error.args[0] if error.args else error)
