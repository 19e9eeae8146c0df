"""The site builds without a warning, needs no network and no server, and shows docstrings and the
keys of configs whole, also on a phone."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import documents
import pytest
from browser import Page, dom, needs_chromium

from flowalign.config import STAGES, Section

ROOT = documents.ROOT
INCLUDED = re.compile("^(--8<-- |::: |<!-- README)", re.MULTILINE)  # filled in by the build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="pip install 'flowalign-t2i[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder], cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


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
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 15
    for page in pages:
        loaded = Page(page.read_text(encoding="utf-8")).loaded()
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
    return [Page(cell).text.strip() for cell in re.split("<td>", row)[1:]]


def squeezed(text: str) -> str:
    """Without white space and the marks of Markdown."""
    return re.sub(r"[\s`]+|^- ", "", text, flags=re.MULTILINE)


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
