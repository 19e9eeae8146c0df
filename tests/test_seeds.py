"""`flowalign eval table` and `eval curves`: results of several seeds as a table, runs as a figure
(tests/test_errors.py measures the error over seeds and prompts)."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowalign.commands.cli import main
from flowalign.eval import seeds
from flowalign.eval.compare import Column, Incomparable
from flowalign.eval.stats import headline_rows


def test_equal_seeds_have_the_error_of_their_prompts() -> None:
    values = np.random.default_rng(1).random(50)
    images = [{"prompt": str(i), "metadata": {}, "value": value} for i, value in enumerate(values)]
    row = headline_rows(Column("x", None), images)[0]
    mean, error = seeds.crossed([row] * 3)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / 50**0.5)
    assert seeds.crossed([row]) == pytest.approx((mean, error))


def document(marked: bool = True, **models: float) -> dict[str, Any]:
    """Results of judges a and b, and of b on the prompts of a. A model's scores are those of all
    models plus a number, and plus a little noise of its own."""
    rng, shared = np.random.default_rng(len(models)), np.random.default_rng(0).random((3, 40))
    marks = {"a": "own", "b": "own", "a_b": "others"}
    about = {name: {"reward": name, "headline": None} for name in marks}
    for name, mark in marks.items() if marked else ():
        about[name]["average"] = mark
    scores = {m: shared + plus + 0.01 * rng.random((3, 40)) for m, plus in models.items()}
    return {
        "version": 1,
        "benchmarks": about,
        "models": {
            model: {
                "settings": {"steps": 10, "seed": 7},
                "images": {
                    name: [
                        {"index": i, "copy": 0, "prompt": f"{name[0]}{i}", "metadata": {},
                         "reason": None, "value": value}
                        for i, value in enumerate(row)
                    ]
                    for name, row in zip(marks, values.tolist(), strict=True)
                },
            }
            for model, values in scores.items()
        },
    }  # fmt: skip


def test_the_best_is_bold_where_it_is_two_standard_errors_ahead_of_every_other() -> None:
    level = seeds.seed_table([document(base=0.0, one=0.1, two=0.1)])
    assert level.bold == {}  # by their own noise alone
    clear = seeds.seed_table([document(base=0.0, one=0.1, two=0.12)])
    assert clear.bold == dict.fromkeys(["a", "b", "a_b", "own", "others"], "two")
    gap, error = seeds.cells([document(base=0.0, one=0.1, two=0.12)], "two", "one")["a"]
    assert gap > 2 * error
    # the errors of the numbers themselves are larger than the gap
    assert clear.rows["two"]["a"].error > gap
    assert seeds.seed_table([document(base=0.0)]).bold == {}


def test_what_counts_in_which_average_is_marked_or_known_by_name() -> None:
    assert seeds.averages(document(x=0)) == seeds.averages(document(marked=False, x=0))
    assert seeds.averages(document(x=0)) == {"own": ["a", "b"], "others": ["a_b"]}
    renamed = document(x=0)
    renamed["benchmarks"]["c"] = renamed["benchmarks"].pop("a_b")
    assert seeds.averages(renamed)["others"] == ["c"]


def test_seeds_that_measure_something_else_are_refused() -> None:
    other, fewer = document(x=0), document(x=0)
    other["models"]["x"]["settings"]["steps"] = 20
    del fewer["benchmarks"]["b"]
    for second in (other, fewer):
        with pytest.raises(Incomparable):
            seeds.seed_table([document(x=0), second])
    with pytest.raises(ValueError, match="'y'"):
        seeds.seed_table([document(x=0)], pairs=[("x", "y")])


@pytest.fixture
def results(tmp_path: Path) -> list[str]:
    for name in ("s1", "s2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(
            json.dumps(document(True, **{"a-b": 0, "c_d": 1}))
        )
    return [str(tmp_path / "s1"), str(tmp_path / "s2" / "results.json")]


def test_the_three_formats_have_the_same_numbers(results, capsys) -> None:
    said = {}
    for form in ("markdown", "csv", "latex"):
        words = ["--format", form, "--pairs", "c_d-a-b"]
        assert main(["eval", "table", *results, *words]) == 0
        said[form] = capsys.readouterr().out
    rows = list(csv.reader(said["csv"].splitlines()))
    assert [row[0] for row in rows] == ["", "a-b", "c_d", "c_d − a-b"]
    wanted = [[f"{float(value):.3f}" for value in row[1:]] for row in rows[1:]]
    for form in ("markdown", "latex"):
        lines = [re.findall(r"\d\.\d{3}", line) for line in said[form].splitlines()]
        assert [line for line in lines if line] == wanted
    assert (
        r"c\_d & \textbf{" in said["latex"]
        and r"a\_b" in said["latex"]
        and said["latex"].count(r"\\") == 4
    )
    assert main(["eval", "table", *results, "--pairs", "a-c"]) == 2


@pytest.mark.usefixtures("drawn")
def test_the_curves_of_runs_are_one_figure(tmp_path: Path, capsys) -> None:
    for number, run in enumerate(("one", "two", "none")):
        (tmp_path / run).mkdir()
        row = (
            {"eval/headline": 0.5, "eval/ocr/reward": 0.5, "eval/ocr/exact": 0.1}
            if number < 2
            else {}
        )
        lines = [json.dumps({"update": update, "loss": 1.0} | row) for update in (0, 5)]
        (tmp_path / run / "metrics.jsonl").write_text("\n".join(lines))
    runs = [str(tmp_path / "one"), f"other={tmp_path / 'two'}"]
    for end, begin in ((".pdf", b"%PDF"), (".png", b"\x89PNG"), (".svg", b"<?xml")):
        out = tmp_path / f"curves{end}"
        assert main(["eval", "curves", *runs, "--out", str(out)]) == 0
        assert out.read_bytes().startswith(begin)
    drawn = re.findall(r"<!-- (.*?) -->", out.read_text())
    assert {"mean of the tasks", "ocr", "other"} <= {*drawn} and "exact" not in drawn
    lines = [{"update": 0, "eval/headline": 0.4}, {"update": 1, "evaluations": 10}]
    lines += [{"update": 2, "evaluations": 20}, {"update": 2, "eval/headline": 0.5}]
    (tmp_path / "counted").mkdir()
    log = tmp_path / "counted" / "metrics.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    words = [str(log.parent), "--over", "evaluations", "--out", str(out)]
    assert main(["eval", "curves", *words]) == 0
    drawn = re.findall(r"<!-- (.*?) -->", out.read_text())
    assert {"function evaluations", "0", "30"} <= {*drawn} and "40" not in drawn
    words[0] = f"student={log.parent}+{log.parent}"  # after a teacher that cost as much
    assert main(["eval", "curves", *words]) == 0
    drawn = re.findall(r"<!-- (.*?) -->", out.read_text())
    assert {"30", "60"} <= {*drawn} and not {"0", "70"} & {*drawn}
    out.unlink()
    for bad, key in (
        ([str(tmp_path)], "metrics.jsonl"), ([str(tmp_path / "none")], "held-out"),
        ([*runs, "--out", str(tmp_path / "x.txt")], "--out"),
        ([*runs, "--over", "evaluations"], "evaluations"), ([f"{runs[0]}+{runs[0]}"], "--over"),
    ):  # fmt: skip
        assert main(["eval", "curves", *bad]) == 2
        assert key in capsys.readouterr().err
