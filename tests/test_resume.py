"""A checkpoint proves itself: what is damaged or foreign is skipped, and the end is the same."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import command
from safetensors.torch import load_file, save_file

from flowalign.config import ADAPTER, to_yaml
from flowalign.system import manifest
from flowalign.training.run import resume
from flowalign.training.run.checkpoint import Checkpoints

Damage = Callable[[Path], object]
EVALUATED = ["evaluation={every: 1, prompts: 2}", "train.checkpoint_every=1", "train.updates=3",
             "train.sample_every=1", "rollout.steps=2"]  # fmt: skip


def config_file(model: str, folder: Path, *overrides: str) -> Path:
    held_out = f"tasks.0.validation={folder / 'prompts.txt'}"
    given = fakes.settings(model, folder / "run", held_out, *EVALUATED, *overrides)
    (folder / "config.yaml").write_text(to_yaml(given))
    return folder / "config.yaml"


def end(run: Path) -> dict[str, Any]:
    """What a run leaves, without seconds."""
    manifest.check_manifest(run / "adapter")
    weights = load_file(run / "adapter" / ADAPTER)
    adapter = {key: value.numpy().tobytes() for key, value in weights.items()}
    samples = {p.name: p.read_bytes() for p in (run / "samples").glob("*.json")}
    scores = (run / "adapter" / "scores.json").read_text()
    return {**adapter, **samples, "log": fakes.timeless(run), "scores": scores}


@pytest.fixture(scope="module")
def whole(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("whole")
    assert command("--config", config_file(random_model, folder)) == 0
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of its folder, as if it had been killed at its end."""
    return Path(shutil.copytree(whole / "run", tmp_path / "run"))


def go(whole: Path, run: Path, *argv: str) -> int:
    flags = sorted(argv)  # argparse wants the overrides last
    return command("--config", whole / "config.yaml", *flags, f"output={run}")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "bit": lambda folder: flipped(folder / "ema.safetensors"),
    "missing": lambda folder: (folder / "rng_0.json").unlink(),
    "empty": lambda folder: (shutil.rmtree(folder), folder.mkdir())[1],
    "older one's": lambda folder: (
        shutil.rmtree(folder),
        shutil.copytree(folder.with_name("update_000002"), folder),
    )[0],
}


@pytest.mark.parametrize(
    "damage", [name if name == "bit" else pytest.param(name, marks=pytest.mark.slow)
               for name in DAMAGES]
)  # fmt: skip
def test_a_damaged_checkpoint_is_skipped_and_the_end_is_the_same(
    whole: Path, run: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run / "checkpoints" / "update_000003"
    DAMAGES[damage](newest)
    shutil.copytree(newest.with_name("update_000001"), newest.with_name("update_000009.bak"))
    newest.with_name("update_000010").touch()  # no folder
    flipped(run / "adapter" / ADAPTER)
    (run / ".adapter.0123456789ab.part").mkdir()
    (run / "samples" / "update_000012.png").touch()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:9], "[" * 99_999]))
    assert go(whole, run, "--resume") == 0
    (said,) = [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]
    assert str(newest) in said and "continues from update_000002" in said
    assert end(run) == end(whole / "run")
    manifest.check_manifest(newest)  # written again
    assert not [*run.rglob(".*")] and not (run / "samples" / "update_000012.png").exists()


def test_without_a_sound_checkpoint_of_this_config_the_run_is_refused(
    whole: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = end(run)
    (run / "config.yaml").unlink()
    assert go(whole, run, "--resume", "optimizer.lr=0.5") == 2
    assert "optimizer.lr (was 0.001, is 0.5)" in capsys.readouterr().err
    for folder in resume.checkpoints(run):
        (folder / "progress.json").write_text("{}")
    assert go(whole, run, "--resume") == 2
    assert capsys.readouterr().err.count("progress.json has 2 bytes") == 3
    assert end(run) == before


@pytest.mark.slow
@pytest.mark.parametrize("flag", [["--resume"], []])
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    whole: Path, run: Path, flag: list[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "adapter" / "README.md").unlink()  # a run writes it at its end
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]) + '{"upd')
    assert go(whole, run, *flag) == 0
    assert end(run) == end(whole / "run")


def test_the_log_of_another_run_is_refused(whole: Path, run: Path, capsys) -> None:
    shutil.rmtree(run / "checkpoints")
    before = end(run)
    for argv in ([], ["optimizer.lr=0.5"], ["--resume", "optimizer.lr=0.5"]):
        assert go(whole, run, *argv) == 2
        assert "output: " in capsys.readouterr().err
    (run / "metrics.jsonl").rename(run / "log")  # an adapter without a log
    (run / "config.yaml").write_text("{")
    assert go(whole, run) == 2
    (run / "log").rename(run / "metrics.jsonl")
    assert go(whole, run) == 2 and end(run) == before


@pytest.mark.slow
def test_a_teacher_that_was_replaced_is_named(random_model, tmp_path, capsys) -> None:
    given = fakes.distillation(random_model, tmp_path / "run", "train.updates=1")
    (tmp_path / "config.yaml").write_text(to_yaml(given))
    assert command("--config", tmp_path / "config.yaml") == 0
    odd, even = (tmp_path / name / ADAPTER for name in ("odd", "even"))
    shutil.move(odd, tmp_path / "before")
    shutil.copy(even, odd)
    assert command("--config", tmp_path / "config.yaml", "--resume", "train.updates=2") == 2
    said = capsys.readouterr().err
    assert "teachers.odd: " in said and "has changed" in said
    shutil.move(tmp_path / "before", odd)
    assert command("--config", tmp_path / "config.yaml", "--resume", "train.updates=2") == 0


@pytest.mark.slow
def test_a_base_model_that_was_replaced_is_named(random_model, tmp_path, capsys) -> None:
    model = tmp_path / "model"
    shutil.copytree(random_model, model)
    path = config_file(str(model), tmp_path, "train.updates=1", "evaluation=null")
    assert command("--config", path) == 0
    (weights,) = (model / "transformer").glob("*.safetensors")
    changed = {key: value + 1e-3 for key, value in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    assert command("--config", path, "--resume", "train.updates=2") == 2
    assert "model.id: the weights of" in capsys.readouterr().err


def save(checkpoints: Checkpoints, update: int) -> Path:
    weights = {"adapter": [torch.full((2,), float(update))]}
    return checkpoints.save(update, tensors=weights, states={}, progress={})


def test_what_is_in_the_way_of_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1)
    (checkpoints.run.checkpoints / "update_000002").mkdir()
    manifest.check_manifest(save(checkpoints, 2))
    assert [path.name for path in checkpoints.run.checkpoints.iterdir()] == ["update_000002"]


def test_a_resumed_run_rotates_what_a_killed_one_did_not(tmp_path: Path) -> None:
    several, one = Checkpoints(tmp_path, 3), Checkpoints(tmp_path, 1)
    folders = [save(several, update) for update in (1, 2)]
    one.restore(folders[1], 2, 2)
    assert one.all() == folders[1:]


def test_rotation_keeps_a_sound_checkpoint_rather_than_one_that_claims_to_be_newer(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, 1)
    flipped(save(checkpoints, 7) / "adapter.safetensors")
    save(checkpoints, 4)
    save(checkpoints, 5)
    assert [path.name for path in checkpoints.all()] == ["update_000005", "update_000007"]


@pytest.mark.slow
def test_another_number_of_processes_is_refused_unless_it_is_allowed(
    whole: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in resume.checkpoints(run):
        sealed = manifest.read_manifest(folder)
        manifest.write_manifest(folder, {**sealed.about, "processes": 2}, sealed.files)
    assert go(whole, run, "--resume") == 2
    assert "--resume: " in (said := capsys.readouterr().err) and "--allow-world-change" in said
    assert "2 process(es)" in said
    assert go(whole, run, "--resume", "--allow-world-change") == 0


@pytest.mark.slow
def test_a_run_goes_on_with_more_and_with_fewer_processes(random_model: str, tmp_path: Path):
    """To the numbers of one process, but for rounding (Adam's eps hides what it would blow up)."""
    shared = ["evaluation=null", "optimizer.eps=1.0", "optimizer.lr=30.0"]
    path = config_file(random_model, tmp_path, *shared)

    def one(run: Path, *argv: str) -> int:
        return command("--config", path, *sorted(argv), f"output={run}")

    def two(run: Path, *argv: str) -> Any:
        given = ["--config", path, *sorted(argv), f"output={run}"]
        return fakes.launch(fakes.ROOT / "train.py", *given)

    expected, fewer, more = (tmp_path / name for name in ("whole", "fewer", "more"))
    assert one(expected, "train.updates=2") == 0
    assert two(fewer, "train.updates=1").returncode == 0
    assert one(fewer, "--resume", "--allow-world-change", "train.updates=2") == 0
    assert one(more, "train.updates=1") == 0
    assert two(more, "--resume", "--allow-world-change", "train.updates=2").returncode == 0
    weights = load_file(expected / "adapter" / ADAPTER)
    for run in (fewer, more):
        found = load_file(run / "adapter" / ADAPTER)
        for key, value in weights.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)
