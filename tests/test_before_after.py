"""before_after.png: every task, what the run began with and what it kept, as it was evaluated."""

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


@pytest.mark.slow
def test_every_task_has_a_row_before_and_one_after(finished_run: fakes.FinishedRun) -> None:
    assert (finished_run.folder / "before_after.png").stat().st_size > 1000
    assert [block.title.split(":")[0] for block in finished_run.blocks] == ["red", "vivid"]
    evaluated = {row["update"]: row for row in finished_run.rows if "eval/headline" in row}
    best = max(evaluated, key=lambda update: evaluated[update]["eval/headline"])
    assert [name for name, *_ in finished_run.scored] == ["before", f"after update {best}"] * 2
    for row, (_, images, scores, numbers) in enumerate(finished_run.scored):
        (name,) = scores
        assert name == ("red", "red", "vivid", "vivid")[row] and len(images) == 8
        number = evaluated[(0, best)[row % 2]][f"eval/{name}/reward"]
        assert numbers == {name: number}
        # all prompts of the evaluation, with its noise
        assert sum(scores[name]) / 8 == pytest.approx(number, rel=1e-4)


@pytest.mark.slow
def test_a_run_that_starts_from_an_adapter_begins_with_it(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Block] = []

    def draw(path: Path, blocks: list[Block], title: str) -> None:
        drawn.extend(blocks)
        comparison(path, blocks, title=title)

    monkeypatch.setattr(before_after, "comparison", draw)
    begin = fakes.teachers(random_model, tmp_path)["odd"]
    raw = fakes.settings(random_model, tmp_path / "run").model_dump(mode="json")
    raw["tasks"][0]["validation"] = raw["tasks"][0]["prompts"]
    given = ["evaluation={every: 1, prompts: 1}", "train.updates=1", f"lora={{init: {begin}}}"]
    found = config.parse(raw, given)
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    train(found)
    backbone = fakes.backbone(random_model)
    prompts = PromptBatch([drawn[0].heads[0]], ["red"], [{}])
    backbone.load_adapter("begin", begin)
    with backbone.adapter("begin"):
        expected = generate(backbone, prompts, found.evaluation_sampling)
    torch.testing.assert_close(drawn[0].rows[0].images[0], expected[0], rtol=0, atol=0.6 / 255)
    with backbone.base():
        base = generate(backbone, prompts, found.evaluation_sampling)
    assert (expected - base).abs().max() > 3 / 255
