"""One run at a time in an output folder.

The operating system's lock on `.lock` (by filelock) ends with the process that holds it, however it
ends. `.lock.json` beside it says who holds the folder, for the message to the second one.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from flowalign.config import ConfigError
from flowalign.system.files import replacing

LOCK = ".lock"
OWNER = ".lock.json"

log = logging.getLogger("flowalign")


def check_writable(folder: Path) -> None:
    """ConfigError if no file can be written into a folder, which need not be there yet. Nothing is
    left behind."""
    parent = folder.absolute()
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        seen = "it is a file" if parent.is_file() else error.strerror or error
        text = f"output: {folder}: nothing can be written in {parent}: {seen}."
        raise ConfigError([f"{text} Choose another `output`."]) from None


def check_free(folder: str | Path) -> None:
    """ConfigError if another process holds the folder, or nothing can be written there. It is left
    as it is."""
    folder = Path(folder)
    check_writable(folder)
    if (folder / LOCK).exists():
        _acquire(folder).release()


@contextmanager
def holding(folder: str | Path, active: bool = True) -> Iterator[None]:
    """Hold a folder inside the `with`; ConfigError if another process, or this one, does already.

    The lock's files go at the end, and a folder that is empty then. active: whether this process
    holds it, of several that share the work.
    """
    if not active:
        yield
        return
    folder = Path(folder)
    check_writable(folder)  # mkdir's own errors say less
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = _acquire(folder)
    try:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        with replacing(folder / OWNER) as part:
            part.write_text(json.dumps(owner))
        yield
    finally:
        with suppress(OSError):
            (folder / OWNER).unlink(missing_ok=True)
            (folder / LOCK).unlink(missing_ok=True)  # while it is ours; filelock notices
            for path in made:  # of a run that was refused, and left nothing
                path.rmdir()
        lock.release()


def _acquire(folder: Path) -> filelock.BaseFileLock:
    """The lock of a folder, held; without it where the file system has no locks."""
    lock = filelock.FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ConfigError([f"output: {folder} is in use by {_owner(folder)}."]) from None
    except (OSError, NotImplementedError) as error:
        log.warning("%s cannot be locked (%s): start no second run there", folder, error)
    return lock


def _owner(folder: Path) -> str:
    """Who holds a folder, and what to do about it."""
    try:
        owner = json.loads((folder / OWNER).read_text())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
        name = f"process {owner['pid']} on {owner['host']} since {since}"
    except (OSError, ValueError, TypeError, KeyError, OverflowError):  # not written yet
        name = "another process"
    return f"{name}. Wait until it ends, or choose another `output`"
