"""Two results files: compared if they measured the same thing, refused with the reason if not; what
a disk, an editor or a stranger changed is read, or refused with the library's own errors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowalign.commands.evaluate import main
from flowalign.eval.compare import (
    Incomparable,
    compare,
    differences,
    load_results,
)
from flowalign.eval.store import Store, StoreError
from flowalign.system.manifest import write_manifest

ROW = {"index": 1, "copy": 0, "prompt": "p1", "metadata": {}, "reason": None, "value": 0.5}
BASE = [0.1, 0.5, 0.9, None, 0.3, 0.2]
BETTER = [0.2, 0.6, 1.0, 0.4, 0.4, 0.3]
NAMES = ("base", "base")


def document(values: Sequence[float | None], **settings: Any) -> dict[str, Any]:
    """What `flowalign eval` writes, for one model on one benchmark."""
    rows = [{**ROW, "index": i, "prompt": f"p{i}", "value": v} for i, v in enumerate(values)]
    sampler = {"steps": 10, "guidance": 1.0, "seed": 7, "height": 64, "batch_size": 8}
    model = {
        "settings": sampler | settings, "environment": {"torch": "2.13"}, "images": {"ocr": rows},
    }  # fmt: skip
    about = {"ocr": {"reward": "ocr", "engine": "rapidocr 3.10", "headline": None}}
    return {"version": 1, "benchmarks": about, "models": {"base": model}}


def images(results: dict[str, Any]) -> list[dict[str, Any]]:
    return results["models"]["base"]["images"]["ocr"]


def test_the_difference_is_that_of_the_library_paired():
    row = compare(document(BASE), document(BETTER), NAMES)["ocr"]
    assert row.mean == pytest.approx(0.1) and row.n == 5 and row.stderr < 1e-9
    assert row.low == pytest.approx(0.1) and row.high == pytest.approx(0.1)


def changed(change: Any) -> list[str]:
    second = document(BETTER)
    change(second)
    return differences(document(BASE), second, NAMES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["benchmarks"]["ocr"].update(engine="paddleocr 3.7"), "ocr: engine is 'rapid"),
        (lambda d: d["models"]["base"]["settings"].update(guidance=4.5), "guidance: 1.0 and 4.5"),
        (
            lambda d: d["models"]["base"]["settings"].update(steps=None),
            "steps: 10 and None. If another program's images were sampled so: models.base.steps=10",
        ),
        (lambda d: images(d)[2].update(prompt="x"), "ocr: other prompts"),
        (lambda d: images(d).clear(), "ocr: other prompts (6 and 0 images)"),
        (lambda d: d["benchmarks"].update(x=d["benchmarks"].pop("ocr")), "no benchmark in common"),
    ],
)
def test_what_differs_is_named(change: Any, said: str):
    assert any(text.startswith(said) for text in changed(change))


def test_what_changes_no_score_may_differ():
    assert changed(lambda d: d["models"]["base"]["settings"].update(batch_size=32)) == []
    assert changed(lambda d: d["models"]["base"]["environment"].update(torch="2.14")) == []
    assert changed(lambda d: d["benchmarks"]["ocr"].update(average="own")) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base, better, few = (str(tmp_path / name) for name in ("all.json", "better.json", "few.json"))
    for path, values in ((base, BASE), (better, BETTER), (few, BETTER[:3])):
        Path(path).write_text(json.dumps(document(values)))
    assert main(["compare", base, better]) == 0
    assert "| ocr | reward | +0.1000 ± 0.0000 | [+0.1000, +0.1000] |" in capsys.readouterr().out
    assert main(["compare", base, better, "--models", "base", "student"]) == 2
    assert "no model 'student': ['base']" in capsys.readouterr().err
    # of a smaller `limit` the shared prompts, whichever of the two has it
    for pair, sign, shared in (
        ((base, few), "+", "3 of 6 and 3"),
        ((few, base), "-", "3 of 3 and 6"),
    ):
        assert main(["compare", *pair]) == 0
        printed = capsys.readouterr().out
        assert f"| {sign}0.1000 ± 0.0000 |" in printed and f"{shared} images are shared" in printed


@pytest.mark.parametrize("row", [[1], {**ROW, "value": "0.5"}, {**ROW, "prompt": 1}])
def test_a_row_of_wrong_types_is_refused(row: Any, tmp_path: Path, capsys):
    results = document(BASE)
    images(results)[1] = row
    for name, content in (("bad", results), ("good", document(BASE))):
        (tmp_path / name).write_text(json.dumps(content))
    assert main(["compare", str(tmp_path / "bad"), str(tmp_path / "good")]) == 2
    assert "flowalign eval compare: " in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[" * 100_000, "{", '{"version": 2}'])
def test_a_record_that_is_no_record_is_refused(content: str, tmp_path: Path):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(StoreError):
        Store(tmp_path, {"seed": 7}, {}).check()
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(Incomparable):
        load_results(tmp_path / "results.json")


def test_results_that_were_changed_are_refused(tmp_path: Path):
    (tmp_path / "results.json").write_text(json.dumps(document(BASE)))
    write_manifest(tmp_path, {})
    assert load_results(tmp_path / "results.json")["version"] == 1
    (tmp_path / "results.json").write_text(json.dumps(document(BETTER)))
    with pytest.raises(Incomparable, match="results.json"):
        load_results(tmp_path / "results.json")
