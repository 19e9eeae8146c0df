"""status.json and warnings.jsonl: the state of a run, in its folder, for `flowalign watch`."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flowalign.system.files import replacing, to_json

STATUS = "status.json"
WARNINGS = "warnings.jsonl"
BEAT = 15.0  # seconds between two signs of life
LONGEST = 4000  # characters of a warning
SILENCE = 180.0  # seconds without one after which a run counts as dead; shared disks lag


@dataclass(frozen=True)
class Status:
    """status.json. Times are Unix times, in seconds."""

    state: str = "running"  # or finished, stopped, interrupted
    began: float = 0.0
    heard: float = 0.0  # the last sign of life
    text: str = ""  # what it is at: the stage of a recipe
    reason: str = ""  # why it stopped
    update: int = 0
    total: int = 0
    seconds: float | None = None  # of an update, with its share of evaluations and checkpoints

    @property
    def left(self) -> float | None:
        """Seconds to the end; None if the speed is not known."""
        return None if self.seconds is None else self.seconds * (self.total - self.update)

    def silent(self, now: float) -> bool:
        """Whether it runs by its own account, and gave no sign of life for SILENCE seconds."""
        return self.state == "running" and now - self.heard > SILENCE


class Heartbeat:
    """Keeps the two files of a folder up to date while a run is in the `with`.

    The thread is a daemon and dies with the process: a killed run stays "running", and its last
    sign of life tells. A disk that is full does not end the run. active: whether this process is
    the one that keeps them.
    """

    def __init__(self, folder: Path, active: bool = True, **values: Any) -> None:
        self.folder, self.active = folder, active
        self.status = Status(began=time.time(), **values)
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._warnings = _Warnings(self)

    def __enter__(self) -> Heartbeat:
        if self.active:
            self.say()
            logging.getLogger("flowalign").addHandler(self._warnings)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.active:
            return
        logging.getLogger("flowalign").removeHandler(self._warnings)
        self._over.set()
        self._thread.join()  # its last word must not come after the end's
        if error is None:
            self.say(state="finished")
        elif isinstance(error, KeyboardInterrupt):
            self.say(state="interrupted", reason=str(error) or "Ctrl-C")
        else:
            self.say(state="stopped", reason=str(error) or type(error).__name__)

    def say(self, **values: Any) -> None:
        """Change fields of the status, and write it."""
        if not self.active:
            return
        with self._lock, suppress(OSError):
            self.status = replace(self.status, heard=time.time(), **values)
            with replacing(self.folder / STATUS) as part:
                part.write_text(json.dumps(to_json(asdict(self.status))))

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self.say()


class _Warnings(logging.Handler):
    """Appends what flowalign warns of, with its time and update: alarms, rewards that fail."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__(logging.WARNING)
        self.heartbeat = heartbeat

    def emit(self, record: logging.LogRecord) -> None:
        text, update = record.getMessage()[:LONGEST], self.heartbeat.status.update
        row = {"time": record.created, "update": update, "text": text}
        with suppress(OSError), open(self.heartbeat.folder / WARNINGS, "a") as file:
            file.write(json.dumps(row) + "\n")


def read_status(folder: Path) -> Status | None:
    """The status of the run in a folder; None if it has none that can be read."""
    try:
        return Status(**json.loads((folder / STATUS).read_text()))
    except (OSError, ValueError, TypeError):  # also of another version
        return None
