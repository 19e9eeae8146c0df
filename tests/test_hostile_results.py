"""Rows and results that a disk, an editor or a stranger changed: they are read, or refused with the
library's own errors, in time."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from generated import examples, holds, json_values, mutated
from hypothesis import strategies as st

from flowalign.commands import cli
from flowalign.eval.compare import Incomparable, compare, load, markdown, model_of
from flowalign.eval.store import RowFiles, Store, StoreError

ROW = {"index": 0, "copy": 0, "prompt": "a", "metadata": {"tag": "x"}, "reason": None, "value": 0.5}


def document(count: int = 3) -> dict[str, Any]:
    """What `flowalign eval` writes, for one model on one benchmark."""
    rows = [
        {**ROW, "index": i, "prompt": f"p{i}", "value": i / 7, "correct": float(i % 2)}
        for i in range(count)
    ]
    model = {
        "settings": {"steps": 10, "guidance": 1.0, "seed": 7},
        "environment": {"torch": "2.13"},
        "images": {"ocr": rows},
    }
    about = {"reward": "ocr", "headline": "correct"}
    return {"version": 1, "benchmarks": {"ocr": about}, "models": {"base": model}}


WRONG: dict[str, Any] = {
    "no object": [1],
    "a text as value": {**ROW, "value": "0.5"},
    "a text as index": {**ROW, "index": "0"},
    "an index below 0": {**ROW, "index": -1},
    "true as copy": {**ROW, "copy": True},
    "a number as prompt": {**ROW, "prompt": 1},
    "a list as metadata": {**ROW, "metadata": []},
    "a text as a part": {**ROW, "correct": "yes"},
    "a list as reason": {**ROW, "reason": []},
    "no value": {key: ROW[key] for key in ROW if key != "value"},
    "a number that no float32 holds": {**ROW, "value": 1e300},
    "an infinite number": {**ROW, "value": float("inf")},
}


def rows_of(folder: Path, row: Any) -> RowFiles:
    """A file of that row, with the digest that it needs."""
    rows = RowFiles(folder, {}, {})
    rows.folder.mkdir(exist_ok=True)
    (rows.folder / "rows.0.jsonl").unlink(missing_ok=True)
    rows.append([row], [None])
    return rows


@pytest.mark.parametrize("kind", WRONG)
def test_a_row_of_wrong_types_is_refused(kind: str, tmp_path: Path):
    if kind not in ("no object", "an infinite number"):  # what cannot be written
        assert list(rows_of(tmp_path, WRONG[kind]).read()) == []
    results = document()
    results["models"]["base"]["images"]["ocr"][1] = WRONG[kind]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(Incomparable, match="results.json"):
        load(tmp_path / "results.json")


def test_a_right_row_is_read(tmp_path: Path):
    assert list(rows_of(tmp_path, ROW).read()) == [(ROW, None)]


@pytest.mark.parametrize("content", ["[]", "1", '"x"', "[" * 100_000, "9" * 5000, "{"])
def test_a_record_that_is_no_record_is_refused(content: str, tmp_path: Path):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(StoreError):
        Store(tmp_path, {"prompts": []}, {}).check()
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(Incomparable):
        load(tmp_path / "results.json")


def test_eval_compare_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(document()))
    wrong = document()
    wrong["models"]["../x"] = wrong["models"].pop("base")
    bad.write_text(json.dumps(wrong))
    assert cli.main(["eval", "compare", str(good), str(good)]) == 0
    assert cli.main(["eval", "compare", str(good), str(bad)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@examples(500)
def test_changed_results_compare_or_are_refused(count: int, tmp_path: Path):
    good = document()
    path = tmp_path / "results.json"

    @st.composite
    def documents(draw: Any) -> Any:
        changed: Any = copy.deepcopy(good)
        for _ in range(draw(st.integers(1, 2))):
            changed = mutated(changed, draw, json_values) if isinstance(changed, dict) else changed
        return changed

    def compared_or_refused(changed: Any) -> None:
        path.write_text(json.dumps(changed))
        try:
            read = load(path)
            name = model_of(read, None, "x")
            markdown(compare(good, read, ("base", name)), ("base", name)).encode()
        except Incomparable as error:
            str(error)

    holds(compared_or_refused, count, changed=documents())
