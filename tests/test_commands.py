"""The `flowalign` command: paths in its arguments, errors, imports and warnings."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from flowalign import rewards
from flowalign.commands import cli
from flowalign.system import packages
from flowalign.system.exit import silenced

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "words",
    [
        "train --config c.yaml output=$A/x", "train --config $A/c.yaml",
        "eval --out x --lora a=$A/x", "eval compare $A/a.json b.json", "sample cat --out=$A/x.png",
        "merge $A/a b --out x", "data fetch ocr --out=$A", "watch $A/x",
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
    for name in ("x_train.txt", "x_val.txt"):
        (tmp_path / "home/data").mkdir(parents=True, exist_ok=True)
        (tmp_path / "home/data" / name).write_text('a sign that says "LAMP"\n')
    prompts = ["--prompts=~/data/x_train.txt"]  # the validation set lies beside it
    assert cli.main(["init", "--stage=grpo", "--reward=ocr", *prompts, "--out=~/c.yaml"]) == 0
    assert "validation: " in (tmp_path / "home/c.yaml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (packages.MissingPackage("no x"), 2)]
)
def test_what_ends_a_command_early_is_one_line(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr("flowalign.commands.prompts.fetch.main", fail)
    assert cli.main(["data", "list"]) == status
    assert len(capsys.readouterr().err.splitlines()) == 1


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
