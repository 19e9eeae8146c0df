"""Texts of strangers in Markdown, HTML, captions and on terminals: shown, not obeyed."""

import html
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakes
import forked
import markdown_it
import pytest
import torch
from generated import examples, holds, texts
from hypothesis import strategies as st
from test_hostile_files import harmless

from flowalign.commands.evaluate import main
from flowalign.eval import table
from flowalign.eval.stats import rows_of
from flowalign.system.escape import block, code, escaped, shown
from flowalign.training.report.pictures import grid
from flowalign.types import EvalRow

NASTY = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a | b", "**bold**", "_a_ b_c",
    "[x](javascript:alert(1))", "![x](http://x/y.png)", "`code`", "``` \n# head", "~~gone~~",
    "&lt;", "$x^2$", "\x1b[2J\x1b[31mred", "\u202eevil", "a\n\n# head", "a\r\n| b |", "\\", "\\|",
    "<!-- ", "- x", "1. x", "| --- |", "http://x.y/<b>", "$\\frac{", "a\0b",
]  # fmt: skip
hostile = st.sampled_from(NASTY) | texts | st.text(alphabet="|`*_<>[]()!&$\\~# \n-ab", max_size=30)
RENDERER = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])


def seen(page: str) -> str:
    """The text of an HTML page, without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def tags(page: str) -> set[str]:
    return set(re.findall(r"<\s*([a-z0-9!]+)", page, re.IGNORECASE))


@examples(200)
def test_any_text_is_shown_by_markdown_as_it_is(count: int) -> None:
    def check(text: str) -> None:
        page = RENDERER.render(f"x {escaped(text)} y")
        assert tags(page) == {"p"}
        assert seen(page).split() == ["x", *shown(text, 500).split(), "y"]
        page = RENDERER.render(f"x {code(text)} y")
        assert tags(page) == {"p", "code"}
        assert seen(page).split() == ["x", *shown(text, 500).split(), "y"]

    holds(check, count, text=hostile)


@examples(100)
def test_any_text_stays_in_its_block_of_code(count: int) -> None:
    def check(text: str) -> None:
        page = RENDERER.render(f"{block(text, 'yaml')}\n\nafter")
        assert page.endswith("</code></pre>\n<p>after</p>\n") and page.count("<code") == 1

    holds(check, count, text=hostile.filter(lambda text: "\0" not in text and "\ud800" not in text))


@examples(300)
def test_what_is_shown_is_one_line_of_utf_8_without_control_characters(count: int) -> None:
    def check(text: str, length: int) -> None:
        line = shown(text, length)
        line.encode()
        assert len(line) <= length + 3 and len(line.splitlines()) <= 1 and harmless(line)

    holds(check, count, text=hostile, length=st.integers(1, 20))
    assert shown("\x1b[2J\x1b]0;title\x07") == r"\x1b[2J\x1b]0;title\x07"
    assert shown("a\r\n\tb\u2028c  d") == "a b c d" and shown("👩\u200d🚀") == "👩\u200d🚀"
    assert shown("x" * 10**7, 5) == "xxxxx..." and shown(" " * 10**7 + "x", 5) == "..."


@examples(200)
def test_a_table_has_its_rows_and_columns_whatever_names_and_tags_say(count: int) -> None:
    """As of an evaluation whose prompts have these tags."""

    def check(model: str, name: str, tag: str) -> None:
        image = {"index": 0, "copy": 0, "prompt": tag, "metadata": {"tag": tag}}
        images = [{**image, "index": i, "value": 0.5, "correct": 1.0} for i in range(2)]
        mark: Any = SimpleNamespace(name=name, headline="correct")
        rows = rows_of(mark, images)
        text = table.of_cells(table.metric_rows({model: rows}))
        number = EvalRow(name, "m", 0.5, 0.1, 2)
        text += "\n" + table.markdown(table.Table(f"{model}:", {model: {name: number}}, {name: 3}))
        page = RENDERER.render(text)
        assert tags(page) <= {"table", "thead", "tbody", "tr", "th", "td", "p"}
        assert page.count("<tr>") == 1 + len(rows) + 3 and page.count("<td") == 4 * len(rows) + 4
        assert shown(tag, 500).strip() in seen(page).replace("\xa0", " ") or not tag.strip()
        assert harmless(text.replace("\n", ""))

    holds(check, count, model=hostile, name=hostile, tag=hostile)


@pytest.mark.usefixtures("drawn")
def test_any_text_is_a_caption(tmp_path: Path) -> None:
    count = len(NASTY)
    grid(tmp_path / "x.png", torch.zeros(count, 3, 8, 8), NASTY, title=" ".join(NASTY))
    assert (tmp_path / "x.png").stat().st_size > 500


@pytest.mark.slow
def test_a_log_and_an_error_show_what_a_terminal_would_obey(capsys, tmp_path) -> None:
    """As a process of its own prints it: the handler of the log is made once per process."""
    code = (
        "import logging, sys; from flowalign.training.report.progress import quiet; quiet()\n"
        "from flowalign.training.run.processes import ExitStatus\n"
        "logging.getLogger('flowalign').warning('a reason: %s', '\\x1b[2J\\x07\\r\\ud800')\n"
        "with ExitStatus((ValueError,), (), '') as status: raise ValueError('x\\x1b[31m\\ny')\n"
        "sys.exit(status.code)"
    )
    (tmp_path / "script.py").write_text(code)
    done = forked.run(tmp_path / "script.py")
    assert done.returncode == 2, done.stderr
    said = done.stderr
    assert r"a reason: \x1b[2J\x07\r\ud800" in said and "x\\x1b[31m\ny" in said
    assert harmless(said.replace("\n", ""))


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
