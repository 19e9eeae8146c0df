"""What a run tells, and the form of those who listen."""

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
    """Raised by a listener: the run ends before anything is learnt of this rollout. Its text says
    why, and what to do."""


@dataclass(frozen=True)
class Learned:
    """An update. prepared: None where a number was not finite. values: its row of the log."""

    rollout: Rollout
    prepared: Prepared | None
    values: Mapping[str, float]


class Listener:
    """Hears what a run does, on every process; an event that it does not override is nothing to it.

    Listeners are told in the order of `flowalign.commands.build.listeners`. update: rollouts that
    were learnt from. key: of its state in a checkpoint, if it has one.
    """

    key = ""

    @property
    def main(self) -> bool:
        """Whether this is the main process, which alone writes."""
        return PartialState().is_main_process

    def began(self, update: int) -> None:
        """The run starts, or goes on."""

    def rollout(self, update: int, rollout: Rollout) -> Mapping[str, float]:
        """A rollout was sampled; returns figures for its row of the log. May raise Stop, on all
        processes alike."""
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
        """Go on from a state. comparable: whether the rewards are still those of that time."""


def warn(update: int, texts: Iterable[str]) -> None:
    """Warn of something after an update; the main process does."""
    if PartialState().is_main_process:
        for text in texts:
            log.warning("update %d: %s", update, text)
