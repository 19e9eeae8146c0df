"""How long one process waits for another."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fakes
import pytest
from torch.distributed import distributed_c10d as c10d

from flowalign.config import to_yaml
from flowalign.training.run import processes
from flowalign.training.run.processes import TIMEOUT
from flowalign.training.run.ranks import MARGIN


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What accelerate's state is made with: it makes the group, before any accelerator is there."""
    from accelerate import state

    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    options: dict[str, Any] = {}
    real = state.PartialState.__init__

    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        options.update({} if self.initialized else kwargs)
        real(self, cpu, **kwargs)

    monkeypatch.setattr(state.PartialState, "__init__", init)
    yield options
    fakes.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("stages", "seconds"), [([7, 9.5], 9.5), ([7, "null"], TIMEOUT)])
def test_the_longest_time_of_all_stages_reaches_the_process_group(
    tmp_path: Path, given: dict[str, Any], stages: list[Any], seconds: float
) -> None:
    keys = [f"train.timeout_seconds={stage}" for stage in stages]
    processes.state(*[fakes.settings("tiny", tmp_path / "run", key) for key in keys])
    assert given == {"timeout": timedelta(seconds=seconds + MARGIN)}


class Timed:
    """Redness that tells how long its process's group waits, once; and sleeps for `seconds` in the
    second process at its first call."""

    def __init__(self, folder: str, seconds: float = 0.0) -> None:
        self.folder, self.seconds, self.calls = Path(folder), seconds, 0

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        group, rank = c10d._get_default_group(), c10d.get_rank()
        self.calls += 1
        if self.calls == 1:
            timeout = group._get_backend(images.device).options._timeout
            (self.folder / f"timeout_{rank}").write_text(str(timeout.total_seconds()))
            if rank == 1:
                time.sleep(self.seconds)
        return fakes.redness(images, prompts, metadata)


@pytest.mark.slow
def test_a_reward_that_hangs_in_one_process_is_masked_and_the_other_waits(
    random_model: str, tmp_path: Path
) -> None:
    options = f"tasks.0.reward.options={{folder: {tmp_path}, seconds: 600}}"
    given = ["tasks.0.reward.name=test_timeouts:Timed", options, "train.updates=1",
             "train.max_invalid_share=0.6", "train.score_seconds=4"]  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(fakes.settings(random_model, tmp_path / "run", *given)))
    began = time.monotonic()
    done = fakes.launch(fakes.ROOT / "train.py", "--config", path, seconds=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - began < 100
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["invalid_share"] == 0.5
    timeouts = [float((tmp_path / f"timeout_{rank}").read_text()) for rank in (0, 1)]
    assert timeouts == [TIMEOUT + MARGIN] * 2
