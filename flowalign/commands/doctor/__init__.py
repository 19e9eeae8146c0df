"""`flowalign doctor`: what is wrong with a run or a reward, before training starts.

`--reward NAME` examines a reward (`reward`). `--config FILE` examines a run: what `train` would
refuse (`recipe.examine`), its config and files (`plan`), its memory and time (`predictions`) and,
where the model is on this machine, a few images of it (`live`).
docs/doctor.md explains each finding.
"""

from __future__ import annotations

from flowalign.commands.doctor.command import main
from flowalign.commands.doctor.reward import diagnose

__all__ = ["diagnose", "main"]
