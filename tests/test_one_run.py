"""One run at a time in an output folder, which can be written."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fakes
import pytest

from flowalign.backbone import Backbone
from flowalign.commands import train
from flowalign.commands.evaluate import main as evaluate
from flowalign.config import ConfigError, to_yaml
from flowalign.config.safe_yaml import dump_yaml, load_yaml
from flowalign.system.folder import RunFolder
from flowalign.training.run import lock

HOLD = """import sys, time
from flowalign.training.run import lock
with lock.holding(sys.argv[1]):
  print()
  time.sleep(99)"""


@pytest.mark.slow
def test_a_folder_is_held_once_and_free_when_the_holder_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-uc", HOLD, str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(fakes.ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "\n"
        for refuse in (lock.check_free, lambda folder: lock.holding(folder).__enter__()):
            with pytest.raises(ConfigError, match="output.* is in use"):
                refuse(tmp_path / "run")
        process.kill()
    lock.check_free(tmp_path / "run")
    with lock.holding(tmp_path / "run"), pytest.raises(ConfigError, match="is in use"):
        lock.holding(tmp_path / "run").__enter__()
    assert not any((tmp_path / "run").iterdir())
    with lock.holding(tmp_path / "new" / "run"):
        pass
    assert not (tmp_path / "new").exists()


def test_what_a_killed_run_left_does_not_hold(tmp_path: Path) -> None:
    RunFolder(tmp_path).lock.touch()
    lock.check_free(tmp_path)


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog) -> None:
    def missing(self: Any) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("filelock.FileLock._acquire", missing)
    with lock.holding(tmp_path):
        assert "no locks available" in caplog.text


def command(kind: str, model: str, output: Path) -> list[str]:
    """The arguments of `train` or `eval` that write into a folder."""
    if kind == "eval":
        path = fakes.evaluation(model, output.parent, fakes.PROMPTS[:1], output=str(output))
        return ["--config", str(path)]
    found = fakes.settings(model, output.parent / "probe" / "run")
    data = load_yaml(to_yaml(found)) | {"output": str(output)}
    if kind == "recipe":
        own = {key: data.pop(key) for key in ("model", "output")}
        data = {"stage": "recipe", **own, "stages": {"one": data}}
    path = output.parent / f"{kind}.yaml"
    path.write_text(dump_yaml(data))
    return ["--config", str(path)]


def refused(kind: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with status 2."""
    assert (evaluate if kind == "eval" else train.main)(given) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", ["train", "eval", "recipe"])
def test_a_second_command_in_the_folder_is_refused(random_model, tmp_path, capsys, kind: str):
    given = command(kind, random_model, tmp_path / "run")
    with lock.holding(tmp_path / "run"):
        assert "is in use" in refused(kind, given, capsys)
        assert {*(tmp_path / "run").iterdir()} == {RunFolder(tmp_path / "run").lock}


@pytest.mark.parametrize(
    ("kind", "output"),
    [("train", "file"), ("train", "file/run"), ("train", "/proc/run"), ("eval", "file/run"),
     ("recipe", "/proc/run")],
)  # fmt: skip
def test_an_output_that_is_a_file_or_cannot_be_written_is_refused(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, output: str
) -> None:
    (tmp_path / "file").write_text("mine")
    given = [*command(kind, random_model, tmp_path / "run"), f"output={tmp_path / output}"]
    assert "output" in refused(kind, given, capsys)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("train", "tensorboard"), ("train", "samples"), ("recipe", "checkpoints"), ("eval", "images")],
)
def test_a_subfolder_that_cannot_be_written_is_refused_before_the_model_is_read(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str,
) -> None:  # fmt: skip
    """A file in its place: no user can make a folder there."""
    folder = tmp_path / "run" / "one" if kind == "recipe" else tmp_path / "run"
    given = command(kind, random_model, tmp_path / "run")
    folder.mkdir(parents=True)
    (folder / name).write_text("mine")
    monkeypatch.setattr(Backbone, "load", lambda *_, **__: pytest.fail("a model is read"))
    said = refused(kind, given, capsys)
    assert "output" in said and str(folder / name) in said
    assert (folder / name).read_text() == "mine"


@contextmanager
def no_root() -> Iterator[None]:
    """Inside the `with`, this process is not root, whom no mode keeps out."""
    user = os.getuid()
    os.setresuid(user or 65534, user or 65534, user)
    try:
        yield
    finally:
        os.setresuid(user, user, user)


users = pytest.mark.skipif(not hasattr(os, "setresuid"), reason="this system has no setresuid")


@users
@pytest.mark.parametrize("name", ["", "checkpoints", "tensorboard/runs", "metrics.jsonl"])
def test_what_a_user_cannot_write_is_named(name: str) -> None:
    with tempfile.TemporaryDirectory() as parent:  # nobody could look into pytest's folder
        run = Path(parent) / "run"
        for folder in ("", "checkpoints", "tensorboard/runs", "notes"):
            (run / folder).mkdir(parents=True, exist_ok=True)
        for file in ("metrics.jsonl", "config.yaml"):
            (run / file).touch()
        for path in (Path(parent), run, *run.rglob("*")):
            path.chmod(0o777)
        (run / "notes").chmod(0o555)  # which no run writes
        (run / "config.yaml").chmod(0o444)  # another takes its place
        with no_root():
            assert lock.unwritable(run) is None
        (run / name).chmod(0o555)
        with no_root():
            assert lock.unwritable(run) == run / name
        (run / name).chmod(0o777)


@users
def test_a_folder_that_a_user_cannot_write_is_refused() -> None:
    """Also where the lock of the run before is still there, or one cannot be made at all."""
    with tempfile.TemporaryDirectory() as parent:
        run = Path(parent) / "run"
        run.mkdir()
        RunFolder(run).lock.touch()
        RunFolder(run).lock.chmod(0o666)
        run.chmod(0o555)
        Path(parent).chmod(0o555)
        with no_root():
            assert lock.unwritable(run / "new") == run
            for folder in (run, run / "new"):
                with pytest.raises(ConfigError, match="output.*cannot be written"):
                    lock.check_free(folder)
        Path(parent).chmod(0o755)
        run.chmod(0o755)
