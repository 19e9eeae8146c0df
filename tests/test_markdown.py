"""Texts of strangers in Markdown, HTML, captions and on terminals: shown, not obeyed."""

import html
import re
from pathlib import Path
from typing import Any

import fakes
import markdown_it
import pytest
import torch
from test_hostile_files import harmless

from flowalign.commands.evaluate import main
from flowalign.report.pictures import grid
from flowalign.system.escape import code, escaped, shown

NASTY = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a | b", "**bold**", "_a_ b_c",
    "[x](javascript:alert(1))", "![x](http://x/y.png)", "`code`", "``` \n# head", "~~gone~~",
    "&lt;", "$x^2$", "\x1b[2J\x1b[31mred", "\u202eevil", "a\n\n# head", "a\r\n| b |", "\\", "\\|",
    "<!-- ", "- x", "1. x", "| --- |", "http://x.y/<b>", "$\\frac{", "a\0b",
]  # fmt: skip
RENDERER = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])


def seen(page: str) -> str:
    """The text of an HTML page, without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def tags(page: str) -> set[str]:
    return set(re.findall(r"<\s*([a-z0-9!]+)", page, re.IGNORECASE))


@pytest.mark.parametrize("text", NASTY)
def test_any_text_is_shown_by_markdown_as_it_is(text: str) -> None:
    page = RENDERER.render(f"x {escaped(text)} y")
    assert tags(page) == {"p"}
    assert seen(page).split() == ["x", *shown(text, 500).split(), "y"]
    page = RENDERER.render(f"x {code(text)} y")
    assert tags(page) == {"p", "code"}
    assert seen(page).split() == ["x", *shown(text, 500).split(), "y"]


def test_what_is_shown_is_one_line_of_utf_8_without_control_characters() -> None:
    for text in [*NASTY, "\ud800", "x" * 300]:
        line = shown(text, 20)
        line.encode()
        assert len(line) <= 23 and len(line.splitlines()) <= 1 and harmless(line)
    assert shown("\x1b[2J\x1b]0;title\x07") == r"\x1b[2J\x1b]0;title\x07"
    assert shown("a\r\n\tb\u2028c  d") == "a b c d" and shown("👩\u200d🚀") == "👩\u200d🚀"
    assert shown("x" * 10**7, 5) == "xxxxx..." and shown(" " * 10**7 + "x", 5) == "..."


@pytest.mark.usefixtures("drawn")
def test_any_text_is_a_caption(tmp_path: Path) -> None:
    count = len(NASTY)
    grid(tmp_path / "x.png", torch.zeros(count, 3, 8, 8), NASTY, title=" ".join(NASTY))
    assert (tmp_path / "x.png").stat().st_size > 500


@pytest.mark.slow
def test_prompts_and_tags_of_a_stranger_leave_files_and_output_harmless(
    random_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An evaluation of them: the table, the page, the picture, and what the command prints."""
    texts = [text for text in NASTY if "\0" not in text]
    lines = [{"prompt": f"{text} {i}", "tag": text} for i, text in enumerate(texts)]
    path = fakes.evaluation(
        random_model, tmp_path, lines, {"reward": {"name": "test_markdown:Tagged"}},
        sampling={"steps": 2, "guidance": 1.0, "batch_size": 32},
        report={"images": 3, "title": "<b>x</b> \x1b[2J"},
    )  # fmt: skip
    assert main(["--config", str(path)]) == 0
    printed = capfd.readouterr()
    out = tmp_path / "out"
    for text in (printed.out, printed.err, (out / "table.md").read_text()):
        assert harmless(text.replace("\n", "").replace("\r", ""))
    allowed = {"table", "thead", "tbody", "tr", "th", "td", "p", "strong"}
    assert tags(RENDERER.render((out / "table.md").read_text())) <= allowed
    page = (out / "report.html").read_text()
    assert page.count("<script") == 1 and "<img src=x" not in page and "<b>x</b>" not in page


class Tagged:
    """Redness with a headline, so that there is a number for each tag."""

    headline = "red"

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return fakes.redness(images, prompts, metadata)
