"""Ending early: SIGINT, SIGTERM and SIGUSR1, and the clock of a queue.

SIGTERM comes from `docker stop`, from Slurm at the end of a job's time and from torchrun. SIGUSR1
is what Slurm is told to send some time before (`scripts/slurm/`).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

UNFINISHED = 75  # EX_TEMPFAIL of sysexits.h: not finished, start the same command again
CODES = {  # exit statuses; a shell reports a process that a signal ended by 128 + its number
    signal.SIGINT: 128 + signal.SIGINT,
    signal.SIGTERM: 128 + signal.SIGTERM,
}
if sys.platform != "win32":
    CODES[signal.SIGUSR1] = UNFINISHED
ECHO = 1.0  # seconds in which a signal that comes again is the same request: launchers repeat it


class Interrupted(KeyboardInterrupt):
    """A command must end early. str() is the reason: "SIGTERM", "train.max_minutes".

    code: the exit status. note: what was saved and how to go on; None if nobody has said, "" if
    another process says it.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code
        self.note: str | None = None

    @staticmethod
    def by(number: int) -> Interrupted:
        return Interrupted(signal.Signals(number).name, CODES[signal.Signals(number)])


@dataclass(frozen=True)
class Clock:
    """The time limit of a command. began: time.monotonic() at its start; minutes: None = no limit.
    name: the key of the config that sets the limit."""

    began: float
    minutes: float | None = None
    name: str = "train.max_minutes"

    def over(self, seconds: float) -> bool:
        """Whether so many seconds of work would pass the limit."""
        if self.minutes is None:
            return False
        return time.monotonic() + seconds > self.began + 60 * self.minutes


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal raise Interrupted in the main thread anywhere inside the `with`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted.by(number)

    before = _handle(stop)
    try:
        yield
    finally:
        _restore(before)


class Requests:
    """Requests to end a run early, inside its `with`.

    One process raises Interrupted at once, or at the end of an `uninterrupted` block. Several
    processes wait until all are at a `stop_point`: then all raise it, whichever got the signal. A
    second signal, more than ECHO seconds after the first, raises it at once, wherever the process
    is.

    gather: {what this process has} -> that of all processes, in their order; None for one process.
    """

    def __init__(self, gather: Callable[[list[Any]], list[Any]] | None, clock: Clock) -> None:
        self.gather = gather
        self.clock = clock
        self.agreed = False  # all processes are leaving
        self._first: tuple[int, float] | None = None  # the signal, and when it came
        self._depth = 0  # of `uninterrupted` blocks
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Requests:
        self._first = None
        self._before = _handle(self._stop)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.agreed:  # a launcher that sees the first of us leave sends SIGTERM to the others
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)
            return
        _restore(self._before)
        if error is None and self._first:  # it came after the last stop point
            raise Interrupted.by(self._first[0])

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Around work that is done completely or not at all: a signal takes effect at its end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._first and self.gather is None and not self._depth:
            raise Interrupted.by(self._first[0])

    def stop_point(self, seconds: float | None = None) -> None:
        """A place where a run can end, which all processes reach. Raises Interrupted after a
        signal, or if the next `seconds` of work would pass the clock's limit (None = no limit)."""
        clock = self.clock
        request: tuple[str, int] | None = None  # why, and the exit status
        if self._first:
            interruption = Interrupted.by(self._first[0])
            request = str(interruption), interruption.code
        elif seconds is not None and clock.over(seconds):
            request = f"{clock.name} = {clock.minutes:g}", UNFINISHED
        everyone: list[Any] = self.gather([request]) if self.gather else [request]
        for reason, code in filter(None, everyone):
            self.agreed = self.gather is not None
            raise Interrupted(reason, code)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            if self.gather is None and not self._depth:
                raise Interrupted.by(number)
        elif now - self._first[1] > ECHO:
            raise Interrupted.by(number)


def _handle(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Set a handler for all our signals; returns the handlers from before. An ignored signal stays
    ignored, as SIGINT is in a background job."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # only the main thread is interrupted, and only it may set a handler
    before = {number: signal.getsignal(number) for number in CODES}
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    return before


def _restore(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
