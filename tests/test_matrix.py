"""`matrix: true`: every judge on the prompts of every task, and what that says of a model."""

import json
from pathlib import Path

import fakes
import pytest

from flowalign.commands.evaluate import main
from flowalign.eval.suite import Benchmark, JudgedImages
from flowalign.eval.table import Results, tables
from flowalign.rewards import RewardBase
from flowalign.types import EvalImage, ImageScore, PromptBatch

DOGS = [{"prompt": f"{n} dogs", "tag": n, "include": [{"class": "dog", "count": 1}]} for n in "ab"]


@pytest.mark.slow
def test_images_are_also_scored_by_the_judges_of_other_tasks_that_can(
    random_model: str, tmp_path: Path
) -> None:
    objects = tmp_path / "objects.jsonl"
    objects.write_text("\n".join(map(json.dumps, DOGS)))
    geneval = {"name": "geneval", "options": {"detector": "tiny"}}
    marks = [{"name": "objects", "prompts": str(objects), "reward": geneval}, {"name": "red"}]
    models = {"base": None, "again": None}
    file = fakes.evaluation(random_model, tmp_path, ["a", "b"], *marks, matrix=True, models=models)
    assert main(["--config", str(file)]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    marks = {name: judge["average"] for name, judge in results["benchmarks"].items()}
    assert marks == {"objects": "own", "objects_red": "others", "red": "own"}
    found = results["models"]["again"]
    # the detector needs metadata, which the prompts of `red` have not
    assert list(found["images"]) == ["objects", "objects_red", "red"]
    assert list(found["matrix"]) == ["objects", "objects_red", "red", "own", "others", "worst"]
    assert found["average"]["mean"] == pytest.approx(found["matrix"]["own"]["mean"])
    assert found["matrix"]["worst"]["mean"] == 0  # the same model
    assert "objects_red" not in (tmp_path / "out" / "table.md").read_text().splitlines()[2]
    assert main(["--config", str(file)]) == 0  # goes on from its own stores


def test_the_worst_cell_is_the_largest_loss_to_the_first_model() -> None:
    names = ["a", "b", "a_b", "b_a"]
    batch = PromptBatch(["x", "y"], ["t"] * 2, [{}, {}])
    marks = [Benchmark(name, batch, RewardBase()) for name in names]
    scores = {"base": [0.5, 0.5, 0.5, 0.5], "student": [0.9, 0.7, 0.2, 0.4]}
    judged = {
        model: {
            name: JudgedImages([ImageScore(EvalImage(i, 0, p, {}), value + 0.1 * i)
                          for i, p in enumerate("xy")], [])
            for name, value in zip(names, values, strict=True)
        }
        for model, values in scores.items()
    }  # fmt: skip
    results = Results(marks, judged, {}, column_names=["a", "b"])
    table = results.matrix
    assert table
    row = table.rows["student"]
    assert row["own"].mean == pytest.approx(0.85) and row["others"].mean == pytest.approx(0.35)
    assert row["worst"].benchmark == "a_b" and row["worst"].mean == pytest.approx(-0.3)
    assert row["worst"].stderr == pytest.approx(0)  # paired
    assert list(tables(results, {})[0].decimals) == ["a", "b", "average"]
    assert Results(marks[:2], judged, {}, column_names=["a", "b"]).matrix is None
