"""`flowalign eval table` and `eval curves`: results of several seeds as a table, runs as a figure
(tests/test_errors.py measures the error over seeds and prompts)."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from flowalign.commands.cli import main
from flowalign.eval import seeds, stats
from flowalign.eval.compare import Column, Incomparable, load_results
from flowalign.eval.stats import headline_rows
from flowalign.types import EvalImage, EvalRow, ImageScore


def test_equal_seeds_have_the_error_of_their_prompts() -> None:
    values = np.random.default_rng(1).random(50)
    images = [ImageScore(EvalImage(i, 0, str(i), {}), v) for i, v in enumerate(values)]
    row = headline_rows(Column("x", None), images)[0]
    cell = seeds.over_seeds([row] * 3)
    assert cell.mean == pytest.approx(values.mean())
    assert cell.error == pytest.approx(values.std(ddof=1) / 50**0.5)
    assert cell.margin == pytest.approx(t.ppf(0.975, 49) * cell.error)
    assert seeds.over_seeds([row]) == pytest.approx(cell)


def test_one_prompt_has_no_error_however_many_seeds() -> None:
    rows = [EvalRow("x", "x", mean, math.nan, 1, influence={"p": math.nan}) for mean in (0.1, 0.3)]
    cell = seeds.over_seeds(rows)
    assert cell.mean == 0.2 and math.isnan(cell.error) and math.isnan(cell.margin)


# Two equal models -------------------------------------------------------------------------------

# How much of the variance of a difference over seeds is from seeds, from prompts that all seeds
# share, and from both together.
SHARES = {
    "seeds": (1.0, 0.0, 0.0), "prompts": (0.0, 1.0, 0.0), "both": (0.0, 0.0, 1.0),
    "half": (0.5, 0.5, 0.0), "mostly seeds": (0.8, 0.1, 0.1), "mostly prompts": (0.1, 0.8, 0.1),
}  # fmt: skip


def gaps(count: int, prompts: int, share: tuple[float, ...], draws: int) -> list[seeds.SeedMean]:
    """Differences of two equal models, in `count` seeds. The mean over seeds has the variance 1."""
    rng, texts = np.random.default_rng(0), list(map(str, range(prompts)))
    of_seed, of_prompt, of_both = np.sqrt(share)
    scores = of_seed * count**0.5 * rng.normal(size=(draws, count, 1))
    scores = scores + of_prompt * prompts**0.5 * rng.normal(size=(draws, 1, prompts))
    scores += of_both * (count * prompts) ** 0.5 * rng.normal(size=(draws, count, prompts))
    means = scores.mean(-1)
    influence = (scores - means[..., None]) / (prompts * (prompts - 1)) ** 0.5
    return [
        seeds.over_seeds(
            [
                EvalRow("x", "x", mean, 1.0, prompts, influence=dict(zip(texts, row, strict=True)))
                for mean, row in zip(means[draw], influence[draw], strict=True)
            ]
        )
        for draw in range(draws)
    ]


@pytest.mark.parametrize(
    ("count", "share"),  # one seed does not know what seeds do
    [(1, "prompts"), *((count, share) for count in (2, 3, 6) for share in SHARES)],
)
def test_a_difference_of_equal_models_is_beyond_its_margin_in_one_table_of_twenty(
    count: int, share: str
) -> None:
    tables = gaps(count, 40, SHARES[share], 2000)
    beyond = np.mean([abs(cell.mean) > cell.margin for cell in tables])
    assert beyond < 0.065  # 2000 draws: 0.05 + 3 standard errors
    if count == 1 or share in (
        "seeds",
        "both",
    ):  # exact there; elsewhere it may be on the safe side
        assert beyond > 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("count", "models"), [(2, 2), (3, 2), (3, 4)])
def test_one_of_equal_models_is_bold_in_one_table_of_twenty(
    count: int, models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "bootstrap_interval", lambda *_: (math.nan, math.nan))  # slow
    rng, draws, bold = np.random.default_rng(0), 200, 0
    for _ in range(draws):
        names = [f"m{i}" for i in range(models)]
        seeds_of = [dict(zip(names, rng.normal(size=models), strict=True)) for _ in range(count)]
        bold += "a" in seeds.seed_table([document(**plus) for plus in seeds_of]).bold
    assert bold / draws < 0.095  # 0.05 + 3 standard errors
    if models == 2:
        assert bold / draws > 0.02


def document(**models: float) -> dict[str, Any]:
    """Results of judges a and b, and of b on the prompts of a. A model's scores are those of all
    models plus a number, and plus a little noise of its own."""
    rng, shared = np.random.default_rng(len(models)), np.random.default_rng(0).random((3, 40))
    marks = {"a": "own", "b": "own", "a_b": "others"}
    about = {
        name: {"reward": name, "headline": None, "average": mark} for name, mark in marks.items()
    }
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


def test_the_best_is_bold_where_it_is_ahead_of_every_other_by_the_margin() -> None:
    level = seeds.seed_table([document(base=0.0, one=0.1, two=0.1)])
    assert level.bold == {}  # by their own noise alone
    clear = seeds.seed_table([document(base=0.0, one=0.1, two=0.12)])
    assert clear.bold == dict.fromkeys(["a", "b", "a_b", "own", "others"], "two")
    gap = seeds.cells([document(base=0.0, one=0.1, two=0.12)], "two", "one")["a"]
    assert gap.mean > gap.margin > 2 * gap.error  # 39 degrees of freedom
    # the errors of the numbers themselves are larger than the gap
    assert clear.rows["two"]["a"].error > gap.mean
    assert seeds.seed_table([document(base=0.0)]).bold == {}


def test_a_third_model_whose_difference_is_uncertain_leaves_no_number_bold() -> None:
    """The second is surely lower. The third is lower on average, and higher in one seed."""
    tables = [
        document(best=best, second=best - 0.1, third=third)
        for best, third in ((0.5, 0.1), (0.5, 0.1), (0.5, 0.6))
    ]
    assert seeds.seed_table(tables, models=["best", "second"]).bold["a"] == "best"
    assert "a" not in seeds.seed_table(tables).bold


def test_a_difference_is_bold_where_it_is_beyond_its_margin() -> None:
    far = [document(base=0.0, new=gain) for gain in (0.10, 0.11, 0.12)]
    wide = [document(base=0.0, new=gain) for gain in (0.01, 0.10, 0.19)]
    pair = [("new", "base")]
    assert "| new − base | **+0.11" in seeds.markdown(seeds.seed_table(far, pairs=pair))
    assert "| base − new | **-0.11" in seeds.markdown(
        seeds.seed_table(far, pairs=[("base", "new")])
    )
    table = seeds.seed_table(wide, pairs=pair)
    gap = table.gaps["new − base"]["a"]
    assert gap.mean > 2 * gap.error * 0.9 and table.bold == {}
    assert "| new − base | +0.1" in seeds.markdown(table)


def test_what_counts_in_which_average_is_marked() -> None:
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
        (tmp_path / name / "results.json").write_text(json.dumps(document(**{"a-b": 0, "c_d": 1})))
    return [str(tmp_path / "s1"), str(tmp_path / "s2" / "results.json")]


def test_both_formats_have_the_same_numbers(results, capsys) -> None:
    said = {}
    for form in ("markdown", "latex"):
        words = ["--format", form, "--pairs", "c_d-a-b"]
        assert main(["eval", "table", *results, *words]) == 0
        said[form] = capsys.readouterr().out
    table = seeds.seed_table([*map(load_results, results)], pairs=[("c_d", "a-b")])
    rows = [*table.rows.values(), *table.gaps.values()]
    wanted = [[f"{abs(n):.3f}" for cell in row.values() for n in cell[:2]] for row in rows]
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
    # a run has one colour in all charts, whichever others a chart has
    (tmp_path / "more").mkdir()
    rows = [{"update": update, "eval/headline": 0.5, "eval/x/reward": 0.5} for update in (0, 5)]
    (tmp_path / "more" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = [*runs, str(tmp_path / "more"), "--out", str(out), "--of", "x"]
    assert main(["eval", "curves", *more]) == 0
    text = out.read_text()
    assert "#2ca02c" in text and "#1f77b4" not in text and "mean of the tasks" not in text
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
        ([*runs, "--out", str(tmp_path / "x.txt")], "txt"),
        ([*runs, "--over", "evaluations"], "evaluations"), ([f"{runs[0]}+{runs[0]}"], "--over"),
        ([*runs, "--of", "y"], "ocr"),
    ):  # fmt: skip
        assert main(["eval", "curves", *bad]) == 2
        assert key in capsys.readouterr().err
