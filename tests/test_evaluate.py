"""`flowalign eval` without a config."""

from pathlib import Path

import fakes
import pytest
import torch
from PIL import Image

from flowalign import rewards
from flowalign.commands.evaluate import main, more_benchmarks, parser, raw_config
from flowalign.config import BenchmarkConfig


def test_it_lists_what_there_is_and_what_must_be_fetched(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "| ocr | tiny/ocr_test |" in listed and "| 1 | geneval |" in listed
    assert main(["list", "--model", "stabilityai/stable-diffusion-3.5-medium"]) == 0
    published = capsys.readouterr().out
    assert "flowalign data fetch geneval" in published
    assert main(["list", "--model", str(tmp_path)]) == 0
    assert "is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["--benchmarks", "ocr", "occ"], "--benchmarks: no 'occ'. Did you mean 'ocr'?"),
        (["--lora", "tiny/ocrr"], "Did you mean 'tiny/ocr'?"),
        (["--limit", "0"], "benchmarks.0.limit"),
        (["--images", "x"], "--images: name the benchmarks"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_nothing_written(
    tmp_path: Path, given: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["--out", str(out), *given]) == 2
    assert key in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("side", "model", "is_tiny"),
    [(96, [], True), (512, [], False), (512, ["--model", "tiny"], True)],
)
def test_judges_follow_the_size_of_the_images(
    tmp_path: Path, side: int, model: list[str], is_tiny: bool
) -> None:
    Image.new("RGB", (side, side)).save(tmp_path / "0.png")
    (tmp_path / "0.txt").write_text("a sign")
    names = ["geneval", "ocr", "preference", "cvtg2k", "longtext", "longtext_zh", "panel"]
    given = ["--out", "out", "--images", f"x={tmp_path}", "--benchmarks", *names, *model]
    for benchmark in raw_config(parser().parse_args(given))["benchmarks"]:
        assert benchmark["prompts"].startswith("tiny/")
        judges = BenchmarkConfig(**benchmark).judges
        text = str([judge.options for judge in judges.values()])
        assert ("tiny" in text or "96" in text) == is_tiny, benchmark


def test_a_judge_that_shrinks_images_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    shrinks = rewards.build("ocr", limit_side_len=96, limit_type="max")
    tiny = rewards.build("pickscore", model="tiny")
    for side, reward, times in ((96, shrinks, 0), (200, shrinks, 1), (200, tiny, 1)):
        caplog.clear()
        for _ in range(2):
            rewards.score(reward, torch.ones(1, 3, side, side), ["a"], [{"target": "OK"}])
        assert caplog.text.count(f"{side}x{side}") == times
        assert not times or reward.name in caplog.text


@pytest.mark.parametrize("model", ["stabilityai/stable-diffusion-3.5-medium", "tiny"])
def test_the_judges_of_other_benchmarks_are_rewards_with_options_that_they_take(model: str) -> None:
    for raw in more_benchmarks(model).values():
        for judge in BenchmarkConfig(**raw).judges.values():
            rewards.RewardSpec(judge.name, judge.options).check()


@pytest.mark.slow
def test_the_config_that_it_keeps_is_the_same_evaluation(tmp_path: Path) -> None:
    """Run again from there, nothing is sampled or scored a second time."""
    out = tmp_path / "out"
    flags = ["--lora", "tiny/ocr", "--lora", "second=tiny/geneval", "--benchmarks", "ocr"]
    flags += ["--limit", "2"]
    assert main(["--out", str(out), *flags, "sampling.steps=2"]) == 0
    table = (out / "table.md").read_text()
    assert "| ocr |" in table and "| second |" in table
    rows = {path: path.stat().st_mtime_ns for path in out.glob("images/*/*/scores_*/rows*")}
    assert len(rows) == 3
    assert main(["--config", str(out / "eval.yaml")]) == 0
    assert (out / "table.md").read_text() == table
    assert {path: path.stat().st_mtime_ns for path in rows} == rows


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path, capsys, monkeypatch):
    """As `accelerate launch --multi_gpu` starts them where there is no GPU."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--config", str(fakes.evaluation("tiny", tmp_path, ["a"]))]) == 2
    said = capsys.readouterr().err
    assert "2 processes were started" in said and "configs/accelerate/ddp_2cpu.yaml" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["", "--config a --out b", "--out a --variant b"])
def test_flags_that_would_not_count_are_refused(words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and "--config" in capsys.readouterr().err
