"""The entry point: what it refuses before it loads a model, and processes that act as one."""

import json
import logging
import re
from pathlib import Path

import fakes
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import flowalign
from flowalign.commands import run, train
from flowalign.config import ConfigError, to_yaml
from flowalign.training import preflight
from flowalign.training.loop import Loop

ROOT = Path(__file__).parent.parent


def config_file(model: str, output: Path, *overrides: str, reward: str = "redness") -> Path:
    path = output.parent / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(fakes.settings(model, output, *overrides, reward=reward)))
    return path


def main(*argv: object) -> int:
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    return train.main([str(arg) for arg in argv])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=fast", "optimizer.lr: got the text 'fast'"),
        ("tasks.0.reward.name=fakes:greenness", "tasks.0.reward: .* no attribute 'greenness'"),
        ("tasks.0.prompts=nowhere.txt", "tasks.0.prompts: no prompt set 'nowhere.txt'"),
        ("optimizer.updates_per_rollout=2 rollout.prompts=3", "rollout.prompts: 3 prompts"),
    ],
)
def test_a_wrong_config_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    path = config_file(str(tmp_path / "no_model"), tmp_path / "run")
    assert main("--config", path, *override.split(" ")) == 2
    message = capsys.readouterr().err
    assert re.search(said, message)
    assert "no_model" not in message
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("lora", "ignored"),
    [
        ({}, []),
        ({"rank": 2, "alpha": 4.0}, []),  # those of the adapter
        ({"rank": 32, "alpha": 64.0}, ["lora.rank", "lora.alpha"]),
        ({"rank": 32}, ["lora.rank"]),
        ({"targets": fakes.TARGETS}, []),
        ({"targets": ["attn.to_q"], "alpha": 4.0}, ["lora.targets"]),
        ({"targets": [*fakes.TARGETS, "ff.net.2"]}, ["lora.targets"]),
    ],
)
def test_keys_that_an_adapter_to_start_from_decides_are_named(
    random_model: str, tmp_path: Path, lora: dict, ignored: list[str]
) -> None:
    """Only what was set: defaults were nobody's wish."""
    init = fakes.teachers(random_model, tmp_path)["even"]
    given = f"lora={json.dumps({**lora, 'init': init})}"
    found = fakes.settings(random_model, tmp_path / "run", given)
    texts = preflight.overruled(found.lora, preflight.Inputs())
    assert [text.split(":")[0] for text in texts] == ignored


@pytest.mark.slow
def test_a_run_says_where_it_starts_and_what_it_ignores(
    random_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    init = fakes.teachers(random_model, tmp_path)["even"]
    path = config_file(random_model, tmp_path / "run", f"lora={{rank: 32, init: {init}}}")
    with caplog.at_level(logging.INFO, logger="flowalign"):
        assert main("--config", path, "train.updates=1") == 0
    said = {level: [r.getMessage() for r in caplog.records if r.levelname == level]
            for level in ("INFO", "WARNING")}  # fmt: skip
    assert any(init in text and "rank 2" in text for text in said["INFO"])
    assert any(text.startswith("lora.rank: ") for text in said["WARNING"])


def test_a_model_that_is_not_there_is_one_line_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(str(tmp_path / "no_model"), tmp_path / "run")
    assert main("--config", path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no_model'" in line and "Give `tiny`" in line


def test_a_run_leaves_an_adapter_that_loads_and_is_not_overwritten(
    random_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, output = config_file(random_model, tmp_path / "run"), tmp_path / "run"
    assert main("--config", path, "--resume", "train.updates=1") == 0  # as job scripts say always
    assert f"--resume: no checkpoint in {output}/checkpoints" in caplog.text
    pipe = flowalign.load(random_model, lora=output / "adapter")
    assert pipe.get_list_adapters() == {"transformer": ["default_0"]}
    assert main("--config", path) == 2
    assert "holds the checkpoints of a run. Continue it with --resume" in capsys.readouterr().err
    assert main("--config", path, "--resume", "optimizer.lr=0.5") == 2
    assert "--resume: optimizer differ" in capsys.readouterr().err
    caplog.clear()
    assert main("--config", path, "--resume", "train.updates=2") == 0
    assert (output / "checkpoints" / "update_000002").is_dir()
    assert "--resume" not in caplog.text


def test_interrupted_and_stopped_runs_say_so(
    random_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = "tasks.0.reward.options={call: 1}"
    path = config_file(random_model, tmp_path / "a" / "run", option, reward="Interrupting")
    assert main("--config", path) == 130
    assert "--resume" in capsys.readouterr().err
    option = "tasks.0.reward.options={rows: [0, 1, 2, 3, 4]}"
    path = config_file(random_model, tmp_path / "b" / "run", option, reward="Faulty")
    assert main("--config", path) == 1
    assert "stopped: the reward failed on 62%" in capsys.readouterr().err


def prompts_of(loop: Loop) -> list[str]:
    return loop.prompts.batch(0).prompts


@pytest.mark.slow
def test_two_processes_do_what_one_does(random_model: str, tmp_path: Path) -> None:
    """Though the second one's images all fail but those of a prompt without spread, so that it
    has other micro-batches and parts of the score than the first."""
    overrides = ["rollout.prompts=4", "rollout.batch_size=16", "grpo.advantage=batch_std",
                 "optimizer.micro_batch=3", "optimizer.eps=1.0", "optimizer.lr=30.0",
                 "train.updates=2", "train.max_invalid_share=0.6"]  # fmt: skip
    probe = fakes.wired(fakes.settings(random_model, tmp_path / "probe" / "run", *overrides))
    bad = [prompts_of(probe)[3]]
    overrides.append(f"tasks.0.reward.options={{bad: {bad!r}, flat: {prompts_of(probe)[2:3]!r}}}")
    start = torch.cat([p.detach().flatten() for p in probe.parameters])
    path = config_file(random_model, tmp_path / "one" / "run", *overrides, reward="Choosy")
    assert main("--config", path) == 0
    expected = processes_agree(path, tmp_path)
    end = torch.cat([expected[str(i)].flatten() for i in range(30)])
    assert len(expected) == 30 and (end - start).abs().max() > 1e-3


@pytest.mark.slow
def test_tasks_of_different_processes_have_their_own_statistics(
    random_model: str, tmp_path: Path
) -> None:
    """Each process holds one task only, and the std of each is still that of one process."""
    given = ["rollout.prompts=2", "rollout.batch_size=8", "grpo.advantage=batch_std",
             "optimizer.micro_batch=4", "optimizer.eps=1.0", "optimizer.lr=30.0",
             "train.updates=2"]  # fmt: skip
    found = fakes.settings(random_model, tmp_path / "one" / "run", *given)
    path = tmp_path / "mixed.yaml"
    path.write_text(to_yaml(fakes.mixed(found)))
    assert main("--config", path) == 0
    processes_agree(path, tmp_path)
    logs = [tmp_path / name / "run" / "metrics.jsonl" for name in ("one", "two")]
    one, two = ([json.loads(line) for line in log.read_text().splitlines()] for log in logs)
    names = [f"task_{what}/{task}" for what in ("reward", "reward_std", "advantage")
             for task in ("red", "vivid")]  # fmt: skip
    for a, b in zip(one, two, strict=True):
        for name in names:
            assert b[name] == pytest.approx(a[name], rel=1e-2, abs=1e-5)


def processes_agree(path: Path, folder: Path) -> dict[str, Tensor]:
    """Run again what was run in folder/one, in two processes: the weights are the same."""
    two = folder / "two" / "run"
    done = fakes.launch(ROOT / "train.py", "--config", path, f"output={two}")
    assert done.returncode == 0, done.stderr
    assert (two / "checkpoints" / "update_000002" / "rng_1.json").exists()  # two, indeed
    found, expected = (
        load_file(folder / name / "run" / "checkpoints" / "update_000002" / "adapter.safetensors")
        for name in ("two", "one")
    )
    assert found.keys() == expected.keys()
    for key in expected:
        assert_close(found[key], expected[key], rtol=0, atol=1e-5)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["opd", "sft"])
def test_two_processes_distil_as_one_does(random_model: str, tmp_path: Path, stage: str) -> None:
    """Labels, cosines of the tasks and the noise of sft belong to the images, not to a process."""
    states = ["student.states={select: random, count: 2}"] if stage == "opd" else []
    given = ["rollout.prompts=4", "rollout.batch_size=16", "optimizer.micro_batch=3",
             "optimizer.eps=1.0", "optimizer.lr=30.0", "train.updates=2"]  # fmt: skip
    one = tmp_path / "one" / "run"
    found = fakes.distillation(random_model, one, *given, *states, stage=stage)
    path = tmp_path / "distil.yaml"
    path.write_text(to_yaml(found))
    assert main("--config", path) == 0
    processes_agree(path, tmp_path)


def test_train_raises_for_its_callers(tmp_path: Path) -> None:
    found = fakes.settings(str(tmp_path), tmp_path / "run", "rollout.prompts=3", "rollout.copies=3")
    with pytest.raises(ConfigError, match="2 processes"):
        run.check_world(found, 2)
