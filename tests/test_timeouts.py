"""How long one process waits for another: longer than a slow reward may take, and not for ever."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fakes
import pytest
from torch.distributed import distributed_c10d as c10d

from flowalign.commands import recipe
from flowalign.config import EvalStage, RecipeStage, TrainingStage, parse, to_yaml
from flowalign.training.run import processes
from flowalign.training.run.ranks import MARGIN
from flowalign.training.run.timeouts import FOREVER, SAMPLING, SLACK, group_timeout

SECONDS = 100.0

TINY = {"id": "tiny", "height": 64, "width": 64}


def grpo(tmp_path: Path, *overrides: str) -> TrainingStage:
    """32 images a rollout in batches of 8."""
    given = ("rollout.prompts=8", f"train.score_seconds={SECONDS:g}", *overrides)
    return fakes.settings("tiny", tmp_path / "run", *given)


def evaluation(tmp_path: Path, *overrides: str) -> EvalStage:
    """Ten prompts of two images in batches of 4 images, two judges."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join("ABCDEFGHIJ"))
    judges = {name: {"name": f"fakes:{name}"} for name in ("redness", "constant")}
    mark = {"name": "a", "prompts": str(prompts), "images": 2, "rewards": judges}
    data = {"stage": "eval", "output": str(tmp_path / "out"), "model": TINY,
            "benchmarks": [mark], "sampling": {"batch_size": 4},
            "score_seconds": SECONDS}  # fmt: skip
    found = parse(data, overrides, stage=EvalStage)
    assert isinstance(found, EvalStage)
    return found


def test_it_covers_every_batch_of_a_rollout_whose_reward_hangs(tmp_path: Path) -> None:
    assert group_timeout(grpo(tmp_path), 1) == SLACK + 4 * SECONDS
    assert group_timeout(grpo(tmp_path), 2) == SLACK + 2 * SECONDS  # a process scores its own
    assert group_timeout(grpo(tmp_path, "train.timeout_seconds=7"), 1) == 7
    assert group_timeout(grpo(tmp_path, "train.score_seconds=null"), 1) == FOREVER


def test_without_a_reward_nobody_waits_for_one(random_model: str, tmp_path: Path) -> None:
    silent = "train.score_seconds=null"
    student = fakes.distillation(random_model, tmp_path / "run", silent)
    assert group_timeout(student, 1) == SLACK
    mixed = fakes.distillation(random_model, tmp_path / "run", silent, "student.reward_weight=1.0")
    assert group_timeout(mixed, 1) == FOREVER


def test_it_covers_an_evaluation_of_which_another_process_has_all_to_do(tmp_path: Path) -> None:
    """Five batches: three for one of two processes; two judges, one after the other."""
    assert group_timeout(evaluation(tmp_path), 1) == SLACK + 5 * (SAMPLING + 2 * SECONDS)
    assert group_timeout(evaluation(tmp_path), 2) == SLACK + 3 * (SAMPLING + 2 * SECONDS)
    assert group_timeout(evaluation(tmp_path, "timeout_seconds=9.5"), 2) == 9.5
    assert group_timeout(evaluation(tmp_path, "score_seconds=null"), 2) == FOREVER


def test_it_covers_the_evaluations_of_a_run(tmp_path: Path) -> None:
    held_out = f"tasks.0.validation={tmp_path / 'prompts.txt'}"
    given = ["evaluation={every: 1, prompts: 5, batch_size: 1}", held_out]
    assert group_timeout(grpo(tmp_path, *given), 1) == SLACK + 5 * (SAMPLING + SECONDS)
    assert group_timeout(grpo(tmp_path, *given), 5) == SLACK + SAMPLING + SECONDS


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What accelerate's state is made with: it makes the group, before any accelerator is there."""
    from accelerate import state

    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    found: dict[str, Any] = {}
    real = state.PartialState.__init__

    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        found.update({} if self.initialized else kwargs)
        real(self, cpu, **kwargs)

    monkeypatch.setattr(state.PartialState, "__init__", init)
    yield found
    fakes.AcceleratorState._reset_state(reset_partial_state=True)


def test_the_time_reaches_accelerates_own_state(tmp_path: Path, given: dict[str, Any]) -> None:
    processes.accelerator(grpo(tmp_path))
    assert given == {"timeout": timedelta(seconds=SLACK + 4 * SECONDS + MARGIN)}


class Enough(Exception):
    """Stops a recipe where its first stage would run."""


def test_the_stages_of_a_recipe_share_the_longest(tmp_path: Path, given: dict[str, Any]) -> None:
    stages = {
        name: grpo(tmp_path, f"train.score_seconds={seconds}").model_dump(mode="json")
        for name, seconds in {"quick": 1, "slow": 50, "quiet": 2}.items()
    }
    data = {"stage": "recipe", "output": str(tmp_path / "out"), "model": TINY,
            "stages": stages}  # fmt: skip

    def train(config: TrainingStage) -> None:
        raise Enough

    with pytest.raises(Enough):
        recipe.run(parse(data, stage=RecipeStage), tmp_path, train, lambda config: None)
    assert given == {"timeout": timedelta(seconds=SLACK + 4 * 50 + MARGIN)}


# In two processes --------------------------------------------------------------------------------


class Timed:
    """Redness that tells how long its process's group waits, once; and sleeps for `seconds` in the
    second process at its first call."""

    def __init__(self, folder: str, seconds: float = 0.0) -> None:
        self.folder, self.seconds, self.calls = Path(folder), seconds, 0

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        group, rank = c10d._get_default_group(), c10d.get_rank()
        self.calls += 1
        if self.calls == 1:
            found = group._get_backend(images.device).options._timeout
            (self.folder / f"timeout_{rank}").write_text(str(found.total_seconds()))
            if rank == 1:
                time.sleep(self.seconds)
        return fakes.redness(images, prompts, metadata)


def launched(tmp_path: Path, model: str, seconds: float, *overrides: str) -> Any:
    """A run of two processes, the second of which is slow."""
    options = f"tasks.0.reward.options={{folder: {tmp_path}, seconds: {seconds}}}"
    given = ["tasks.0.reward.name=test_timeouts:Timed", options, "train.updates=1",
             "train.max_invalid_share=0.6", *overrides]  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(fakes.settings(model, tmp_path / "run", *given)))
    return fakes.launch(fakes.ROOT / "train.py", "--config", path, seconds=120)


@pytest.mark.slow
def test_a_reward_that_hangs_in_one_process_is_masked_and_the_other_waits(
    random_model: str, tmp_path: Path
) -> None:
    given = ["train.score_seconds=4"]
    began = time.monotonic()
    done = launched(tmp_path, random_model, 600.0, *given)
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - began < 100
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["invalid_share"] == 0.5
    config = fakes.settings(random_model, tmp_path / "run", *given)
    expected = group_timeout(config, 2) + MARGIN
    assert [float((tmp_path / f"timeout_{r}").read_text()) for r in (0, 1)] == [expected] * 2


@pytest.mark.slow
def test_a_group_that_waits_too_short_a_time_loses_the_run(
    random_model: str, tmp_path: Path
) -> None:
    """What the derived time prevents."""
    began = time.monotonic()
    done = launched(tmp_path, random_model, 30.0, "train.timeout_seconds=3")
    assert done.returncode != 0 and time.monotonic() - began < 100
    assert float((tmp_path / "timeout_0").read_text()) == 3 + MARGIN
    assert "stopped: rank " in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
