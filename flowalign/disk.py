"""Whether an output folder can be written, and whether the disk has room for a run."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from flowalign.config import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or the user's share of it


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room left, directly or by its cause. safetensors and
    torch.save raise errors of their own, with the system's text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        texts = [os.strerror(number) for number in FULL]
        if any(text in str(error) for text in texts):
            return True
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
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
