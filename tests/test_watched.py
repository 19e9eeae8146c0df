"""Judges that a run does not learn from: what counts as a fall, and what follows from one."""

import json
import math
import statistics
from pathlib import Path

import fakes
import pytest
import torch

from flowalign.eval.stats import headline_row, rows_of
from flowalign.report import page
from flowalign.report.alarm import Alarm
from flowalign.report.pictures import png
from flowalign.report.watched import WatchedJudges
from flowalign.training.evaluations import Evaluation, Evaluations, change_of
from flowalign.types import EvalImage, EvalReport, EvalRow, ImageScore, Watched

START = [0.9, 0.8, 0.7, 0.9, 0.6, 0.8]
FALLEN = [0.5, 0.5, 0.2, 0.6, 0.3, 0.1]
NOISY = [0.1, 1.0, 0.2, 1.0, 0.9, 0.8]  # lower by .12, and by less than its error
LITTLE = [0.7, 0.8, 0.5, 0.9, 0.5, 0.7]  # by .1, which is 2.7 of its errors
PROMPTS = [f"prompt {i}" for i in range(len(START))]


class Named:
    name = "other"
    headline = None


def watched(values: list[float]) -> Watched:
    images = [EvalImage(i, 0, prompt, {}) for i, prompt in enumerate(PROMPTS)]
    scores = [ImageScore(image, value) for image, value in zip(images, values, strict=True)]
    return Watched(headline_row(Named(), rows_of(Named(), scores)), "other")


def report(values: list[float]) -> EvalReport:
    numbers = zip(PROMPTS, values, strict=True)
    pictures = {prompt: png(torch.full((3, 8, 8), value)) for prompt, value in numbers}
    return EvalReport([], pictures={"other": pictures}, watched={"other": watched(values)})


def test_a_change_has_the_error_of_paired_differences() -> None:
    change = change_of(watched(START).row, watched(FALLEN))
    gaps = [b - a for a, b in zip(START, FALLEN, strict=True)]
    assert change.difference == pytest.approx(statistics.fmean(gaps))
    assert change.stderr == pytest.approx(statistics.stdev(gaps) / math.sqrt(len(gaps)))
    assert change.fell
    assert not any(change_of(watched(START).row, watched(v)).fell for v in (NOISY, LITTLE, START))


@pytest.mark.parametrize(
    ("on_fall", "kept", "ends"), [("warn", 3, False), ("keep", 1, False), ("stop", 1, True)]
)
def test_what_follows_from_a_fall(random_model, tmp_path, on_fall: str, kept: int, ends: bool):
    """The reward rises all along; the watched number has fallen from the third evaluation on."""
    prompts = f"tasks.0.validation={tmp_path / 'prompts.txt'}"
    settings = f"evaluation={{on_fall: {on_fall}}}"
    config = fakes.settings(random_model, tmp_path / "run", prompts, settings)
    evaluations = Evaluations(config, lambda: (None, EvalReport([])))
    for update, values in enumerate([START, NOISY, FALLEN, FALLEN]):
        headline = EvalRow("average", "mean", 0.1 * (update + 1), 0.01, 6)
        evaluations.note(update, headline, report(values), {})
        saved = json.loads(json.dumps(evaluations.state()))
        evaluations = Evaluations(config, evaluations.evaluate)
        evaluations.load(saved)  # a resumed run says the same
    assert evaluations.best["update"] == kept and bool(evaluations.stalled) == ends


def test_the_alarm_names_the_judge_and_the_prompts_that_fell_most() -> None:
    alarm = Alarm()
    change = change_of(watched(START).row, watched(FALLEN))
    (text,) = alarm.watch({"other": change})
    assert text.startswith("other, ") and text.index("prompt 5") < text.index("prompt 2")
    assert "docs/reward.md#it-rises-then-falls" in text  # nothing has risen yet
    for rewards in ([0.1, 0.2, 0.1], [0.5, 0.6, 0.5]):
        for reward in rewards:
            alarm.update({"reward": reward})
        alarm.look({})
    (text,) = alarm.watch({"other": change})
    assert "docs/reward.md#it-rises-and-the-images-get-worse" in text


def test_a_watched_judge_that_collapses_is_named_though_nothing_rises() -> None:
    alarm = Alarm()
    for score, count in ((0.9, 0), (0.1, 1)):
        rows = {"other/reward": (score, 0.01)}
        change = change_of(watched([0.9] * 6).row, watched([score] * 6))
        evaluation = Evaluation(report(START), rows, {}, changes={"other": change})
        alarm.evaluated(0, evaluation)
        assert len(evaluation.alarms) == count


def test_the_page_shows_start_and_now(random_model: str, tmp_path: Path) -> None:
    config = fakes.settings(random_model, tmp_path / "run")
    listener = WatchedJudges(config)
    for update, values in {0: START, 5: FALLEN}.items():
        change = change_of(watched(START).row, watched(values))
        listener.evaluated(update, Evaluation(report(values), {}, {}, changes={"other": change}))
    shown = page.write(tmp_path / "run", config).read_text()
    assert "Update 5" in shown and "<b>fell</b>" in shown and 'alt="start: prompt 5"' in shown
