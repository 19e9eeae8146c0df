"""A finding of the doctor, and how findings are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from flowalign.system.escape import harmless


@dataclass(frozen=True)
class Finding:
    """One check's result: "ok", "note" (may be intended) or "fault" (training would suffer)."""

    level: str
    text: str


ok, note, fault = (partial(Finding, level) for level in ("ok", "note", "fault"))


def healthy(findings: Iterable[Finding]) -> bool:
    return not any(finding.level == "fault" for finding in findings)


def show(findings: Iterable[Finding]) -> None:
    console = Console(highlight=False)
    for finding in findings:
        text = harmless(f"{finding.level:>6}  {finding.text}")
        console.print(text, markup=False, soft_wrap=True)
