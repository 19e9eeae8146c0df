"""Measure the sentences of Markdown files: python scripts/docs/sentences.py README.md docs/*.md

It counts running text and lists. Code, tables and headings do not count. `--long N` prints the
sentences of more than N words.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path

from markdown_it import MarkdownIt


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    parts: list[str] = []
    skip = 0  # > 0: inside a table or a heading
    for token in tokens:
        if token.type.startswith(("table_", "heading_")):
            skip += token.nesting
        if token.type != "inline" or skip:
            continue
        kinds = {"softbreak": " ", "code_inline": "`code`"}
        words = [kinds.get(child.type, child.content) for child in token.children or ()]
        plain = re.sub(r"\$\$?.+?\$\$?", "formula", "".join(words), flags=re.DOTALL)
        parts += re.split(r"(?<=[.!?])[\")]*\s+(?=[\"(]?[A-Z`*])", plain)
    return [sentence for sentence in parts if len(sentence.split()) > 1]


def main() -> None:
    """Print one line for each file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--long", type=int, metavar="N", help="show sentences of more than N words")
    given = parser.parse_args()
    for path in given.files:
        parts = sentences(path.read_text(encoding="utf-8"))
        lengths = [len(sentence.split()) for sentence in parts]
        median = statistics.median(lengths or [0])
        print(f"{path}: {len(parts)} sentences, median {median:g} words, longest {max(lengths)}")
        for sentence, length in zip(parts, lengths, strict=True):
            if given.long and length > given.long:
                print(f"  {length}: {sentence}")


if __name__ == "__main__":
    main()
