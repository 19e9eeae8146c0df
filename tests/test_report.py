"""The tables of an evaluation and its page: what is best, what is paired, what it needs."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Page

from flowalign.eval import report
from flowalign.eval.fidelity import Distance
from flowalign.eval.stats import NO_ERROR
from flowalign.eval.suite import Benchmark, JudgedImages
from flowalign.eval.table import Numbers, Results, metric_table, tables
from flowalign.report.pictures import png
from flowalign.rewards import RewardBase
from flowalign.system.escape import escaped
from flowalign.types import EvalRow, ImageScore, PromptBatch

NAN = math.nan
PROMPTS = ['a "<b>cat</b>" & a dog', "two stars", "a red sign", "nothing"]
CORRECT = {"base": [1, 0, 1, 0], "ocr": [1, 1, 1, 0], "student": [1, 1, 1, NAN]}
GRADED = {
    "base": [0.1, 0.2, 0.3, 0.4],
    "ocr": [0.2, 0.3, 0.4, 0.5],
    "student": [0.9, 0.2, 0.3, 0.4],
}


class Judge(RewardBase):
    def __init__(self, headline: str | None) -> None:
        self.headline = headline


def benchmark(name: str, headline: str | None) -> Benchmark:
    tags = [{"tag": tag} if headline else {} for tag in "aabb"]
    batch = PromptBatch(PROMPTS, [name] * 4, tags)
    return Benchmark(name, batch, Judge(headline))  # it judges no more


def judged(mark: Benchmark, scores: list[float], shade: float) -> JudgedImages:
    images = [torch.full((3, 4, 4), shade + i / 100) for i in range(3)]  # one is not shown
    return JudgedImages(given(mark, scores), [png(image) for image in images])


def given(mark: Benchmark, scores: list[float]) -> list[ImageScore]:
    """Of all images of a benchmark, in order."""
    images = []
    for number, score in enumerate(scores):
        image = mark.image(divmod(number, mark.copies))
        parts = {mark.headline: score} if mark.headline else {}
        images.append(ImageScore(image, score, parts, reason=f"saw <{score}>"))
    return images


MARKS = [benchmark("geneval", "correct"), benchmark("ocr", None)]


@pytest.fixture
def results() -> Results:
    images = {
        model: {
            "geneval": judged(MARKS[0], CORRECT[model], index / 4),
            "ocr": judged(MARKS[1], GRADED[model], index / 4 + 0.1),
        }
        for index, model in enumerate(CORRECT)
    }
    far = {"base": 3.0, "ocr": 5.0, "student": 2.0}
    without = torch.linspace(-0.1, 0.1, 20)
    distances = {model: Distance(value, value + without, 8) for model, value in far.items()}
    return Results(MARKS, images, distances)


def test_the_main_table_is_models_by_benchmarks_then_fidelity_and_average(results: Results):
    main, to_base, extra = tables(results, {"student": ["ocr"]})
    assert list(main.decimals) == ["geneval", "ocr", "fidelity", "average"]
    assert list(main.rows) == ["base", "ocr", "student"]
    assert list(to_base.rows) == ["ocr − base", "student − base"]
    assert list(extra.rows) == ["student − ocr"]
    row = main.rows["base"]
    assert row["average"].mean == pytest.approx((0.5 + 0.25) / 2)
    assert row["average"].mean == pytest.approx((row["geneval"].mean + row["ocr"].mean) / 2)
    # over the prompts, which both share: means [.5, .5] of two tags, and .25; fidelity is no part
    right = [sign * 0.5 * math.sqrt(2 / 1) / 2 / 2 for sign in (1, -1, 1, -1)]
    graded = [gap * math.sqrt(4 / 3) / 4 for gap in (-0.15, -0.05, 0.05, 0.15)]
    both = [(a + b) / 2 for a, b in zip(right, graded, strict=True)]
    assert row["average"].stderr == pytest.approx(math.hypot(*both))
    assert main.table.foot == ["n", "3 to 4", "4", "8", "7 to 8"]
    assert to_base.table.foot[-1] == "7 to 8"


def test_differences_are_paired_in_every_column(results: Results):
    _, to_base, extra = tables(results, {"student": ["ocr"]})
    row = to_base.rows["ocr − base"]
    assert row["ocr"].mean == pytest.approx(0.1) and row["ocr"].stderr < 1e-9
    assert row["fidelity"].mean == 2 and row["fidelity"].stderr < 1e-6
    assert row["average"].mean == pytest.approx((0.25 + 0.1) / 2)
    assert row["average"].stderr == pytest.approx(row["geneval"].stderr / 2)
    assert extra.rows["student − ocr"]["fidelity"].mean == -3
    assert to_base.trend("ocr − base", "ocr") == "better"
    assert to_base.trend("ocr − base", "fidelity") == "worse"  # it is farther away
    ocr = to_base.rows["student − base"]["ocr"]
    assert ocr.low <= 0 <= ocr.high and to_base.trend("student − base", "ocr") == ""


def rows_with(column: str, means: list[float]) -> dict[str, dict[str, EvalRow]]:
    return {f"m{i}": {column: EvalRow("x", "x", m, 0.01, 9)} for i, m in enumerate(means)}


@pytest.mark.parametrize(
    ("column", "means", "best"),
    [
        ("ocr", [0.1, 0.3, 0.2], "m1"),
        ("fidelity", [0.1, 0.3, 0.2], "m0"),
        ("ocr", [0.3, 0.27, 0.2], None),  # 2.1 standard errors; 2.31 are needed
        ("ocr", [NAN, 0.3, 0.2], "m1"),
        ("ocr", [NAN, 0.3], None),  # nothing to compare with
        ("ocr", [0.3], None),
    ],
)
def test_the_best_of_a_column(column: str, means: list[float], best: str | None):
    rows = rows_with(column, means)
    assert Numbers("", rows, {column: 3}).best(column) == best
    assert Numbers("", rows, {column: 3}, signed=True).best(column) is None


def test_the_best_of_a_column_is_found_in_pairs():
    """Two numbers whose errors are alike, prompt by prompt, differ by less than each is off."""
    moved = {"a": 0.1, "b": 0.1, "c": 0.1}
    near = {prompt: value + 0.001 for prompt, value in moved.items()}
    rows = {
        name: {"ocr": EvalRow("x", "x", mean, 0.17, 3, influence=influence)}
        for name, mean, influence in (("one", 0.5, moved), ("two", 0.52, near))
    }
    assert Numbers("", rows, {"ocr": 3}).best("ocr") == "two"


def test_a_table_as_markdown():
    rows = {
        "base": {"ocr": EvalRow("", "", 22.338, 0.25, 8), "fidelity": EvalRow("", "", 0.5, NAN, 8)},
        "new": {"ocr": EvalRow("", "", 25.0, 0.25, 7), "fidelity": EvalRow("", "", NAN, NAN, 8)},
    }
    assert Numbers("Scores.", rows, {"ocr": 2, "fidelity": 3}).markdown().splitlines() == [
        "Scores.",
        "",
        "|  | ocr | fidelity ↓ |",
        "|---|---|---|",
        "| base | 22.34 ± 0.25 | 0.500 |",
        "| new | **25.00 ± 0.25** | – |",
        "| n | 7 to 8 | 8 |",
    ]
    some = {"new": {"ocr": EvalRow("", "", 0.5, 0.1, 7, total=8)}}
    assert "| new | 0.500 ± 0.100 (n 7 of 8) |" in Numbers("", some, {"ocr": 3}).markdown()


def test_a_note_says_which_columns_have_no_error():
    """Tag b has one prompt, so GenEval's overall has no error, and the average neither."""
    tags = ["a", "a", "a", "b"]
    batch = PromptBatch(PROMPTS, ["x"] * 4, [{"tag": tag} for tag in tags])
    marks = [
        Benchmark("geneval", batch, Judge("correct")),
        Benchmark("ocr", batch, Judge(None)),
    ]
    images = {
        model: {"geneval": judged(marks[0], CORRECT["ocr"], 0), "ocr": judged(marks[1], some, 0)}
        for model, some in GRADED.items()
    }
    results = Results(marks, images, {})
    main, gap = tables(results, {})
    wanted = NO_ERROR.format("geneval, average")
    assert wanted in main.notes and wanted in gap.notes
    alone = Results(marks[1:], images, {})
    for table in tables(alone, {}):  # every column has its error
        assert not [note for note in table.notes if note.startswith(NO_ERROR[:10])]
        assert all(" ± " in table.text(label, c) for label in table.rows for c in table.decimals)


def test_numbers_are_not_escaped_in_markdown():
    rows = [EvalRow("[x]", "reward", -0.938, 0.024, 9, -0.98, -0.89)]
    line = metric_table({"0.5": rows}).markdown().splitlines()[-1]
    assert line.endswith("| 9 | -0.938 ± 0.024 [-0.980, -0.890] |") and r"\[x\]" in line
    assert escaped("0.5") == "0.5" and escaped("-1.5") == "-1.5"
    assert escaped("1. x") == r"1\. x" and escaped("- x") == r"\- x"


@pytest.fixture
def text(results: Results) -> str:
    return page(results)


def page(results: Results) -> str:
    compare = {"student": ["ocr"]} if "ocr" in results.judged else {}
    shown = tables(results, compare)
    about = {"title": "T < 1", "conditions": ["Seed 7."], "config": "stage: eval"}
    return report.render(results, shown, metric_table(results.rows), **about)


def test_the_page_parses_and_refers_to_nothing_outside(text: str):
    page = Page(text)
    assert page.open == []
    for _, attributes in page.tags:
        for key in ("src", "href", "data", "action", "srcset", "poster"):
            assert (attributes.get(key) or "data:").startswith("data:")
    assert not {"link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert all("src" not in script for script in page.all("script"))
    assert "://" not in text and "@import" not in text and "url(" not in text
    assert "&lt;b&gt;cat&lt;/b&gt;" in text and "<b>cat" not in text  # of a prompt


class GenEval(Judge):
    name = "geneval"


class Product(Judge):
    name = "product"

    def describe(self) -> dict[str, Any]:
        return {"rewards": {"objects": {"name": "geneval"}}}


@pytest.mark.parametrize(("judge", "said"), [(Judge, False), (GenEval, True), (Product, True)])
def test_the_words_of_geneval_are_explained_where_it_judges(
    results: Results, judge: type[Judge], said: bool
):
    marks = [MARKS[1], replace(MARKS[0], reward=judge("correct"))]
    text = page(replace(results, benchmarks=marks))
    assert ("official script" in text) is said


def shared() -> Results:
    """Two models, two prompts of two images, judged by a verdict and by a grade."""
    batch = PromptBatch(PROMPTS[:2], ["x"] * 2, [{}] * 2)
    marks = [
        Benchmark("x_right", batch, Judge("correct"), 2, "x"),
        Benchmark("x_grade", batch, Judge(None), 2, "x"),
    ]
    scores = {
        "base": {"x_right": [1, 0, 0, 0], "x_grade": [0.9, 0.8, 0.2, 0.1]},
        "new": {"x_right": [1, 1, NAN, 0], "x_grade": [0.8, 0.9, 0.1, 0.9]},
    }
    images = {}
    for model, of in scores.items():
        shade = 0.5 * (model == "new")
        pictures = [png(torch.full((3, 4, 4), shade + i / 10)) for i in range(4)]
        images[model] = {
            mark.name: JudgedImages(given(mark, of[mark.name]), pictures) for mark in marks
        }
    return Results(marks, images, {})


def test_an_image_that_several_judge_is_in_the_page_once():
    results = shared()
    images = Page(page(results)).all("img")
    own = {image["id"]: image["src"] for image in images if image.get("src")}
    again = [image["data-again"] for image in images if "data-again" in image]
    assert len(own) == 8 and len(images) == 16 and set(own) == set(again)
    assert own["x/new/3"] != own["x/base/3"] and len(set(own.values())) == 8


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [400, 1200])
def test_the_images_of_a_line_of_cards_begin_at_one_height(tmp_path: Path, width: int):
    """However long their prompts are. One model: a card a prompt."""
    prompts = ["two stars", "a red sign " * 9, "nothing", "a photo of two cups and a red sign"]
    batch = PromptBatch(prompts, ["x"] * 4, [{}] * 4)
    mark = Benchmark("ocr", batch, Judge(None))
    images = JudgedImages(given(mark, [0.5] * 4), [png(torch.zeros(3, 4, 4))] * 4)
    text = page(Results([mark], {"one": {"ocr": images}}, {}))
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "frame.html").write_text(
        f"<iframe id=page src=page.html width={width} height=2000></iframe><pre id=out></pre>"
        "<script>page.onload = () => { out.textContent = JSON.stringify("
        "[...page.contentDocument.querySelectorAll('.single img')]"
        ".map((image) => image.getBoundingClientRect()).map((box) => [box.left, box.top])) }"
        "</script>"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user"]
    options += ["--allow-file-access-from-files", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(["chromium", *options], timeout=120, capture_output=True, text=True)
    places = json.loads(re.findall(r"<pre id=.out.>(.*)</pre>", done.stdout)[0])
    columns = len({left for left, _ in places})
    assert columns == (2 if width == 400 else 4)
    assert len({round(top) for _, top in places}) == len(prompts) // columns
