"""before_after.png: every task, what the run began with and what it kept, as it was evaluated."""

import statistics
from pathlib import Path

import fakes
import pytest

from flowalign.training.report import samples
from flowalign.training.report.pictures import Block


@pytest.mark.slow
def test_every_task_has_a_row_before_and_one_after(
    finished_run: fakes.FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (finished_run.folder / "before_after.png").stat().st_size > 1000
    drawn: list[Block] = []
    monkeypatch.setattr(samples, "comparison", lambda path, blocks, title: drawn.extend(blocks))
    samples.write_before_after(finished_run.folder, 2)
    assert [block.title for block in drawn] == ["red", "vivid"]
    evaluated = {row["update"]: row for row in finished_run.rows if "eval/headline" in row}
    for block in drawn:
        assert [row.name for row in block.rows] == ["before", "after update 2"]
        for row, update in zip(block.rows, (0, 2), strict=True):
            assert row.note == f"held-out {evaluated[update]['eval/headline']:.3f}"
            mean = statistics.fmean(map(float, row.captions))
            number = evaluated[update][f"eval/{block.title}/reward"]
            assert len(row.images) == 8 and mean == pytest.approx(number, abs=0.01)


def test_a_run_without_evaluations_has_none(tmp_path: Path) -> None:
    assert samples.write_before_after(tmp_path, 1) is None
