"""Addresses on the Hugging Face Hub. Light: rewards check their options with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

_NAME = r"[A-Za-z0-9_][\w.-]*"
_REPOSITORY = rf"(?P<repository>{_NAME}/{_NAME})"
_REVISION = rf"@(?P<revision>refs/(?:pr|convert)/{_NAME}|{_NAME})"
_PART = r"/(?!\.)[^/@\x00-\x1f]+"  # of a path; names of files may have spaces
_FOLDER = re.compile(rf"{_REPOSITORY}(?:{_REVISION}(?P<path>(?:{_PART})*))?")
_WEIGHTS = re.compile(rf"{_REPOSITORY}(?P<path>(?:{_PART})*{_PART}\.safetensors)(?P<revision>$)")
_FILE = re.compile(rf"{_REPOSITORY}(?P<path>(?:/[^/@]+)+)(?:@(?P<revision>.+))?")
_PAGE = re.compile(
    r"https://(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:/(?:tree|blob|resolve)/([^?#]+))?/?"
    r"(?:[?#].*)?"
)


@dataclass(frozen=True)
class HubAddress:
    """A place on the Hub: a repository, a revision (None = main), a path in it ("" = all)."""

    repository: str
    revision: str | None = None
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> HubAddress | None:
        """Of `owner/name[@revision[/path]]`, `owner/name/path/to/FILE.safetensors`, or the address
        of a page of the Hub for one of them; None for any other text."""
        if page := _PAGE.fullmatch(text):
            repository, place = page.groups()
            text = f"{repository}@{unquote(place).rstrip('/')}" if place else repository
        return cls._of(_FOLDER.fullmatch(text) or _WEIGHTS.fullmatch(text))

    @classmethod
    def parse_file(cls, text: str) -> HubAddress | None:
        """Of `owner/name/path/to/file[@revision]`; None for any other text."""
        return cls._of(_FILE.fullmatch(text))

    @classmethod
    def _of(cls, match: re.Match[str] | None) -> HubAddress | None:
        return match and cls(
            match["repository"], match["revision"] or None, (match["path"] or "").removeprefix("/")
        )
