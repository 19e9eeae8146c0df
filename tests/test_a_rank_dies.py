"""A process that dies ends the run of all in bounded time, and the run goes on from its last
checkpoint to the very numbers of one that nobody killed."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from flowalign.config import to_yaml

LIMIT = 150  # seconds that a launch may take on a slow machine


class Deadly:
    """Noisy redness that ends its own process in the middle of a run, once: while `fatal` lies
    there."""

    def __init__(self, fatal: str, call: int, how: str) -> None:
        self.fatal, self.call, self.how, self.calls = Path(fatal), call, how, 0

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        self.calls += 1
        if self.calls == self.call and c10d.get_rank() == 1 and self.fatal.exists():
            self.fatal.unlink()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(9)
        return fakes.noisy_redness(images, prompts, metadata)


def launched(folder: Path, model: str, how: str, *argv: str) -> Any:
    options = f"tasks.0.reward.options={{fatal: {folder / 'fatal'}, call: 4, how: {how}}}"
    given = ["tasks.0.reward.name=test_a_rank_dies:Deadly", options, "train.updates=4",
             "train.checkpoint_every=2"]  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(to_yaml(fakes.settings(model, folder / "run", *given)))
    return fakes.launch(fakes.ROOT / "train.py", "--config", path, *argv, seconds=LIMIT)


def state(folder: Path) -> dict[str, Any]:
    """Weights, average, optimizer and generators at the end, and the log without times."""
    last = folder / "run" / "checkpoints" / "update_000004"
    found: dict[str, Any] = {
        f"{path.stem}.{key}": value
        for path in sorted(last.glob("*.safetensors"))
        for key, value in load_file(path).items()
    }
    states = torch.load(last / "states.pt", weights_only=True)["optimizer"]["state"]
    found |= {f"{i}.{key}": value for i, each in states.items() for key, value in each.items()}
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    found["log"] = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_dies_ends_the_run_which_then_goes_on(
    random_model: str, tmp_path: Path, how: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert launched(whole, random_model, how).returncode == 0
    (killed / "fatal").touch()
    began = time.monotonic()
    done = launched(killed, random_model, how)
    assert done.returncode not in (0, None)
    assert not (killed / "fatal").exists()  # it did die
    assert time.monotonic() - began < LIMIT / 2
    saved = {path.name for path in (killed / "run" / "checkpoints").iterdir()}
    assert saved == {"update_000002"}
    resumed = launched(killed, random_model, how, "--resume")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    found, expected = state(killed), state(whole)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(found[key], value) if key != "log" else found[key] == value
        assert same, key
