"""benchmarks/seeds.py: the error of a mean over seeds and prompts."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import seeds  # noqa: E402  # pyright: ignore[reportMissingImports]


@pytest.mark.parametrize(
    ("seed", "prompt", "rest"), [(0.1, 0.0, 0.3), (0.0, 0.4, 0.2), (0.1, 0.4, 0.3)]
)
def test_the_error_is_that_of_repeated_draws(seed: float, prompt: float, rest: float) -> None:
    """Of effects of seeds, of prompts and of both, in two strata of unequal size."""
    rng = np.random.default_rng(0)
    tags, found = ["a"] * 20 + ["b"] * 60, []
    for _ in range(2000):
        values = (
            rng.normal(0, seed, (3, 1))
            + rng.normal(0, prompt, (1, 80))
            + rng.normal(0, rest, (3, 80))
        )
        found.append(seeds.crossed(values, tags))
    means, errors = np.array(found).T
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.06)


def test_equal_seeds_have_the_error_of_their_prompts() -> None:
    values = np.random.default_rng(1).random((1, 50))
    mean, error = seeds.crossed(np.repeat(values, 3, 0), [""] * 50)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / 50**0.5)
    assert seeds.crossed(values, [""] * 50) == pytest.approx((mean, error))


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
