"""One run at a time in an output folder.

The operating system's lock on `.lock` (by filelock) ends with the process that holds it, however it
ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from flowalign.config import ConfigError
from flowalign.system.folder import RunFolder
from flowalign.types import Problem

log = logging.getLogger("flowalign")


def unwritable(run: str | Path) -> Path | None:
    """The first path that this process cannot write but a run must: its folder, the parent that it
    would be created in, a folder inside it, or a log. None = all are writable."""
    folder = RunFolder(run)
    run = folder.path
    folders = [next(path for path in (run, *run.parents) if os.path.lexists(path))]
    roots = [folder.adapter, folder.checkpoints, folder.images, folder.samples]
    for root in filter(os.path.lexists, [*roots, folder.tensorboard, folder.wandb]):
        folders.append(root)
        for parent, names, _ in os.walk(root):
            folders += [Path(parent, name) for name in names]
    for folder in folders:
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            return folder
    return next((file for file in run.glob("*.jsonl") if not os.access(file, os.W_OK)), None)


def check_free(folder: str | Path) -> None:
    """Raise ConfigError if another process holds the folder, or it is not writable. The folder is
    not changed."""
    with holding(folder):
        pass


@contextmanager
def holding(folder: str | Path, active: bool = True) -> Iterator[None]:
    """Hold a folder inside the `with`. Raises ConfigError if this or another process already holds
    it, or if it is not writable.

    The lock's file is removed at the end, and so is the folder if it is then empty. active: whether
    this one of the processes that share the work holds the lock.
    """
    if not active:
        yield
        return
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it belongs to another user, or is read-only")
        lock = _acquire(folder)
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}. Choose another `output`."
        raise ConfigError([Problem("output", text)]) from None
    try:
        yield
    finally:
        with suppress(OSError):
            RunFolder(folder).lock.unlink(missing_ok=True)  # while it is ours; filelock notices
            for path in made:  # empty folders of a refused run
                path.rmdir()
        lock.release()


def _acquire(folder: Path) -> filelock.BaseFileLock:
    """The acquired lock of a folder; no lock is held if the file system has no locks."""
    lock = filelock.FileLock(RunFolder(folder).lock, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        text = f"{folder} is in use by another run. Wait until it ends, or choose another."
        raise ConfigError([Problem("output", text)]) from None
    except (OSError, NotImplementedError) as error:
        log.warning("%s cannot be locked (%s): start no second run there", folder, error)
    return lock
