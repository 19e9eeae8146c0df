"""`flowalign doctor --reward`: sound rewards pass, each planted fault is named."""

import itertools
import math

import pytest
import torch

from flowalign import rewards
from flowalign.commands.cli import main
from flowalign.commands.doctor.live import diagnose
from flowalign.rewards.ocr import OCR
from flowalign.types import Scores

_calls = itertools.count()


def of_the_batch(images, prompts, metadata):
    """Depends on what else is in the batch."""
    value = images.mean((1, 2, 3))
    return Scores.of(value - value.mean())


def of_the_moment(images, prompts, metadata):
    """Depends on when it is asked."""
    return Scores.of(images.mean((1, 2, 3)) + next(_calls))


def of_the_place(images, prompts, metadata):
    """Depends on the row."""
    return Scores.of(torch.arange(len(images)).float())


def failing(images, prompts, metadata):
    """Cannot judge bright images."""
    value = images.mean((1, 2, 3))
    return Scores.of(value.masked_fill(value > 0.6, math.nan))


class Blind:
    """An OCR engine that reads nothing."""

    name = "blind"

    def read(self, image):
        return []


def readable(images, prompts, metadata):
    """Calls `ocr`, which wants a text in quotes, and says nothing of it."""
    read = rewards.score(OCR(Blind()), images, prompts, metadata)
    return Scores.of(read.value + images.mean((1, 2, 3)))


def faults(name, **options):
    findings, _ = diagnose(name, options, count=4)
    return [finding for finding in findings if finding.level == "fault"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("geneval", {}),
        ("fakes:redness", {}),
        pytest.param("diversity", {"model": "tiny"}, marks=pytest.mark.slow),
    ],
)
def test_sound_rewards_have_no_fault(name, options):
    assert faults(name, **options) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fakes:constant", "constant"),
        ("test_doctor:of_the_batch", "one by one"),
        ("test_doctor:of_the_moment", "asked again"),
        ("test_doctor:of_the_place", "in reverse order"),
        ("test_doctor:failing", "failed"),
        ("test_gradient:Downhill", "gradient"),
    ],
)
def test_each_fault_is_named(name, kind):
    assert any(fault.key.startswith(kind) for fault in faults(name))


def busy(images, prompts, metadata):
    """Likes noise."""
    return Scores.of(images.std((1, 2, 3)))


def test_a_reward_that_noise_pleases_is_noted():
    for name, noted in (("test_doctor:busy", 1), ("geneval", 0)):
        findings, _ = diagnose(name, {}, 4)
        notes = [f for f in findings if f.level == "note" and f.key.startswith("noise")]
        assert len(notes) == noted


def test_a_reward_that_calls_another_is_asked_with_prompts_that_the_other_can_score(tmp_path):
    findings, _ = diagnose("test_doctor:readable", {}, 4)
    assert not any("failed" in finding.key for finding in findings)
    (tmp_path / "p.txt").write_text("a kite\na lamp\n")
    findings, _ = diagnose("test_doctor:readable", {}, 4, [str(tmp_path / "p.txt")])
    (failed,) = [finding for finding in findings if finding.level == "fault"]
    assert "ocr: " in failed.text and "8 of 8" in failed.key
    assert len(findings) == 2  # and the time: nothing is "ok" about scores that are not there


def test_the_command_prints_the_scores_and_ends_by_its_findings(capsys):
    assert main(["doctor", "--reward", "geneval", "reward=official"]) == 0
    printed = capsys.readouterr().out
    assert "its prompt" in printed and "ms an image" in printed
    assert main(["doctor", "--reward", "fakes:constant"]) == 1
    assert "constant" in capsys.readouterr().out
    assert main(["doctor", "--reward", "geneval", "--prompts", "nowhere.txt"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    assert main(["doctor", "--reward", "geneval", "detektor=tiny"]) == 2
    assert "'detector'" in capsys.readouterr().err  # the option that was meant
