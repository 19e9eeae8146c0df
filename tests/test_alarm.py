"""alarm.py: it speaks when something held out falls, and when an update goes wrong."""

import json
import math
from dataclasses import replace

import pytest

from flowalign.report.alarm import Alarm
from flowalign.training.evaluations import measured
from flowalign.types import EvalRow


def told(rewards: list[list[float]], held_out: list[float], error: float = 0.01) -> list[int]:
    """How many alarms each evaluation raises: one before the first period, one after each."""
    alarm, found = Alarm(), []
    for period, score in zip([[], *rewards], held_out, strict=True):
        for reward in period:
            alarm.update({"reward": reward})
        state = json.loads(json.dumps(alarm.state()))
        alarm = Alarm()
        alarm.load(state)  # a resumed run says the same
        found.append(len(alarm.look({"ocr/reward": (score, error)})))
    return found


RISING = [[0.1, 0.2, 0.1], [0.5, 0.6, 0.5], [0.8, 0.9, 0.8]]
FLAT = [[0.1, 0.2, 0.1], [0.1, 0.2, 0.1], [0.2, 0.1, 0.1]]
DIVERGING = [[0.6, 0.9, 1.0], [0.9, 1.0, 1.0], [0.9, 0.9, 0.9], [0.8, 0.7, 0.7]]


@pytest.mark.parametrize(
    ("rewards", "held_out", "expected"),
    [
        (RISING, [0.5, 0.6, 0.4, 0.3], [0, 0, 1, 1]),  # below its best
        (RISING, [0.5, 0.6, 0.59, 0.6], [0, 0, 0, 0]),  # within its error
        (RISING, [0.5, 0.6, 0.7, 0.8], [0, 0, 0, 0]),
        (FLAT, [0.5, 0.6, 0.59, 0.6], [0, 0, 0, 0]),
        (FLAT, [0.5, 0.6, 0.4, 0.3], [0, 0, 1, 1]),  # no hack, and yet it gets worse
        (DIVERGING, [0.58, 0.98, 0.96, 0.91, 0.81], [0, 0, 0, 1, 1]),  # an OCR teacher by NFT
        (FLAT, [-0.5, -0.5, -9, -9], [0, 0, 1, 1]),  # a score of another scale
    ],
)
def test_it_speaks_when_what_is_held_out_falls(
    rewards: list[list[float]], held_out: list[float], expected: list[int]
) -> None:
    assert told(rewards, held_out) == expected


def test_two_prompts_that_happen_to_agree_are_not_certain() -> None:
    """44 images of two prompts, each with 19 of 22 right: their means do not differ at all."""
    row = EvalRow("geneval", "colors", 38 / 44, 0.0, 44)
    assert measured(row) == (38 / 44, pytest.approx(math.sqrt(38 * 6 / 44**3)))
    assert measured(replace(row, stderr=0.2)) == (38 / 44, 0.2)
    assert math.isnan(measured(replace(row, stderr=math.nan))[1])
    assert measured(replace(row, mean=21.5, stderr=0.1)) == (21.5, 0.1)  # no share


def test_a_distillation_improves_as_its_loss_falls() -> None:
    alarm = Alarm()
    alarm.look({"ocr": (0.6, 0.01)})
    for loss in ([0.3, 0.31], [0.1, 0.11]):
        for value in loss:
            alarm.update({"distill": value})
        found = alarm.look({"ocr": (0.3, 0.01), "geneval": (0.5, 0.01)})
    assert len(found) == 1 and found[0].startswith("held-out ocr fell from 0.600 to 0.300")


def test_a_held_out_reward_may_rise_where_training_is_too_noisy_to_tell() -> None:
    """As under PickScore's gradient, of four rollouts an evaluation."""
    alarm = Alarm({"preference": "pickscore"})
    for noisy, held_out in (([], 0.639), ([0.5, 1.0], 0.700), ([1.1, 0.4], 0.786)):
        assert not alarm.risen
        for reward in noisy:
            alarm.update({"reward": reward})
        alarm.look({"preference/reward": (held_out, 0.03), "signs/reward": (held_out, 0.0)})
    assert alarm.risen
    for task, rises in (("signs", True), ("pictures", False)):  # of its own reward alone
        other = Alarm({task: "x"})
        other.load(alarm.state())
        assert bool(other.risen) == rises


def spoken(rows: list[dict[str, float]], **rewards: str) -> list[int]:
    """The updates, from 0, at which something is said of them; each run is resumed all along."""
    alarm, said = Alarm(rewards), []
    for update, values in enumerate(rows):
        said += [update] * len(alarm.update(values))
        state = json.loads(json.dumps(alarm.state()))
        alarm = Alarm(rewards)
        alarm.load(state)
    return said


@pytest.mark.parametrize("held_out", [[0.58, 0.08], [0.58, 0.5, 0.03, 0.03]])
def test_a_collapse_of_what_is_held_out_is_a_divergence(held_out: list[float]) -> None:
    """As of a tiny teacher with lr 1e3: its training does not improve, either."""
    rewards = [[0.0, 0.1, 0.0]] * (len(held_out) - 1)
    alarms = told(rewards, held_out, error=0.07)
    assert alarms == [int(score < 0.1) for score in held_out]
    assert told([[0.1]], [0.02, 0.0], error=0.02)[-1] == 0  # it was as good as nothing before
    alarm = Alarm()  # nor a tag of two prompts, whose error is 0
    assert not alarm.look({"geneval/counting": (1.0, 0.0)})
    assert not alarm.look({"geneval/counting": (0.0, 0.0)})


def test_ratios_that_stay_clipped_are_said_once() -> None:
    rows = [{"reward": 0.1, "loss": 9.0, "clip_fraction": c} for c in [0.6] * 4 + [0.4] + [0.6] * 9]
    assert spoken(rows) == [9]


@pytest.mark.parametrize("name", ["distill", "loss"])
def test_a_student_that_leaves_its_teachers_is_said_once(name: str) -> None:
    rows = [0.2, 0.1, 0.3, math.nan, 1.9, *[3.0] * 7, 0.1, *[3.0] * 5]
    assert spoken([{name: value} for value in rows]) == [9, 17]
    assert spoken([{"reward": 0.1, "loss": value} for value in rows]) == []


def test_a_reward_that_tells_no_images_apart_is_said_once_for_each_task() -> None:
    alone = [{"reward": 0.5, "kept_share": share} for share in [0, 0, 0, 0, 0.1, *[0] * 12]]
    assert spoken(alone, a="x") == [9]  # the fifth in a row, and never again
    assert spoken(alone[:4], a="x") == spoken(alone) == []
    both = [{"kept_share": 0.5, "task_advantage/a": 0.0, "task_advantage/b": 0.7}] * 6
    assert spoken([{"kept_share": 0.5}, *both], a="x", b="y") == [5]  # not of a batch without a
    alarm = Alarm({"a": "my_r:const", "b": "y"})
    (text,) = [text for row in both for text in alarm.update(row)]
    assert "my_r:const" in text and "task a" in text
