"""before_after.png: every task, what the run began with and what it kept, as it was evaluated."""

import json
from pathlib import Path

import fakes
import pytest
import torch

from flowalign import config
from flowalign.commands.run import train
from flowalign.eval import before_after
from flowalign.training.report.pictures import Block, comparison
from flowalign.training.rollout import generate
from flowalign.types import PromptBatch


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """The blocks of the pictures that are drawn, drawn all the same."""
    seen: list[Block] = []

    def draw(path: Path, blocks: list[Block], *, title: str) -> None:
        seen.extend(blocks)
        comparison(path, blocks, title=title)

    monkeypatch.setattr(before_after, "comparison", draw)
    return seen


def settings(model: str, output: Path, *overrides: str) -> config.TrainingStage:
    """Two tasks of 20 held-out prompts each."""
    found = fakes.mixed(fakes.settings(model, output))
    held_out = output.parent / "held_out.txt"
    held_out.write_text("".join(f"prompt {i}\n" for i in range(20)))
    changes = [f"tasks.{i}.validation={held_out}" for i in range(2)]
    changes += ["evaluation={every: 1, prompts: 8}", "train.updates=1", "train.checkpoint_every=1"]
    return config.parse(found.model_dump(mode="json"), [*changes, *overrides])


def run(found: config.TrainingStage) -> None:
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    train(found)


def test_every_task_has_a_row_before_and_one_after(
    random_model: str, tmp_path: Path, drawn: list[Block]
) -> None:
    found = settings(random_model, tmp_path / "run")
    run(found)
    assert (tmp_path / "run" / "before_after.png").stat().st_size > 1000
    assert [block.title.split(":")[0] for block in drawn] == ["red", "vivid"]
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    whole = {row["update"]: row for row in lines if "eval/headline" in row}
    best = max(whole, key=lambda update: whole[update]["eval/headline"])
    for block in drawn:
        assert len(block.prompts) == 8
        name = block.title.split(":")[0]
        numbers = [whole[update][f"eval/{name}/reward"] for update in (0, best)]
        assert [row.numbers[name] for row in block.rows] == numbers
        # all prompts of the evaluation, with its noise
        means = [sum(row.scores[name]) / 8 for row in block.rows]
        assert means == pytest.approx(numbers, rel=1e-4)
        assert [row.name for row in block.rows] == ["before", f"after update {best}"]


@pytest.mark.slow
def test_a_run_that_starts_from_an_adapter_begins_with_it(
    random_model: str, tmp_path: Path, drawn: list[Block]
) -> None:
    begin = fakes.teachers(random_model, tmp_path)["odd"]
    found = settings(random_model, tmp_path / "run", f"lora={{init: {begin}}}")
    run(found)
    backbone = fakes.backbone(random_model)
    prompts = PromptBatch([drawn[0].prompts[0]], ["red"], [{}])
    backbone.load_adapter("begin", begin)
    with backbone.adapter("begin"):
        expected = generate(backbone, prompts, found.evaluation_sampling)
    torch.testing.assert_close(drawn[0].rows[0].images[0], expected[0], rtol=0, atol=0.6 / 255)
    with backbone.base():
        base = generate(backbone, prompts, found.evaluation_sampling)
    assert (expected - base).abs().max() > 3 / 255
