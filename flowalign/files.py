"""Files that appear whole: written beside their place, then renamed into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write a file or a folder to; it becomes `path` by one rename.

    The rename happens when the block ends without an error, so that a killed process leaves the old
    file or none, never half of one. A file of an interrupted block is removed.

        with replacing(folder / "results.json") as part:
            part.write_text(text)
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # the process id: two processes that write the same file do not write the same part
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        if part.is_file():
            part.unlink()
