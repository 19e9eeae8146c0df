"""A cluster's first day: what the doctor and `init` say before a job waits in a queue."""

import re
from pathlib import Path
from typing import Any

import fakes
import pytest

from flowalign.backbone.structure import weightless
from flowalign.checks import once
from flowalign.commands.cli import main
from flowalign.commands.doctor.advise import Device, Forecast
from flowalign.commands.doctor.count import judge_bytes, predict
from flowalign.commands.doctor.pace import Pace
from flowalign.config import TrainingStage, load
from flowalign.rewards import RewardSpec
from flowalign.rewards.imagereward import Network
from flowalign.types import Problem

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_reward_models_are_in_the_sum(random_model: str, tmp_path: Path) -> None:
    """On the device all the time, or while images are sampled and scored."""

    def peaks(*options: str) -> dict[str, int]:
        task = "{name: a, prompts: tiny/ocr_train, reward: {name: pickscore, options: {%s}}}"
        tasks = f"tasks=[{task % ', '.join(options)}]"
        found = predict(fakes.settings(random_model, tmp_path, tasks, "evaluation=null"))
        return {phase.name: found.resident + phase.bytes for phase in found.phases}

    plain, staying, visiting = peaks("model: tiny"), peaks(), peaks("offload: true")
    assert {name: staying[name] - plain[name] for name in plain} == dict.fromkeys(plain, 3.9e9)
    more = {name: visiting[name] - plain[name] for name in plain}
    assert more == {name: 3.9e9 * (name in ("rollout", "VAE decode")) for name in plain}
    assert peaks("device: cpu") == plain


def test_a_judge_of_unknown_size_is_named() -> None:
    config = load(ROOT / "configs/sd35_medium/student_flow_opd.yaml")
    assert judge_bytes(config) == (int(1.98e9), int(3.9e9), [])
    other = ["tasks.preference.reward.options={model: me/other}"]
    assert judge_bytes(load(ROOT / "configs/sd35_medium/student_flow_opd.yaml", other))[2] == [
        "pickscore"
    ]


def test_the_size_of_a_judge_is_that_of_its_weights() -> None:
    """Of the one whose architecture is ours."""
    with weightless():
        weights = sum(parameter.numel() for parameter in Network().parameters())
    size = RewardSpec("imagereward").downloads
    assert size and 4e-9 * weights == pytest.approx(sum(size.values()), rel=0.02)


def test_a_queue_is_told_how_long_a_run_needs_to_end(random_model: str, tmp_path: Path) -> None:
    """Several processes end after an update or an evaluation, and one at once."""
    config: TrainingStage = fakes.settings(random_model, tmp_path)

    def said(gpus: int) -> str:
        forecast = Forecast("x", config, Device(gpus)).predicted()
        slow = Pace.constant(sum(phase.flops for phase in forecast.estimate.phases) / 142, "slow")
        timed = Forecast("x", config, Device(gpus), estimate=forecast.estimate, pace=slow)
        return " ".join(finding.text for finding in timed.findings())

    (seconds,) = re.findall(r"--signal=B:USR1@(\d+)", said(2))
    assert int(seconds) % 60 == 0 and 142 * 1.3 < int(seconds)
    assert "--signal" not in said(1)


def test_a_problem_of_several_keys_is_said_once() -> None:
    package = "needs open_clip, which is not installed. Run: `pip`"
    reward = Problem("tasks.0.reward", package)
    other = Problem("stages", "x")
    problems = [reward, other, Problem("benchmarks.1.reward", package, stage="table")]
    assert once(problems) == [Problem("tasks.0.reward and 1 more", package), other]


def test_init_says_which_prompt_files_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text('a sign that says "CAT"')
    given = ["init", "--stage", "nft", "--reward", "ocr", "--out", "x.yaml", "--prompts"]
    assert main([*given, "yours.txt"]) == 0
    assert "yours.txt" in capsys.readouterr().out and "yours.txt" in Path("x.yaml").read_text()
    assert main([*given, "mine.txt", "--force"]) == 0
    assert "mine.txt" not in capsys.readouterr().out
