"""alarm.py: it speaks when the reward rises and something held out falls, and only then."""

import json
import math

import pytest

from flowalign.alarm import Alarm


def told(rewards: list[list[float]], held_out: list[float], error: float = 0.01) -> list[int]:
    """How many alarms each evaluation raises: one before the first period, one after each."""
    alarm, found = Alarm(), []
    for period, score in zip([[], *rewards], held_out, strict=True):
        for reward in period:
            alarm.update({"reward": reward})
        state = json.loads(json.dumps(alarm.state()))
        alarm = Alarm()
        alarm.load(state)  # a resumed run says the same
        found.append(len(alarm.look({"ocr": (score, error)})))
    return found


RISING = [[0.1, 0.2, 0.1], [0.5, 0.6, 0.5], [0.8, 0.9, 0.8]]
FLAT = [[0.1, 0.2, 0.1], [0.1, 0.2, 0.1], [0.2, 0.1, 0.1]]


@pytest.mark.parametrize(
    ("rewards", "held_out", "expected"),
    [
        (RISING, [0.5, 0.6, 0.4, 0.3], [0, 0, 1, 1]),  # below its best
        (RISING, [0.5, 0.6, 0.59, 0.6], [0, 0, 0, 0]),  # within its error
        (RISING, [0.5, 0.6, 0.7, 0.8], [0, 0, 0, 0]),
        (FLAT, [0.5, 0.6, 0.4, 0.3], [0, 0, 0, 0]),  # nothing was learnt: no hacking
    ],
)
def test_it_speaks_when_one_rises_and_the_other_falls(
    rewards: list[list[float]], held_out: list[float], expected: list[int]
) -> None:
    assert told(rewards, held_out) == expected


def test_what_is_not_known_raises_no_alarm() -> None:
    assert told(RISING, [0.5, 0.6, 0.1, 0.1], error=math.inf) == [0, 0, 0, 0]


def test_a_distillation_improves_as_its_loss_falls() -> None:
    alarm = Alarm()
    alarm.look({"ocr": (0.6, 0.01)})
    for loss in ([0.3, 0.31], [0.1, 0.11]):
        for value in loss:
            alarm.update({"distill": value})
        found = alarm.look({"ocr": (0.3, 0.01), "geneval": (0.5, 0.01)})
    assert len(found) == 1 and found[0].startswith("held-out ocr fell from 0.600 to 0.300")
