"""Several image sizes: one a rollout, in turn or by task; each has its own schedule."""

from pathlib import Path

import fakes
import families
import pytest
import torch
from test_loop import ratio_errors

from flowalign import config
from flowalign.commands import evaluate as evaluation
from flowalign.config import ConfigError
from flowalign.system.images import pixels_of
from flowalign.training.data import PromptSampler
from flowalign.training.loop import Loop
from flowalign.types import PromptBatch

SIZES = ["model.sizes=[[32, 32], [32, 64]]"]
SHAPES = [(4, 4), (4, 8)]  # of their latents


def shape(loop: Loop, update: int) -> tuple[int, ...]:
    return tuple(loop.rollout(update).states.shape[-2:])


def by_task(found: config.TrainingStage, *changes: str) -> config.TrainingStage:
    """Its two tasks have a size each."""
    raw = found.model_dump(mode="json")
    raw["model"] |= {"sizes": [[32, 32], [32, 64]]}
    for task, width in zip(raw["tasks"], (32, 64), strict=True):
        task["size"] = [32, width]
    return config.parse(raw, changes)


SMALL, WIDE = (64, 64), (64, 96)


def sampler(sizes: dict[str, list[tuple[int, int]]], weights: dict[str, float]) -> PromptSampler:
    sets = {t: PromptBatch([f"{t}{i}" for i in range(7)], [t] * 7, [{}] * 7) for t in sizes}
    return PromptSampler(sets, weights, 4, seed=0, sizes=sizes)


def test_sizes_take_turns_and_change_no_prompt() -> None:
    one, two = (sampler({"a": b}, {"a": 1.0}) for b in ([SMALL], [SMALL, WIDE]))
    batches = [two.batch(update) for update in range(6)]
    assert [batch.size for batch in batches] == [SMALL, WIDE] * 3
    assert [batch.prompts for batch in batches] == [one.batch(u).prompts for u in range(6)]


def test_a_batch_has_tasks_of_one_size_and_all_together_have_their_weights() -> None:
    found = sampler({"a": [SMALL], "b": [WIDE], "c": [SMALL, WIDE]}, {"a": 1.0, "b": 3.0, "c": 2.0})
    batches = [found.batch(update) for update in range(60)]
    for batch in batches:
        assert set(batch.tasks) <= ({"a", "c"} if batch.size == SMALL else {"b", "c"})
    tasks = [task for batch in batches for task in batch.tasks]
    assert {task: tasks.count(task) for task in "abc"} == {"a": 40, "b": 120, "c": 80}
    assert sum(batch.size == WIDE for batch in batches) == 40  # 1 + 3/3 of 6 against 3 + 1
    again = sampler({"a": [SMALL], "b": [WIDE], "c": [SMALL, WIDE]}, {"a": 1.0, "b": 3.0, "c": 2.0})
    assert again.batch(37) == batches[37]  # a function of the update alone


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["opd", "sft"])
def test_tasks_of_two_sizes_are_distilled(random_model: str, tmp_path: Path, stage: str) -> None:
    found = fakes.distillation(random_model, tmp_path / "run", "train.updates=2", stage=stage)
    loop = fakes.wired(by_task(found))
    batches = [loop.rollout(update).batch for update in range(2)]
    assert [set(batch.tasks) for batch in batches] == [{"even"}, {"odd"}]
    assert [shape(loop, update) for update in range(2)] == SHAPES
    loop.run()
    rows = fakes.lines(loop)
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)


def test_the_schedule_is_that_of_the_size(tmp_path: Path) -> None:
    """FLUX's shift depends on it. The loss must take the schedule of the rollout, for a ratio of
    exactly 1."""
    model = str(tmp_path / "flux")
    families.pipeline("flux").save_pretrained(model)
    given = [*SIZES, "model.max_sequence_length=16", "optimizer.micro_batch=8"]
    loop = fakes.wired(fakes.settings(model, tmp_path / "run", *given), moved=True)
    rollouts = []
    for update, size in enumerate((32, 64)):
        rollouts.append(loop.rollout(update))
        alone = fakes.settings(model, tmp_path / f"{size}", f"model.width={size}", *given[1:])
        assert torch.equal(rollouts[-1].sigmas, fakes.wired(alone).algorithm.plan(0).sigmas)
        prepared = loop.algorithm.prepare(rollouts[-1], update)
        values = loop.learn(prepared)
        assert values["ratio_error"] == 0
    square, wide = rollouts
    assert not torch.equal(square.sigmas, wide.sigmas)
    assert ratio_errors(loop, square, torch.ones(8, dtype=torch.bool), 8).numel() == 24


@pytest.mark.slow
def test_held_out_images_have_the_sizes_of_their_tasks(random_model: str, tmp_path: Path) -> None:
    """And the alarm measures them, and the base's, in that size."""
    found = fakes.mixed(fakes.settings(random_model, tmp_path / "run")).model_dump(mode="json")
    for task in found["tasks"]:
        task["validation"] = task["prompts"]
    found |= {"evaluation": {"every": 1, "prompts": 4}, "alarm": {"images": 8}}
    loop = fakes.wired(by_task(config.parse(found), "train.updates=1"), moved=True)
    assert loop.monitor
    seen = [(images.size, set(images.tasks)) for images in loop.monitor.held_out]
    assert seen == [((32, 32), {"red"}), ((32, 64), {"vivid"})]
    check = loop.monitor.evaluation()
    assert check and {drift.name.split("/")[0] for drift in check.drifts} == {"red", "vivid"}
    assert {row["task"] for row in check.rows} == {"red", "vivid"}
    loop.run()
    assert (loop.folder / "adapter").is_dir()


def test_a_benchmark_has_its_own_size(random_model: str, tmp_path: Path) -> None:
    model = {"id": random_model, "sizes": [[32, 32], [32, 64]], "max_sequence_length": 16}
    marks = {"name": "square"}, {"name": "wide", "size": [32, 64]}
    keys = {"model": model, "keep_images": True}
    path = fakes.evaluation(random_model, tmp_path, fakes.PROMPTS[:2], *marks, **keys)
    assert evaluation.main(["--config", str(path)]) == 0
    for name, width in (("square", 32), ("wide", 64)):
        files = list((tmp_path / "out" / "images" / "base" / name).rglob("*.png"))
        sizes = [pixels_of(file.read_bytes()).shape for file in files]
        assert sizes == [(3, 32, width)] * 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["model.height=[32, 64]"], r"model\.height: "),
        (["model.sizes=[[32, 32], [32, 32]]"], r"model\.sizes: "),
        (["model.sizes=[[32, 32], [32, 40]]"], r"model\.sizes\.1\.1: .*16"),
        (["model.sizes=[]"], r"model\.sizes: "),
        ([*SIZES, "tasks.0.size=[64, 64]"], r"tasks\.0\.size: \[64, 64\].*\[32, 32\], \[32, 64\]"),
    ],
)
def test_impossible_sizes_are_refused(changes: list[str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        fakes.settings("tiny", tmp_path / "run", *changes)
