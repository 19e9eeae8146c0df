"""`flowalign train --dry-run`: the doctor, which writes nothing and loads no weight."""

from pathlib import Path

import fakes
import pytest
import test_recipe
import torch
from accelerate.state import AcceleratorState

from flowalign import config
from flowalign.commands.cli import main
from flowalign.system import manifest
from flowalign.training.run import resume


@pytest.fixture(autouse=True)
def _fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """{path: (size, time of change)} of everything below."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.stat()
        found[str(path)] = (stat.st_size, stat.st_mtime_ns)
    return found


@pytest.fixture
def recipe(random_model, tmp_path):
    """The file of a recipe: two teachers, their merge, a student and a table."""
    return test_recipe.written(random_model, tmp_path)


@pytest.mark.slow
def test_it_is_the_doctor_without_weights_and_writes_nothing(recipe, capsys, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    loaded = []
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *a, **k: loaded.append(a))
    before = tree(recipe.parent)
    assert main(["train", "--config", str(recipe), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert main(["doctor", "--config", str(recipe), "--no-model"]) == 0
    assert capsys.readouterr().out == printed and "H100" not in printed
    assert tree(recipe.parent) == before and not loaded
    for name in ("first (grpo)", "second (grpo)", "student (opd)", "table (eval)"):
        assert printed.count(f"\n{name}\n") == 1
    assert printed.count("\n│ merge ") == printed.count("\n│ sum ") == 1
    assert main(["train", "--config", str(recipe), "--dry-run", "--gpu", "4090"]) == 0
    assert "RTX 4090" in capsys.readouterr().out
    assert main(["train", "--config", str(recipe), "--dry-run", "--gpu", "4091"]) == 2
    assert "--gpu" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["tasks.0.prompts=no.txt", "lora.init=nowhere", "optimizer.lrr=1"])
def test_it_refuses_what_train_refuses(random_model, tmp_path, capsys, key):
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(fakes.settings(random_model, tmp_path / "run")))
    for more in ([], ["--dry-run"]):
        assert main(["train", "--config", str(path), *more, key]) == 2
        assert key.split("=")[0].rsplit(".", 1)[0] in "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_finished_run_is_continued_only_by_resume(random_model, tmp_path, capsys):
    run = fakes.settings(random_model, tmp_path / "run")
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(run))
    saved = tmp_path / "run" / "checkpoints" / "update_000001"
    saved.mkdir(parents=True)
    manifest.write_manifest(saved, {"update": 1, "processes": 1, **resume.identity(run)})
    (tmp_path / "run" / "config.yaml").write_text(config.to_yaml(run))
    for command in (["doctor", "--no-model"], ["train", "--dry-run"]):
        assert main([command[0], "--config", str(path), *command[1:]]) == 2
        assert "output: " in "".join(capsys.readouterr())
        assert main([command[0], "--config", str(path), *command[1:], "--resume"]) == 0
