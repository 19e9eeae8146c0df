"""`flowalign eval` without a config."""

from pathlib import Path

import pytest

from flowalign.commands.evaluate import main


def test_it_lists_what_there_is_and_what_must_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "| ocr | tiny/ocr_test |" in listed and "detector=tiny" in listed
    assert main(["list", "--model", "stabilityai/stable-diffusion-3.5-medium"]) == 0
    assert "flowalign data fetch geneval" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["--benchmarks", "ocr", "occ"], "--benchmarks"),
        (["--limit", "0"], "benchmarks.0.limit"),
        (["--lora", "mine=no/such/folder"], "models.mine"),
        (["sampling.stepz=3"], "sampling.stepz"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_nothing_written(
    tmp_path: Path, given: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["--out", str(out), *given]) == 2
    assert key in capsys.readouterr().err
    assert not out.exists()


def test_the_config_that_it_keeps_is_the_same_evaluation(tmp_path: Path) -> None:
    """Run again from there, nothing is sampled or scored a second time."""
    out = tmp_path / "out"
    flags = ["--lora", "tiny/ocr", "second=tiny/geneval", "--benchmarks", "ocr", "--limit", "2"]
    assert main(["--out", str(out), *flags, "sampling.steps=2"]) == 0
    table = (out / "table.md").read_text()
    assert "| ocr |" in table and "| second |" in table
    rows = {path: path.stat().st_mtime_ns for path in out.glob("images/*/*/scores_*/rows*")}
    assert len(rows) == 3
    assert main(["--config", str(out / "eval.yaml")]) == 0
    assert (out / "table.md").read_text() == table
    assert {path: path.stat().st_mtime_ns for path in rows} == rows
