"""Advantages that need the parts of a reward, and advantages of the user's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import Rows
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from flowalign import config, credit
from flowalign.checks import Launch, check_stage, stage_problems
from flowalign.checks.rewards import own_code
from flowalign.commands.card import origins
from flowalign.config import ConfigError, parse, to_yaml
from flowalign.config.learning import ADVANTAGES
from flowalign.credit import gdpo
from flowalign.rewards.scoring import score
from flowalign.training.algorithm import TrainingError, advantage_function
from flowalign.types import Scores

ROOT = Path(__file__).parents[1]
WEIGHTED = (
    "tasks.0.reward={name: weighted, options: {rewards: ["
    "{name: 'fakes:redness', weight: 2.0}, {name: 'fakes:vivid', weight: -0.5}]}}"
)
SMALL = ["optimizer.eps=1.0", "optimizer.lr=30.0"]  # Adam's first step ~ lr * gradient


class Summed:
    """A reward of the user's with `weights`, whose scores may lack a part."""

    def __init__(self, parts: Sequence[str] = ("red", "dark")) -> None:
        self.weights = {"red": 1.0, "dark": 3.0}
        self.given = parts

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
        red = fakes.redness(images, prompts, metadata).value
        parts = {"red": red, "dark": -images.mean((1, 2, 3))}
        value = red + 3 * parts["dark"]
        return Scores.of(value, **{name: parts[name] for name in self.given})


def test_gdpo_normalises_the_parts_of_a_weighted_reward(random_model: str, tmp_path: Path) -> None:
    given = fakes.settings(random_model, tmp_path / "run", WEIGHTED, "grpo.advantage=gdpo")
    loop = fakes.wired(given, moved=True)
    rollout = loop.rollout(0)
    assert rollout.images is not None
    asked = rollout.images, rollout.batch.prompts, rollout.batch.metadata
    parts = torch.stack([score(fakes.redness, *asked).value, score(fakes.vivid, *asked).value])
    scales = torch.tensor([[2.0], [-0.5]]).expand(2, len(rollout))
    expected = gdpo((scales * parts).sum(0), rollout.group, parts=parts, weights=scales)
    found: Any = loop.prepare(rollout)
    assert_close(found.advantage, expected)
    assert bool((found.advantage != 0).all())


def test_a_reward_without_parts_is_refused_before_a_model_is_loaded(random_model, tmp_path) -> None:
    wrong = ["grpo.advantage=gdpo", "tasks.0.reward={name: clipscore, options: {model: tiny}}"]
    with pytest.raises(ConfigError) as static:  # of a built-in one it is known from its name
        check_stage(fakes.settings("no such model", tmp_path / "run", *wrong), Launch())
    (problem,) = (p for p in static.value.problems if "gdpo" in p.text)
    assert problem.key == "tasks.0.reward"
    given = fakes.settings("no such model", tmp_path / "run", "grpo.advantage=gdpo")
    with pytest.raises(ConfigError) as built:  # of the user's own it is known when it is built
        fakes.wired(given)
    (problem,) = built.value.problems
    assert problem.key == "tasks.0.reward" and "'fakes:redness'" in problem.text
    fakes.settings("x", tmp_path / "run", *wrong, "grpo.advantage=group_std")
    check_stage(fakes.settings(random_model, tmp_path / "run", WEIGHTED, wrong[0]), Launch())


def test_a_part_that_is_weighted_and_not_given_stops_the_run(random_model: str, tmp_path: Path):
    def run(parts: str) -> Any:
        reward = f"tasks.0.reward={{name: 'test_advantages:Summed', options: {{parts: {parts}}}}}"
        given = fakes.settings(random_model, tmp_path / "run", "grpo.advantage=gdpo", reward)
        loop = fakes.wired(given, moved=True)
        return loop.prepare(loop.rollout(0))

    assert bool((run("[red, dark]").advantage != 0).all())
    with pytest.raises(TrainingError, match="'dark'"):
        run("[red]")


@pytest.mark.slow
def test_two_processes_have_the_advantages_of_one(random_model: str, tmp_path: Path) -> None:
    """Though each holds one task only, and so only one task's parts."""
    other = {"name": "weighted", "options": {"rewards": [
        {"name": "fakes:vivid", "label": "v"}, {"name": "test_advantages:Summed", "label": "s"}
    ]}}  # fmt: skip
    runs = {}
    for name in ("batch_std", "gdpo"):
        given = ["rollout.prompts=2", "rollout.batch_size=8", f"grpo.advantage={name}", WEIGHTED,
                 "optimizer.micro_batch=4", "train.updates=3", *SMALL]  # fmt: skip
        found = fakes.settings(random_model, tmp_path / name / "one", *given)
        raw = found.model_dump(mode="json")
        (red,) = raw["tasks"]
        raw["tasks"] = [red, {**red, "name": "vivid", "reward": other}]
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_yaml(parse(raw)))
        assert fakes.command("--config", path) == 0
        runs[name] = ["--then", "--config", path, f"output={tmp_path / name / 'two'}"]
    done = fakes.launch(ROOT / "tests" / "on_cpu.py", *sum(runs.values(), []))
    assert done.returncode == 0, done.stderr
    for name in runs:
        one, two = (tmp_path / name / run / "checkpoints/update_000003" for run in ("one", "two"))
        assert (two / "rng_1.json").exists()  # two, indeed
        ends = [load_file(last / "adapter.safetensors") for last in (two, one)]
        assert ends[0].keys() == ends[1].keys()
        for key in ends[0]:
            assert_close(ends[0][key], ends[1][key], rtol=1e-5, atol=1e-5)


# Advantages of the user's ------------------------------------------------------------------------


def centred(value: Tensor, group: Tensor) -> Tensor:
    """The reward, minus the mean of its prompt."""
    means = [value[group == g].mean() for g in group]
    return value - torch.stack(means)


def short(value: Tensor, group: Tensor) -> Tensor:
    return value[:1]


def infinite(value: Tensor, group: Tensor) -> Tensor:
    return value / 0


OWN = "test_advantages:centred"


def test_the_names_of_a_config_are_those_of_the_library() -> None:
    assert tuple(credit.ADVANTAGES) == ADVANTAGES


def test_a_function_of_the_users_is_called_with_the_valid_images_of_a_task() -> None:
    value, group = torch.tensor([1.0, 3.0, torch.nan, 5.0, 9.0]), torch.tensor([0, 0, 0, 1, 1])
    valid, task = ~value.isnan(), torch.tensor([0, 0, 0, 1, 1])
    found = advantage_function(OWN)(value, group, valid=valid, task=task)
    assert found.tolist() == [-1.0, 1.0, 0.0, -2.0, 2.0]


@pytest.mark.parametrize("bad", ["missing", "short", "infinite"])
def test_one_that_gives_no_advantages_is_refused_before_a_model_is_loaded(bad: str, tmp_path: Path):
    own = f"grpo.advantage=test_advantages:{bad}"
    given = fakes.settings("no such model", tmp_path / "run", own)
    with pytest.raises(ConfigError) as error:
        check_stage(given, Launch())
    (problem,) = (p for p in error.value.problems if p.key == "grpo.advantage")
    assert bad in problem.text
    untrusted = stage_problems(given, Launch(trust=False))
    assert "grpo.advantage" not in [p.key for p in untrusted]
    assert own_code(given)["grpo.advantage"] == [f"test_advantages:{bad}"]


def test_one_may_be_an_entry_point_and_a_run_learns_by_it(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    info = tmp_path / "site" / "own-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[flowalign.advantages]\ncentred = {OWN}\n")
    monkeypatch.syspath_prepend(info.parent)
    given = fakes.settings(random_model, tmp_path / "run", "grpo.advantage=centred")
    loop = fakes.wired(given, moved=True)
    rollout = loop.rollout(0)
    found: Any = loop.prepare(rollout)
    scores = fakes.redness(Tensor(rollout.images), [], []).value
    assert_close(found.advantage, centred(scores, rollout.group))
    assert "advantages by `centred`" in origins(tmp_path, given)
    assert found.metrics["clipped_advantages"] == 0 and not caplog.messages
    loop = fakes.wired(config.parse(given.model_dump(mode="json"), ["grpo.advantage_clip=1e-9"]))
    for update in (1, 2):
        found = loop.prepare(loop.rollout(update))
        assert found.metrics["clipped_advantages"] > 0.5
    (text,) = caplog.messages  # once
    assert "centred" in text and "advantage_clip" in text
