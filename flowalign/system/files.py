"""Files and folders that appear complete, by one rename; and logs, which grow."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

P = TypeVar("P", bound=str | Path)


def expanded(path: P) -> P:
    """A path with the home folder for ~ or ~user at its start; other texts, such as Hub ids, as
    they are. Raises ValueError for an unknown user, and for a variable: a config means the same to
    everyone who runs it, and to all processes."""
    text = os.path.expanduser(path)
    if re.search(r"^~|\$\{?[A-Za-z_]", text):
        seen = "no such user" if text[0] == "~" else "variables are not read here"
        raise ValueError(f"{text!r}: {seen}. Write the path out; unquoted, a shell does it.")
    return type(path)(text)


def by_number(path: Path) -> list[str | int]:
    """The sort key of a path whose numbers are numbers: 2 is before 10."""
    parts: list[str | int] = [*re.split("([0-9]+)", str(path))]
    parts[1::2] = map(int, parts[1::2])  # so text is compared with text
    return parts


@contextmanager
def replacing(path: str | Path, *, durable: bool = False, swap: bool = False) -> Iterator[Path]:
    """A path to write a file or a folder to. When the block ends, it becomes `path` by one rename.

    A killed process leaves the old file or none, never half of one. If the block raises, what it
    wrote is removed and `path` stays as it was. The folder of `path` is made if it is missing. A
    folder can take the place of nothing or of an empty folder only (OSError otherwise).

    swap: it can take the place of any. The old one is renamed first, so that a kill between the two
    leaves neither: for a folder that can be made again.

    durable: when this returns, `path` survives a power cut: its bytes and its name are on the disk
    itself (`flush`). That costs milliseconds, so it is for what cannot be made again.

        with replacing(folder / "results.json") as part:
            part.write_text(text)
    """
    path = expanded(Path(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # a unique name: processes of several machines may write the same file of a shared disk
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield part
        if durable:
            flush(part)
        old = part.with_suffix(".old")
        if swap and path.exists():
            os.replace(path, old)
        os.replace(part, path)
        if durable:
            _flush_names(path.parent)
        if old.exists():
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
        raise


# What `replacing` writes to, and an old checkpoint that is being removed.
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{12}\.(part|old)|\.update_\d+")


def remove_leftovers(folder: str | Path) -> None:
    """Remove unfinished files of killed processes in a folder and below it (`replacing`). For a run
    at its start, in its own folder, where no other process writes."""
    for parent, folders, names in os.walk(folder):
        for name in filter(LEFTOVER.fullmatch, folders):
            shutil.rmtree(Path(parent, name), ignore_errors=True)
        for path in (Path(parent, name) for name in names if LEFTOVER.fullmatch(name)):
            path.unlink(missing_ok=True)


FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or the user's share of it


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or its cause, says that the disk is full."""
    cause: BaseException | None = error
    while cause and getattr(cause, "errno", None) not in FULL:
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def append(path: Path, text: str) -> None:
    """Add a text to a file: all of it or, if the disk is full, nothing."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        left = memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            os.truncate(path, size)
            raise


def flush(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk itself."""
    if path.is_dir():
        for inner in path.iterdir():
            flush(inner)
        _flush_names(path)
        return
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _flush_names(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Some file systems cannot do this; they keep
    their own order."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file that may be growing; [] if it is not there. Lines that are no
    JSON object, such as a last one that is cut short, are left out."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def to_json(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
