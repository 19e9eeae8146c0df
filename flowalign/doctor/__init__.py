"""`flowalign doctor`: what would go wrong, before the first hour is spent.

`--reward NAME` examines a reward (`reward`); `--config FILE` a run: its config and files (`plan`),
the memory and time that it will take (`budget`), and, where the model is at hand, a few images of
it (`live`). What each finding means: docs/doctor.md.
"""

from __future__ import annotations

from flowalign.doctor.command import main
from flowalign.doctor.reward import diagnose

__all__ = ["diagnose", "main"]
