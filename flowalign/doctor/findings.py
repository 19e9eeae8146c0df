"""What a doctor finds, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at: "ok", "note" (may be meant so) or "fault" (training would suffer)."""

    level: str
    text: str


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether no fault is among them."""
    return not any(finding.level == "fault" for finding in findings)


def show(findings: Iterable[Finding]) -> None:
    """Print them, a line each."""
    from rich.console import Console

    console = Console(highlight=False)
    for finding in findings:
        console.print(f"{finding.level:>6}  {finding.text}", markup=False, soft_wrap=True)
