"""The site builds without a warning and reads as GitHub does; names that others rely on stay."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import documents
import pytest

ROOT = documents.ROOT
INCLUDED = re.compile("^(--8<-- |<!-- README)", re.MULTILINE)  # filled in by the build


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


def test_the_introduction_links_to_no_later_section_of_the_readme() -> None:
    """The site's first page has the introduction alone."""
    assert "](#" not in (ROOT / "README.md").read_text().partition("\n## ")[0]


@pytest.mark.long
def test_the_site_reads_a_page_as_github_does(site: Path) -> None:
    """Python's Markdown wants blank lines where CommonMark does not: count what is made of a page
    (of those that only hold their own text)."""
    for page in documents.pages():
        if not page.is_relative_to(ROOT / "docs") or INCLUDED.search(documents.pages()[page]):
            continue
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        if name.parts[0] == "log":  # mkdocs.yml leaves it out
            continue
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
    "flowalign.teachers.merge.merge": "adapters out * weights method rank density seed",
}


def test_the_names_that_others_rely_on_keep_their_parameters() -> None:
    for name, parameters in CONTRACT.items():
        module, _, attribute = name.rpartition(".")
        code = getattr(importlib.import_module(module), attribute)
        here = list(inspect.signature(code).parameters)
        positional, _, keywords = (part.split() for part in parameters.partition(" * "))
        assert here[: len(positional)] == positional, name
        assert set(keywords) <= set(here), name
