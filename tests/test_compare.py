"""Two results files: compared if they measured the same thing, refused with the reason if not."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from flowalign.eval.compare import compare, differences
from flowalign.eval.run import main


def document(values: Sequence[float | None], **settings) -> dict:
    """What `flowalign eval` writes, for one model on one benchmark."""
    rows = [
        {"index": i, "copy": 0, "prompt": f"p{i}", "metadata": {}, "reason": None, "value": value}
        for i, value in enumerate(values)
    ]
    sampler = {"steps": 10, "guidance": 1.0, "seed": 7, "height": 64, "batch_size": 8}
    model = {
        "settings": sampler | settings,
        "environment": {"torch": "2.13"},
        "images": {"ocr": rows},
    }
    marks = {"ocr": {"reward": "ocr", "engine": "rapidocr 3.10", "headline": None}}
    return {"version": 1, "benchmarks": marks, "models": {"base": model}}


BASE = [0.1, 0.5, 0.9, None, 0.3, 0.2]
BETTER = [0.2, 0.6, 1.0, 0.4, 0.4, 0.3]
NAMES = ("base", "base")


def test_the_difference_is_that_of_the_library_paired():
    row, p = compare(document(BASE), document(BETTER), NAMES)["ocr"]
    assert row.mean == pytest.approx(0.1) and row.n == 5 and row.stderr < 1e-9
    assert row.low == pytest.approx(0.1) and row.high == pytest.approx(0.1)
    assert p == pytest.approx(2 / 2**5, abs=0.02)  # all five the same way, of 2^5 flips


def images(results: dict) -> list[dict]:
    return results["models"]["base"]["images"]["ocr"]


def changed(change) -> list[str]:
    second = copy.deepcopy(document(BETTER))
    change(second)
    return differences(document(BASE), second, NAMES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["benchmarks"]["ocr"].update(engine="paddleocr 3.7"), "ocr: engine is 'rapid"),
        (lambda d: d["benchmarks"]["ocr"].update(rule="strict"), "ocr: rule is None and 'strict'"),
        (lambda d: d["models"]["base"]["settings"].update(guidance=4.5), "guidance: 1.0 and 4.5"),
        (lambda d: d["models"]["base"]["settings"].update(seed=8), "seed: 7 and 8"),
        (
            lambda d: images(d)[2].update(prompt="x"),
            "ocr: other prompts",
        ),
        (lambda d: images(d).pop(0), "ocr: other prompts (6 and 5 images)"),
        (lambda d: images(d).clear(), "ocr: other prompts (6 and 0 images)"),
        (lambda d: d["benchmarks"].update(x=d["benchmarks"].pop("ocr")), "no benchmark in common"),
    ],
)
def test_what_differs_is_named(change, said: str):
    assert any(text.startswith(said) for text in changed(change))


def test_what_changes_no_score_may_differ():
    assert changed(lambda d: d["models"]["base"]["settings"].update(batch_size=32)) == []
    assert changed(lambda d: d["models"]["base"]["environment"].update(torch="2.14")) == []


def test_of_a_smaller_limit_the_shared_prompts_are_compared(tmp_path, capsys):
    """Whichever of the two has it; the first prompts, as `limit` takes them."""
    paths = [str(tmp_path / name) for name in ("all.json", "few.json")]
    for path, results in zip(paths, (document(BASE), document(BETTER[:3])), strict=True):
        Path(path).write_text(json.dumps(results))
    assert main(["compare", *paths]) == 0
    said = capsys.readouterr().out
    assert "| +0.1000 ± 0.0000 |" in said and "3 of 6 and 3 images are shared" in said
    assert main(["compare", *reversed(paths)]) == 0
    said = capsys.readouterr().out
    assert "| -0.1000 ± 0.0000 |" in said and "3 of 3 and 6 images are shared" in said


def test_the_command(tmp_path, capsys):
    paths = []
    for name, values in (("a", BASE), ("b", BETTER)):
        paths.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(json.dumps(document(values)))
    assert main(["compare", *paths]) == 0
    assert "| ocr | reward | +0.1000 ± 0.0000 | +0.1000 to +0.1000 |" in capsys.readouterr().out
    assert main(["compare", *paths, "--models", "base", "student"]) == 2
    assert "no model 'student': ['base']" in capsys.readouterr().err
    other = document(BETTER, steps=40)
    (tmp_path / "b.json").write_text(json.dumps(other))
    assert main(["compare", *paths]) == 2
    assert "steps: 10 and 40" in capsys.readouterr().err
