"""Addresses on the Hugging Face Hub. Light: rewards check their options with it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = r"[A-Za-z0-9_][\w.-]*"
_REPOSITORY = rf"(?P<repository>{_NAME}/{_NAME})"
_REVISION = rf"@(?P<revision>refs/(?:pr|convert)/{_NAME}|{_NAME})"
_FOLDER = re.compile(rf"{_REPOSITORY}(?:{_REVISION}(?P<path>(?:/{_NAME})*))?")
_FILE = re.compile(rf"{_REPOSITORY}(?P<path>(?:/[^/@]+)+)(?:@(?P<revision>.+))?")


@dataclass(frozen=True)
class HubAddress:
    """A place on the Hub: a repository, a revision (None = main), a path in it ("" = all)."""

    repository: str
    revision: str | None = None
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> HubAddress | None:
        """Of `owner/name[@revision[/folder]]`; None for any other text."""
        return cls._of(_FOLDER.fullmatch(text))

    @classmethod
    def parse_file(cls, text: str) -> HubAddress | None:
        """Of `owner/name/path/to/file[@revision]`; None for any other text."""
        return cls._of(_FILE.fullmatch(text))

    @classmethod
    def _of(cls, match: re.Match[str] | None) -> HubAddress | None:
        return match and cls(
            match["repository"], match["revision"], (match["path"] or "").removeprefix("/")
        )
