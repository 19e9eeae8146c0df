"""One run at a time in an output folder.

The operating system's lock on `.lock` (by filelock) ends with the process that holds it, however it
ends. Some network file systems keep such locks on each machine for itself, or have none. So
`.lock.json` says who holds the folder, and its time of change is the holder's sign of life.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import psutil

from flowalign.config import ConfigError
from flowalign.system.files import replacing
from flowalign.training.report.status import BEAT, SILENCE
from flowalign.training.run import disk

LOCK = ".lock"
OWNER = ".lock.json"


@dataclass(frozen=True)
class Owner:
    """Who holds a folder. Times are Unix times; `started` tells a process from a later one with its
    number."""

    host: str
    pid: int
    started: float
    since: float

    @staticmethod
    def here() -> Owner:
        """This process."""
        process = psutil.Process()
        return Owner(socket.gethostname(), process.pid, process.create_time(), time.time())

    def lives(self, silence: float) -> bool:
        """Whether the process still runs. silence: seconds since its last sign of life, which tells
        for one on another machine."""
        if self.host != socket.gethostname():
            return silence <= SILENCE
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True


def check(folder: str | Path) -> None:
    """ConfigError if another process holds the folder, or nothing can be written there. It is left
    as it is."""
    folder = Path(folder)
    disk.check_writable(folder)
    owner = _owner(folder)
    if owner is None or owner == _own(owner) or not owner.lives(_silence(folder)):
        return
    raise _refused(folder, owner)


@contextmanager
def holding(folder: str | Path, active: bool = True) -> Iterator[None]:
    """Hold a folder inside the `with`; ConfigError if another process, or this one, does already.

    Its files go at the end, and a folder that is empty then. active: whether this process holds it,
    of several that share the work.
    """
    if not active:
        yield
        return
    folder = Path(folder)
    disk.check_writable(folder)  # mkdir's own errors say less
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise _refused(folder, _owner(folder)) from None
    except (OSError, NotImplementedError):  # no locks on this file system: the owner's file decides
        pass
    over = threading.Event()
    try:
        check(folder)  # where locks do not reach another machine
        owner = Owner.here()
        with replacing(folder / OWNER) as part:
            part.write_text(json.dumps(asdict(owner)))
        beat = threading.Thread(target=_beat, args=(folder / OWNER, over), daemon=True)
        beat.start()
        try:
            yield
        finally:
            over.set()
            beat.join()
            if _owner(folder) == owner:  # else it was deleted, and another run has begun
                with suppress(OSError):
                    (folder / OWNER).unlink()
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)  # while it is ours; filelock notices
            for path in made:  # of a run that was refused, and left nothing
                path.rmdir()
        lock.release()


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with suppress(OSError):
            os.utime(path)


def _own(owner: Owner) -> Owner:
    """This process, with the time at which that owner began."""
    here = Owner.here()
    return Owner(here.host, here.pid, here.started, owner.since)


def _owner(folder: Path) -> Owner | None:
    """Who wrote the owner's file; None if there is none, or none that can be read."""
    try:
        said = json.loads((folder / OWNER).read_text())
        pid, since = int(said["pid"]), float(said["since"])
        time.localtime(since)
        psutil.pid_exists(pid)
        return Owner(str(said["host"]), pid, float(said["started"]), since)
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _silence(folder: Path) -> float:
    with suppress(OSError):
        return time.time() - (folder / OWNER).stat().st_mtime
    return float("inf")


def _refused(folder: Path, owner: Owner | None) -> ConfigError:
    if owner is None:  # it is about to write its name
        return ConfigError([f"output: another process has just begun to use {folder}."])
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    far = owner.host != socket.gethostname()
    hint = f" If that run is over, delete {folder / OWNER}." if far else ""
    return ConfigError(
        [
            f"output: {folder} is in use by process {owner.pid} on {owner.host} since {since}. "
            f"Wait until it ends, or choose another `output`.{hint}"
        ]
    )
