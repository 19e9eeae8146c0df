"""The `flowalign` command as its script runs it: sys.path begins with the script's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest

from flowalign import __version__, rewards
from flowalign.commands import cli
from flowalign.system import packages
from flowalign.system.exit import silenced

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """The command; started in a folder `here`, which is not on sys.path."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    path = tmp_path / "bin" / "flowalign"
    path.write_text("import sys\nfrom flowalign.commands.cli import main\nsys.exit(main())\n")
    return [sys.executable, str(path)]


def test_a_wrong_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, hint in (("trian", "'train'"), ("push", "hf upload")):
        assert cli.main([wrong]) == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "train --config c.yaml output=$A/x", "train --config $A/c.yaml",
        "eval --out=$A/x", "eval --out x --lora a=$A/x",
        "eval --out x --benchmarks ocr --images a=$A/x",
        "eval compare $A/a.json b.json", "sample cat --out=$A/x.png", "sample cat --model=$A/x",
        "merge a b --out=$A/x", "merge $A/a b --out x", "data fetch geneval --out=$A",
        "data generate ocr --count 4 --out=$A/x.txt",
        "init --stage grpo --out=$A/x.yaml", "watch $A/x", "doctor --reward similarity images=$A/x",
    ],
)  # fmt: skip
def test_a_variable_in_a_path_is_refused_and_nothing_is_written(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ROOT / "configs" / "tiny" / "teacher_ocr.yaml"
    try:
        status = cli.main(words.replace(" c.yaml", f" {config}").split())
    except SystemExit as end:  # argparse
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and "$A" in error, error
    assert not list(tmp_path.iterdir())


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli.main("data generate ocr --count 4 --out=~/data/x_train.txt".split()) == 0
    prompts = ["--prompts=~/data/x_train.txt"]  # the validation set lies beside it
    assert cli.main(["init", "--stage=grpo", "--reward=ocr", *prompts, "--out=~/c.yaml"]) == 0
    assert "validation: " in (tmp_path / "home/c.yaml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_the_version_names_what_matters_and_where_it_lies(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == 0
    said = capsys.readouterr().out
    assert f"flowalign {__version__} ({ROOT / 'flowalign'})" in said
    assert f"torch {metadata.version('torch')}" in said and "diffusers" in said


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (packages.MissingPackage("no x"), 2)]
)
def test_what_ends_a_command_early_is_one_line(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr("flowalign.commands.prompts.cli.main", fail)
    assert cli.main(["data", "list"]) == status
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_ctrl_c_ends_a_served_reward_with_one_line(script: list[str], tmp_path: Path) -> None:
    command = [*script, "serve-reward", "geneval", "detector=tiny", "--port", "0"]
    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background
    ) as server:  # ignores it, and so do the processes that it starts
        try:
            assert server.stdout and "serving reward" in server.stdout.readline()
            server.send_signal(signal.SIGINT)
            _, said = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 130
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(  # rich prints the first line, `print` what follows
    "lines", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_reader_that_leaves_ends_a_command_without_a_word(script: list[str], lines: int) -> None:
    config = str(ROOT / "configs/tiny/teacher_ocr.yaml")
    plan = [*script, "doctor", "--config", config, "--no-model"]
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        plan, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE, said
    assert "Traceback" not in said and "exit(" not in said, said


def test_a_module_in_the_current_folder_comes_before_one_beside_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in ("here", "config"):
        (tmp_path / folder).mkdir()
        for name in ("my_first", "json"):  # json: Python's own is not replaced
            (tmp_path / folder / f"{name}.py").write_text(f"def at_{folder}(): ...")
    (tmp_path / "config" / "my_second.py").write_text("def at_config(): ...")
    monkeypatch.chdir(tmp_path / "here")
    before = len(sys.path)
    with pytest.raises(ValueError, match="No module named 'my_second'"):
        rewards.load("my_second:at_config")
    rewards.add_config_folder(tmp_path / "config" / "run.yaml")
    assert rewards.load("my_first:at_here") and rewards.load("my_second:at_config")
    assert sys.path[before:] == [str(tmp_path / "here"), str(tmp_path / "config")]
    with pytest.raises(ValueError, match="'json' has no"):
        rewards.load("json:at_here")
    for name in ("my_first", "my_second"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["sample", "a cat"], marks=pytest.mark.slow),
        pytest.param(["doctor", "--reward", "geneval"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_libraries_say_nothing_on_stderr(script: list[str], tmp_path: Path, arguments: list[str]):
    command, folder = [*script, *arguments], tmp_path / "here"
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0
    assert all(line.startswith("tiny: ") for line in done.stderr.splitlines())  # ours, of sample


def warning_of(module: str) -> list[str]:
    """What a warning that comes from this module shows in a command."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()  # as Python starts
        with silenced():
            warnings.warn_explicit("x", UserWarning, f"{module}.py", 1, module=module)
    return [str(warning.message) for warning in shown]


def test_warnings_of_libraries_are_not_shown_and_others_are() -> None:
    assert warning_of("transformers.models.clip") == []
    assert warning_of("torch") == []
    for module in ("torchy", "my_rewards", "flowalign.training.loop"):
        assert warning_of(module) == ["x"]
