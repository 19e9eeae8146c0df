"""benchmarks/seeds.py: the error of a mean over seeds and prompts (tests/test_errors.py measures
it)."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes import ROOT

from flowalign.eval.compare import Column
from flowalign.eval.stats import headline_rows

sys.path.append(str(ROOT / "benchmarks"))
import seeds  # noqa: E402  # pyright: ignore[reportMissingImports]


def test_equal_seeds_have_the_error_of_their_prompts() -> None:
    values = np.random.default_rng(1).random(50)
    images = [{"prompt": str(i), "metadata": {}, "value": value} for i, value in enumerate(values)]
    row = headline_rows(Column("x", None), images)[0]
    mean, error = seeds.crossed([row] * 3)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / 50**0.5)
    assert seeds.crossed([row]) == pytest.approx((mean, error))


def document(folder: Path, shift: float) -> None:
    rows = [  # tags count alike only in a benchmark with a headline, which this has not
        {
            "index": i,
            "copy": 0,
            "prompt": str(i),
            "metadata": {"tag": "b" if i else "a"},
            "value": i / 9 + shift,
        }
        for i in range(10)
    ]
    about = {"settings": {}, "images": {"x": rows}}
    folder.mkdir()
    text = json.dumps({"version": 1, "models": {"a": about, "b": about}, "benchmarks": {"x": {}}})
    (folder / "results.json").write_text(text)


def test_it_prints_models_and_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        document(tmp_path / str(number), 0.1 * number)
    folders = [str(tmp_path / str(number)) for number in range(2)]
    monkeypatch.setattr(sys, "argv", ["seeds.py", *folders, "--pairs", "b-a"])
    seeds.main()
    printed = capsys.readouterr().out
    assert "| a | 0.550 ±" in printed and "| b − a | +0.000 ± 0.000 |" in printed
