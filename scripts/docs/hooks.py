"""Hooks of mkdocs: pages that are made from the sources, formulas as MathML, and what blocks need.

Everything happens at build time: the pages load no script for formulas and need no network.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # a checkout need not be installed to have its docs built
    sys.path.insert(0, str(ROOT))

import api  # noqa: E402 (mkdocs puts this folder on the path)
import reference  # noqa: E402

README = re.compile(r"<!-- readme: (.+?) -->")
MEMBERS = "<!-- members of a backbone -->"
SOURCE = re.compile(r"<!-- source: (\S+) -->")
NEEDS = re.compile(r"^<!-- needs: (.+?) -->$", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """The pages that no one writes by hand."""
    pages = {
        "configs.md": reference.page(ROOT / "configs"),
        "api.md": api.page(ROOT),
        "changelog.md": rebased((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "docs"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in sections of the README, sources and tables; say what a block of commands needs."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    if not page.file.generated_by:
        markdown = rebased(markdown, folder, folder)
    markdown = README.sub(lambda found: section(found[1], folder), markdown)
    markdown = SOURCE.sub(lambda found: source(found[1]), markdown)
    markdown = markdown.replace(MEMBERS, api.backbone_members(ROOT) if MEMBERS in markdown else "")
    return NEEDS.sub(lambda found: f"*Needs: {found[1]}.*\n", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """LaTeX to MathML, which browsers draw by themselves."""
    return FORMULA.sub(lambda found: mathml(found[2]), html)


def mathml(text: str) -> str:
    r"""A formula as arithmatex marks it, \( ... \) or \[ ... \], as MathML."""
    tex = html.unescape(text.strip())
    block = tex.startswith(r"\[")
    return convert(tex[2:-2].strip(), display="block" if block else "inline")


def source(path: str) -> str:
    """A file of the checkout as a block of code."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return f"```{Path(path).suffix[1:].replace('py', 'python')}\n{text}\n```"


def section(title: str, folder: str) -> str:
    """What stands in the README under a heading, with links as they are from `folder`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise PluginError(f"README.md has no section {title!r}, which a page of docs/ shows")
    return rebased(found[1].strip(), folder)


def rebased(text: str, folder: str, home: str = "") -> str:
    """Markdown of a file in `home` of the checkout, fit for a page in `folder` of it: links into
    docs/ are relative to that, links to other files of the checkout become their names. What leads
    nowhere (or is code that looks like a link) stays, and mkdocs says so."""

    def moved(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(home, target))
        if not (ROOT / path.partition("#")[0]).exists():
            return found[0]
        if path.startswith("docs/"):
            return f"{mark}[{label}]({posixpath.relpath(path, folder)})"
        return label if label.strip("`") == path else f"{label} (`{path}`)"

    return LINK.sub(moved, text)
