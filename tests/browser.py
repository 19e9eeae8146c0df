"""Pages in a real browser: Chromium without a window."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

needs_chromium = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


def dom(address: str, user: Path, width: int = 1280) -> str:
    """The page after its scripts ran, as HTML. user: a folder for the browser's own files; width:
    of the window in pixels (Chromium takes at least 500)."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    window = [f"--window-size={width},900", "--virtual-time-budget=8000", "--dump-dom"]
    command = ["chromium", *flags, *window, f"--user-data-dir={user / 'user'}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


class Page(HTMLParser):
    """The tags of a page with their attributes, its text, and the tags that are not closed."""

    VOID = ("meta", "img", "input", "wbr", "link", "br", "hr")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open[-1:] == [tag]:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def loaded(self) -> list[str]:
        """What a browser fetches by itself."""
        sources = ("script", "img", "iframe", "source", "video", "audio", "embed")
        found = [attributes.get("src") for tag in sources for attributes in self.all(tag)]
        fetched = ("stylesheet", "icon", "preload", "preconnect")
        found += [link.get("href") for link in self.all("link") if link.get("rel") in fetched]
        return [address for address in found if address]
