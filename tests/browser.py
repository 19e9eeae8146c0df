"""A page of HTML as its parts."""

from __future__ import annotations

from html.parser import HTMLParser


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
