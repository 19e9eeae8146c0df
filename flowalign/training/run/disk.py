"""Whether an output folder can be written, and whether the disk has room for a run."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowalign.config import ConfigError

log = logging.getLogger("flowalign")

FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or the user's share of it


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room left, itself or what caused it. The errors of
    safetensors and of other processes have only the system's text."""
    cause: BaseException | None = error
    while cause is not None:
        texts = (os.strerror(number) for number in FULL)
        if getattr(cause, "errno", None) in FULL or any(text in str(cause) for text in texts):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_writable(folder: str | Path) -> None:
    """ConfigError if no file can be written into a folder, which need not be there yet. Nothing is
    left behind."""
    place = existing(Path(folder))
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        seen = "it is a file" if place.is_file() else error.strerror or error
        text = f"output: {folder}: nothing can be written in {place}: {seen}."
        raise ConfigError([f"{text} Choose another `output`."]) from None


class Spare:
    """Writes that a run can do without. Where the disk is full, they are left out after one warning
    if `without`, else the error is raised."""

    def __init__(self, folder: Path, without: bool) -> None:
        self.folder, self.without, self.warned = folder, without, False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around such a write, which leaves nothing or what was there before if it fails."""
        try:
            yield
        except Exception as error:
            if not (self.without and is_full(error)):
                raise
            if not self.warned:
                log.warning(
                    "the disk of %s is full (%s). The run goes on without checkpoints, rows of its "
                    "log and samples until there is room, as train.disk_full says.",
                    self.folder, error,
                )  # fmt: skip
            self.warned = True
