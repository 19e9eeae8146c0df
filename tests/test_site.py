"""The site builds without a warning, needs no network and no server, and shows docstrings and the
keys of configs whole, also on a phone."""

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import documents
import pytest
from browser import dom, needs_chromium

from flowalign.config import STAGES, Section

ROOT = documents.ROOT
INCLUDED = re.compile("^(--8<-- |::: |<!-- README)", re.MULTILINE)  # filled in by the build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("material", reason="pip install 'flowalign-t2i[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class Resources(HTMLParser):
    """What a page loads by itself, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text: list[str] = []
        self.formulas = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        rel = attributes.get("rel")
        self.formulas += tag == "math"
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.loaded.append(attributes.get("src") or "")
        if tag == "link" and rel in ("stylesheet", "icon", "preload", "preconnect"):
            self.loaded.append(attributes.get("href") or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.long
def test_the_site_reads_a_page_as_github_does(site: Path) -> None:
    """Python's Markdown wants blank lines where CommonMark does not: count what is made of a page
    (of those that only hold their own text)."""
    for page in documents.pages():
        if not page.is_relative_to(ROOT / "docs") or INCLUDED.search(documents.pages()[page]):
            continue
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        article = (site / name).read_text(encoding="utf-8").partition("<article")[2]
        article = article.partition("</article>")[0]
        kinds = [token.type for token in documents.tokens(page)]
        wanted = {
            "table": kinds.count("table_open"),
            "li": kinds.count("list_item_open"),
            "pre": kinds.count("fence") + kinds.count("code_block"),
            r"h\d": kinds.count("heading_open"),
        }
        counted = {tag: len(re.findall(rf"<{tag}\b", article)) for tag in wanted}
        assert counted == wanted, name


@pytest.mark.long
def test_the_first_page_begins_as_readme_does(site: Path) -> None:
    page = squeezed("".join(Resources((site / "index.html").read_text(encoding="utf-8")).text))
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    plain = re.sub(r"!\[.*?\]\(.*?\)|\]\(.*?\)|[*#\[]|^\d\. ", "", readme, flags=re.MULTILINE)
    for paragraph in plain.split("\n\n"):
        assert squeezed(paragraph) in page, paragraph


@pytest.mark.long
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 15
    for page in pages:
        loaded = Resources(page.read_text(encoding="utf-8")).loaded
        assert [x for x in loaded if re.match(r"(https?:)?//", x)] == []
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", text), style


@needs_chromium
@pytest.mark.long
@pytest.mark.parametrize("page", ["index.html", "rewards/ocr.html"])
def test_a_page_from_a_folder_searches_the_site(site: Path, page: str, tmp_path: Path) -> None:
    html = dom(f"{(site / page).as_uri()}?q=group_relative", tmp_path)
    results = re.findall('class="md-search-result__link"|md-search-result__meta">([^<]*)', html)
    assert results[0] == "1 matching document" and len(results) > 1
    assert f"{(site / 'api.html').as_uri()}#flowalign.credit.group_relative" in html


@needs_chromium
@pytest.mark.long
def test_nothing_of_a_reference_is_cut_on_a_phone(site: Path, tmp_path: Path) -> None:
    """Signatures, formulas of docstrings, and the meanings of keys end inside the page."""
    probe = """<script>onload = () => {
        const shown = [...document.querySelectorAll(".doc pre > code, .doc td, .doc p")];
        const cut = shown.filter((e) => e.scrollWidth > e.clientWidth + 1
            || e.getBoundingClientRect().right > document.documentElement.clientWidth);
        document.title = `${shown.length} shown, ${cut.length} cut, ${innerWidth} px`;
    }</script>"""
    for name in ("api", "configs"):
        page = site / f"{name}_probe.html"
        page.write_text((site / f"{name}.html").read_text(encoding="utf-8") + probe)
        title = re.findall("<title>(.*?)</title>", dom(page.as_uri(), tmp_path, 390))[0]
        page.unlink()
        shown, cut, width = (int(number) for number in re.findall(r"\d+", title))
        assert shown > 90 and cut == 0 and width < 700, f"{name}: {title}"


@pytest.mark.long
def test_formulas_are_drawn_by_the_browser_itself(site: Path) -> None:
    page = Resources((site / "concepts.html").read_text(encoding="utf-8"))
    assert page.formulas > 40
    text = "".join(page.text)
    assert "\\frac" not in text and "arithmatex" not in text and "$" not in text


def sections(model: Any, seen: set[type]) -> set[type]:
    """A model of the schema and all that it holds."""
    if isinstance(model, type) and issubclass(model, Section) and model not in seen:
        seen.add(model)
        for field in model.model_fields.values():
            sections(field.annotation, seen)
    for part in get_args(model):
        sections(part, seen)
    return seen


@pytest.mark.long
def test_the_page_of_configs_has_every_key_with_its_meaning(site: Path) -> None:
    page = (site / "configs.html").read_text(encoding="utf-8")
    everything = {s for root in STAGES.values() for s in sections(root, set())}
    assert len(everything) >= 25
    for section in everything:
        table = page.partition(f'id="{section.__module__}.{section.__name__}"')[2]
        rows = table.partition("</table>")[0].split("<tr")
        shown = {row_of(row)[0]: row_of(row)[1:] for row in rows if "<td>" in row}
        for key, field in section.model_fields.items():
            default, meaning = shown[key][1:]
            assert (default == "required") == field.is_required(), f"{section.__name__}.{key}"
            assert squeezed(field.description or "") in squeezed(meaning), (section, key)
            if isinstance(field.default, int | float):
                assert default == json.dumps(field.default), f"{section.__name__}.{key}"
    for stage in STAGES:
        assert f"stage: {stage}" in page


def row_of(row: str) -> list[str]:
    """The texts of the cells of a table's row."""
    return ["".join(Resources(cell).text).strip() for cell in re.split("<td>", row)[1:]]


def squeezed(text: str) -> str:
    """Without white space and the marks of Markdown."""
    return re.sub(r"[\s`]+|^- ", "", text, flags=re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("name", ["api", "configs"])
def test_docstrings_are_shown_whole(site: Path, name: str) -> None:
    page = (site / f"{name}.html").read_text(encoding="utf-8")
    _, *parts = re.split(r'<h\d id="(flowalign\.[\w.]+)"', page)
    checked = 0
    for path, part in zip(parts[::2], parts[1::2], strict=True):
        shown = squeezed("".join(Resources(part).text))
        for paragraph in (pkgutil.resolve_name(path).__doc__ or "").split("\n\n"):
            assert squeezed(paragraph) in shown, f"{path}: {paragraph}"
            checked += 1
    assert checked >= {"api": 100, "configs": 25}[name]


CONTRACT = {  # what scripts outside the project call: parameters in order, * and keywords
    "flowalign.load": "model lora kw",
    "flowalign.sde.sigmas": "num_steps shift * terminal num_train_timesteps",
    "flowalign.sde.transition": "x velocity sigma sigma_next * noise_level kind sigma_max",
    "flowalign.sde.log_prob": "gaussian x_next",
    "flowalign.sde.kl": "p q",
    "flowalign.credit.group_relative": "value group * std eps valid",
    "flowalign.eval.geneval.judge": "metadata detections colors * threshold counting_threshold "
    "max_objects max_overlap position_threshold",
    "flowalign.eval.geneval.summarize": "rows",
    "flowalign.rewards.ocr.text_reward": "target lines",
    "flowalign.rewards.ocr.target_of": "prompt",
    "flowalign.rewards.register": "name",
    "flowalign.rewards.build": "name options",
    "flowalign.teachers.merge.merge": "adapters out * weights method rank density seed lines",
}


def test_the_names_that_others_rely_on_keep_their_parameters() -> None:
    for name, parameters in CONTRACT.items():
        module, _, attribute = name.rpartition(".")
        code = getattr(importlib.import_module(module), attribute)
        here = list(inspect.signature(code).parameters)
        positional, _, keywords = (part.split() for part in parameters.partition(" * "))
        assert here[: len(positional)] == positional, name
        assert set(keywords) <= set(here), name
