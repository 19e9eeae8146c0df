"""Findings of the doctor, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from rich.console import Console

from flowalign.system.escape import harmless
from flowalign.types import Problem

ok, note, fault = (partial(Problem, level=level) for level in ("ok", "note", "fault"))


def healthy(problems: Iterable[Problem]) -> bool:
    return all(problem.level in ("ok", "note") for problem in problems)


def print_findings(problems: Iterable[Problem]) -> None:
    console = Console(highlight=False)
    for problem in problems:
        level = "fault" if problem.level == "refuse" else problem.level
        console.print(harmless(f"{level:>6}  {problem}"), markup=False, soft_wrap=True)
