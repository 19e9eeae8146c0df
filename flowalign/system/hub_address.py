"""Addresses on the Hugging Face Hub, and URLs. Light: configs and rewards are checked with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
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
        """Read `owner/name[@revision[/path]]`, `owner/name/path/to/FILE.safetensors`, or the
        address of a page of the Hub for one of them; None for any other text."""
        if page := _PAGE.fullmatch(text):
            repository, place = page.groups()
            text = f"{repository}@{unquote(place).rstrip('/')}" if place else repository
        return cls._of(_FOLDER.fullmatch(text) or _WEIGHTS.fullmatch(text))

    @classmethod
    def parse_file(cls, text: str) -> HubAddress | None:
        """Read `owner/name/path/to/file[@revision]`; None for any other text."""
        return cls._of(_FILE.fullmatch(text))

    @classmethod
    def _of(cls, match: re.Match[str] | None) -> HubAddress | None:
        return match and cls(
            match["repository"], match["revision"] or None, (match["path"] or "").removeprefix("/")
        )


# `user@`, also with a / in the password (host:8000/ has none), and `?api_key=`
_SECRET = re.compile(
    r"://[^/\s?#]*@|://[^/\s:@]+:(?!\d+(/|$))\S*@"
    r"|(?i:://\S*[?&][\w-]*(key|token|passw|secret|signature|credential)[\w-]*=)"
)


def secrets(value: Any, place: str) -> Iterator[str]:
    """Messages about URLs with a user, a password or a token in a value for JSON: they name the
    place, without the URL."""
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in pairs:
            yield from secrets(inner, f"{place}.{key}".removeprefix("."))
    elif isinstance(value, str) and _SECRET.search(value):
        yield (
            f"{place}: a URL with a user, password or token in it, which logs and pages would "
            "show. Give the address alone; the rewards remote and vlm read a token from the "
            "environment (`token_env`)."
        )
