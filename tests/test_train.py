"""The entry point: what it refuses before it loads a model, and what it says."""

import logging
import re
from pathlib import Path

import fakes
import pytest
from fakes import command

import flowalign
from flowalign.config import to_yaml

ROOT = Path(__file__).parent.parent


def config_file(model: str, output: Path, *overrides: str, reward: str = "redness") -> Path:
    path = output.parent / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(fakes.settings(model, output, *overrides, reward=reward)))
    return path


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=fast", "optimizer.lr: got the text 'fast'"),
        ("tasks.0.reward.name=fakes:greenness", "tasks.0.reward: .* no attribute 'greenness'"),
    ],
)
def test_a_wrong_config_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    path = config_file(str(tmp_path / "no_model"), tmp_path / "run")
    assert command("--config", path, override) == 2
    message = capsys.readouterr().err
    assert re.search(said, message)
    assert "no_model" not in message
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_a_run_says_where_it_starts(random_model, tmp_path, caplog) -> None:
    init = fakes.teachers(random_model, tmp_path)["even"]
    path = config_file(random_model, tmp_path / "run", f"lora={{rank: 32, init: {init}}}")
    with caplog.at_level(logging.INFO, logger="flowalign"):
        assert command("--config", path, "train.updates=1") == 0
    assert f"starts from {init}: its rank (2)" in caplog.text


def test_a_model_that_is_not_there_is_one_line_and_no_traceback(tmp_path, capsys) -> None:
    path = config_file(str(tmp_path / "no_model"), tmp_path / "run")
    assert command("--config", path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no_model'" in line and "Give `tiny`" in line


def test_a_run_leaves_an_adapter_that_loads_and_is_not_overwritten(
    random_model: str, tmp_path: Path, capsys, caplog
) -> None:
    path, output = config_file(random_model, tmp_path / "run"), tmp_path / "run"
    # --resume: as job scripts say always
    assert command("--config", path, "--resume", "train.updates=1") == 0
    assert f"--resume: no checkpoint in {output}/checkpoints" in caplog.text
    pipe = flowalign.load(random_model, lora=output / "adapter")
    assert pipe.get_list_adapters() == {"transformer": ["default_0"]}
    assert command("--config", path) == 2
    assert "holds the checkpoints of a run. Continue it with --resume" in capsys.readouterr().err
    caplog.clear()
    assert command("--config", path, "--resume", "train.updates=2") == 0
    assert (output / "checkpoints" / "update_000002").is_dir()
    assert "--resume" not in caplog.text
