"""Hooks of mkdocs for what no plugin does offline: formulas as MathML, links to files outside
docs/, and what a block of commands needs.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

INTRODUCTION = "<!-- README.md up to its first section -->"
NEEDS = re.compile(r"^<!-- needs: (.+?) -->$", re.MULTILINE)
FLAG = re.compile(r'(<span class="w"> </span>|<code>)(--?[\w-]+)')
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
IMAGE = re.compile(r'(?<!">)<img [^>]*src="([^"]+)"[^>]*>')
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:(?:\.\./)+|log/)[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the introduction; show what a block of commands needs; a link to a file outside the
    site becomes its name."""
    readme = Path(config.docs_dir).with_name("README.md").read_text(encoding="utf-8")
    introduction = readme.partition("\n## ")[0].replace("](docs/", "](")
    markdown = markdown.replace(INTRODUCTION, introduction)
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def named(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        inside = path.startswith("docs/") and not path.startswith("docs/log/")
        if inside:
            return link[0]
        name = f"`{path.partition('#')[0]}`"
        return name if link[1] == name else f"{link[1]} ({name})"

    return NEEDS.sub(r"*Needs: \1.*\n", LINK.sub(named, markdown))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """LaTeX to MathML. Browsers draw it themselves; MathJax and KaTeX would need a network. A value
    and its error stay on one line, and so does a flag of a command. An image opens in full size,
    since a phone shows it small."""
    html = html.replace(" ± ", "\u00a0±\u00a0")
    html = FLAG.sub(r'\1<span class="flag">\2</span>', html)
    html = IMAGE.sub(r'<a href="\1">\g<0></a>', html)
    return FORMULA.sub(lambda formula: mathml(formula[2]), html)


def mathml(text: str) -> str:
    r"""A formula as arithmatex marks it, \( ... \) or \[ ... \], as MathML."""
    tex = html.unescape(text.strip())
    display = "block" if tex.startswith(r"\[") else "inline"
    return convert(tex[2:-2].strip(), display=display)
