"""manifest.json: what a folder held when it was finished, so that damage is seen before it is used.

A checkpoint, an adapter and a finished stage have one. It tells damage, not malice: whoever can
write the folder can write its manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.system import files

MANIFEST = "manifest.json"
FORMAT = 1


class Damaged(ValueError):
    """A folder that differs from its manifest, or has none; the text says what is wrong."""


class Foreign(Damaged):
    """A folder without a manifest of ours: none, or another program's file of that name."""


@dataclass(frozen=True)
class Manifest:
    """files: {path below the folder, with slashes: (bytes, SHA-256)}. about: what the folder
    depends on, as JSON."""

    files: Mapping[str, tuple[int, str]]
    about: Mapping[str, Any]


def write_manifest(
    folder: str | Path,
    about: Mapping[str, Any],
    names: Iterable[str] | None = None,
    *,
    file: str = MANIFEST,
) -> None:
    """Write the manifest of a folder, after its files are on the disk itself.

    names: the files that it lists, below the folder; None = all. file: the name of the manifest,
    where a folder has several.
    """
    folder = Path(folder)
    if names is None:
        paths = (path for path in folder.rglob("*") if path.is_file() and path != folder / file)
        names = (path.relative_to(folder).as_posix() for path in paths)
    listed = {}
    for name in sorted(names):
        path = folder / name
        files.flush(path)
        listed[name] = (path.stat().st_size, file_sha256(path))
    content = {"format": FORMAT, "files": listed, "about": dict(about)}
    with files.replacing(folder / file, durable=True) as part:
        part.write_text(json.dumps({"sha256": json_sha256(content), **content}, indent=1))


def read_manifest(folder: str | Path, *, file: str = MANIFEST) -> Manifest:
    """The manifest of a folder; the files are not read. Raises Damaged if it is missing or
    broken."""
    try:
        content = json.loads((Path(folder) / file).read_bytes())
        if isinstance(content, dict) and not content.keys() & {"sha256", "format", "files"}:
            raise Foreign(f"{MANIFEST} is another program's")
        if content.pop("sha256") != json_sha256(content):
            raise Damaged(f"{file} does not have the SHA-256 that it says")
        if content["format"] != FORMAT:
            raise Damaged(f"{file} has format {content['format']!r}; want {FORMAT}")
        listed = {name: (size, sha256) for name, (size, sha256) in content["files"].items()}
        return Manifest(listed, content["about"])
    except FileNotFoundError:
        raise Foreign(f"{MANIFEST} is missing") from None
    except Damaged:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{file} cannot be read ({error})") from None


def check_manifest(
    folder: str | Path, names: Collection[str] | None = None, *, file: str = MANIFEST
) -> Manifest:
    """The manifest of a folder, after a check of its files. Raises Damaged, which says what is
    wrong.

    Files that the manifest does not name are not looked at. names: look at no others (None = all).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise Damaged("it is no folder")
    manifest = read_manifest(folder, file=file)
    for name, (size, sha256) in manifest.files.items():
        if names is not None and name not in names:
            continue
        try:
            now = (folder / name).stat().st_size
            if now != size:
                raise Damaged(f"{name} has {now} bytes, and had {size}")
            if file_sha256(folder / name) != sha256:
                raise Damaged(f"{name} has changed: its SHA-256 differs")
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
    return manifest


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def json_sha256(content: Any) -> str:
    """SHA-256 of a value for JSON; what JSON does not have is its text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
