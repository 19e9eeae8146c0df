"""The events of a run, and the interface of its listeners."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState

from flowalign.training.algorithm import Prepared
from flowalign.training.evaluations import Evaluation
from flowalign.types import Rollout

log = logging.getLogger("flowalign")


class Stop(Exception):
    """Raised by a listener to end the run before this rollout is learnt from. Its text says why,
    and what to do."""


@dataclass(frozen=True)
class Learned:
    """An update. prepared: None where a number was not finite. values: its row of the log."""

    rollout: Rollout
    prepared: Prepared | None
    values: Mapping[str, float]


class Listener:
    """Receives the events of a run, on every process. By default events are ignored.

    Listeners are called in the order of `flowalign.commands.build.listeners`. update: rollouts that
    were learnt from. key: the key of its state in a checkpoint, if it has state.
    """

    key = ""

    @property
    def main(self) -> bool:
        """Whether this is the main process, which alone writes."""
        return PartialState().is_main_process

    def began(self, update: int) -> None:
        """The run starts or resumes."""

    def rollout(self, update: int, rollout: Rollout) -> Mapping[str, float]:
        """A rollout was sampled; returns figures for its row of the log. May raise Stop, on all
        processes."""
        return {}

    def learned(self, update: int, learned: Learned) -> None:
        """The optimizer steps of a rollout are done."""

    def evaluated(self, update: int, evaluation: Evaluation) -> None:
        """An evaluation was taken, and its adapter kept if it is the best."""

    def stopped(self, update: int) -> None:
        """A listener has raised Stop, and a checkpoint is written."""

    def state(self) -> Mapping[str, Any]:
        """What a resumed run needs; NaN and infinity become null."""
        return {}

    def load(self, state: Mapping[str, Any], comparable: bool = True) -> None:
        """Restore a state. comparable: whether the rewards are unchanged since it was saved."""


def warn(update: int, texts: Iterable[str]) -> None:
    """Log warnings about an update, on the main process."""
    if PartialState().is_main_process:
        for text in texts:
            log.warning("update %d: %s", update, text)
