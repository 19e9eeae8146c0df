"""What the documents hold: links, headings, blocks of code and commands, read as Markdown."""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
FOLLOWED = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")  # top to bottom, by a test
SHELL = ("bash", "sh", "console")
PROGRAMS = ("flowalign", "python", "accelerate", "make", "pytest", "pip", "git")
COMMENT = re.compile(r"<!-- (needs|file): (.+?) -->")
# not digits of a word, a name or a version: 96x96, samples-2.png, 2.13.0
NUMBER = re.compile(r"(?<![\w.-])[-+]?\d*\.?\d+(?:e[-+]?\d+)?(?!\.?\w)")


@dataclass(frozen=True)
class Block:
    """A block of code: where it begins, its language ("" = none), its text, and what an HTML
    comment before it says: `needs` of its commands, `file` that a reader saves it as."""

    page: Path
    line: int
    language: str
    text: str
    said: tuple[tuple[str, str], ...] = ()

    @property
    def notes(self) -> dict[str, str]:
        return dict(self.said)

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command as words, and where it stands. inline: in running text."""

    words: tuple[str, ...]
    place: str
    inline: bool = False

    def __str__(self) -> str:
        return shlex.join(self.words)


@cache
def pages() -> dict[Path, str]:
    """Every document by its file: Markdown, and the texts of notebooks."""
    named = ["README.md", "CHANGELOG.md", ".github/CONTRIBUTING.md"]
    paths = [ROOT / name for name in named] + sorted((ROOT / "docs").rglob("*.md"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        markdown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        texts[path] = "\n\n".join(markdown)
    return texts


def example_package(folder: Path) -> Path:
    """The files of docs/your-algorithm.md as an installed package, below what it returns."""
    page, site = ROOT / "docs" / "your-algorithm.md", folder / "site"
    info = site / "weighted-0.1.dist-info"
    info.mkdir(parents=True)
    for block in blocks(page):
        if block.language == "python":
            first, _, code = block.text.partition("\n")
            (site / first.removeprefix("# ")).write_text(code)
        elif block.language == "toml":
            points = block.text.partition("[project.entry-points.")[2]
            (info / "entry_points.txt").write_text(f"[{points}".replace('"', ""))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weighted\nVersion: 0.1\n")
    return site


@cache
def tokens(page: Path) -> list[Token]:
    """The page as markdown-it reads it."""
    return MarkdownIt("commonmark").enable("table").parse(pages()[page])


def inline(page: Path, kind: str) -> Iterator[tuple[int, Token]]:
    """(line, token) of what stands in running text: `link_open`, `image`, `code_inline`."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type == kind:
                yield (token.map or [0])[0] + 1, child


def links(page: Path) -> Iterator[tuple[int, str]]:
    """(line, target) of links and images."""
    for line, token in inline(page, "link_open"):
        yield line, str(token.attrs["href"])
    for line, token in inline(page, "image"):
        yield line, str(token.attrs["src"])


def anchors(page: Path) -> set[str]:
    """The ids of the headings: as mkdocs makes them under docs/, as GitHub does elsewhere."""
    names = set()
    ours = page.is_relative_to(ROOT / "docs")
    for before, token in zip(tokens(page), tokens(page)[1:], strict=False):
        if before.type != "heading_open":
            continue
        text = "".join(child.content for child in token.children or ())
        if ours:
            text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        text = re.sub(r"[^\w\s-]", "", text).strip().lower()
        names.add(re.sub(r"[-\s]+" if ours else r"\s", "-", text))
    return names


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code, each with the comments right before it."""
    said: list[tuple[str, str]] = []
    for token in tokens(page):
        if token.type == "html_block":
            said += COMMENT.findall(token.content)
        elif token.type in ("fence", "code_block"):
            words = token.info.split() or [""]
            line = (token.map or [0])[0] + 1
            yield Block(page, line, words[0], token.content, tuple(said))
            said = []
        elif token.level == 0:
            said = []


def ends(printed: str, shown: str) -> bool:
    """Does `printed` end with the lines that a page shows? There any number stands for any other,
    since they vary between machines, and a line `...` for any lines."""
    pattern = ""
    for line in shown.splitlines():
        if line == "...":
            pattern += r"(?:.*\n)*"
        else:
            words = (re.escape(part) for part in NUMBER.split(line))
            pattern += NUMBER.pattern.join(words) + r"\n"
    return re.search(rf"^{pattern}\Z", printed.rstrip() + "\n", re.MULTILINE) is not None


def commands(page: Path) -> Iterator[Command]:
    """The commands of a page: all in blocks of shell, in others lines that begin with a program of
    ours, and those in running text."""
    for block in blocks(page):
        if block.language not in (*SHELL, "", "text"):
            continue
        for words in statements(block.text, whole=block.language in SHELL):
            if block.language in SHELL or program(words) in PROGRAMS:
                yield Command(tuple(words), block.place)
    for line, token in inline(page, "code_inline"):
        text = token.content
        if re.match(rf"({'|'.join(PROGRAMS)}) [\w./-]", text) and "`" not in text:
            place = f"{page.relative_to(ROOT)}:{line}"
            for words in statements(text, whole=True):
                yield Command(tuple(words), place, inline=True)


def statements(text: str, *, whole: bool) -> Iterator[list[str]]:
    """The commands of a shell text as words, without assignments before them, and parts of `&&`
    each for itself. whole: all lines are commands; else lines that do not parse are left out."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line.removeprefix("$ ")
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation goes on in the next line
            pending = pending + "\n" if whole or program(pending.split()) in PROGRAMS else ""
            continue
        pending = ""
        part: list[str] = []
        for word in [*words, "&&"]:
            if word != "&&":
                part.append(word)
            elif bare := without_prefixes(part):
                yield bare
            part = [] if word == "&&" else part


def without_prefixes(words: list[str]) -> list[str]:
    """The command behind `VARIABLE=value`, `time` and `env`."""
    while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] in ("time", "env")):
        words = words[1:]
    return words


def program(words: list[str] | tuple[str, ...]) -> str:
    """The program's name: python for .venv/bin/python3."""
    return re.sub(r"^python3?(\.\d+)?$", "python", words[0].rpartition("/")[2]) if words else ""
