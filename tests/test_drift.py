"""flowalign.report.drift: statistics of images made by hand, drift of a model that has and
has not moved, and what a run makes of it."""

import json
import math
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from scipy.stats import t as student_t

from flowalign import config
from flowalign.commands import train
from flowalign.report import samples
from flowalign.report.alarm import Alarm
from flowalign.report.drift import compare, statistics
from flowalign.report.drift.compare import SIGMAS, Drift, statistic_drift
from flowalign.report.drift.monitor import Monitor
from flowalign.training.algorithm import TrainingError
from flowalign.training.loop import Loop

SIDE, PERIOD = 64, 16
GREY, BLACK = torch.full((3, SIDE, SIDE), 0.8), torch.zeros(3, SIDE, SIDE)
OPEN = ["rollout.prompts=4", "rollout.group_size=4", "alarm.every=1"]


def tiles(period: int) -> torch.Tensor:
    """An image [3,64,64] that repeats after `period` pixels: a light and a dark half."""
    light = torch.arange(SIDE) % period < period // 2
    return torch.where(light[None] ^ light[:, None], 0.9, 0.1).expand(3, -1, -1)


def measure(*images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of images of one prompt."""
    return statistics.image_statistics(torch.stack(images), PERIOD, [0] * len(images))


def of(name: str, *images: torch.Tensor) -> list[float]:
    return measure(*images)[name].tolist()


# Statistics --------------------------------------------------------------------------------------


def test_a_black_image_is_dark_and_has_nothing_else() -> None:
    values = {name: value for name, value in measure(BLACK).items() if not value.isnan()}
    assert values.pop("dark").item() == 1
    assert {name: value.item() for name, value in values.items()} == dict.fromkeys(values, 0.0)


def test_the_grid_of_the_patches_is_told_from_other_patterns() -> None:
    same, finer, coarser = of("grid", tiles(PERIOD), tiles(PERIOD // 2), tiles(2 * PERIOD))
    assert same == pytest.approx(1) and finer == pytest.approx(1)  # of the VAE's own factor, too
    assert coarser < 0.01
    ramp = (torch.arange(SIDE) / SIDE).expand(3, SIDE, -1)
    assert of("grid", ramp)[0] < 0.1 and of("grid", GREY) == [0]


def test_colours_are_counted() -> None:
    half = torch.cat([BLACK[:, :32], GREY[:, :32]], 1)
    assert of("dark", half, GREY) == [0.5, 0]
    assert of("entropy", half, GREY) == pytest.approx([1.0, 0.0])  # two colours: one bit
    assert of("brightness", half) == pytest.approx([0.4])
    red = torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(3, SIDE, SIDE)
    assert of("saturated", red, GREY) == [1, 0]
    assert of("edges", half)[0] == pytest.approx(64 / (63 * 64) / 2)  # one row of borders


def test_copies_of_one_image_have_no_diversity() -> None:
    images = torch.stack([GREY, GREY, BLACK, GREY, GREY])
    found = statistics.diversity(images, [0, 0, 1, 1, 2]).tolist()
    assert found[:2] == [0, 0] and found[2:4] == pytest.approx([0.8, 0.8])
    assert math.isnan(found[4])  # alone


def test_an_image_that_is_not_finite_has_no_value() -> None:
    bad = GREY.clone()
    bad[0, 0, 0] = torch.nan
    values = measure(bad, GREY)
    del values["diversity"]
    assert all(math.isnan(v[0]) and math.isfinite(v[1]) for v in values.values())


# Drift -------------------------------------------------------------------------------------------


def test_the_interval_is_of_the_means_of_prompts() -> None:
    base = torch.tensor([0.0, 2, 0, 2, 0, 2, 0, 2]).double()
    gaps = torch.tensor([1.0, 3, 3, 5, 2, 4, 4, 6]).double()  # of 4 prompts: 2, 4, 3, 5
    found = statistic_drift("edges", base, base + gaps, [0, 0, 1, 1, 2, 2, 3, 3])
    sigma = SIGMAS["edges"].share * float(base.std())
    assert found.n == 4 and found.sigmas == pytest.approx(3.5 / sigma)
    error = math.sqrt(5 / 3) / 2 / sigma
    exact = student_t.ppf((1 + compare.ALARM_CONFIDENCE) / 2, 3) * error
    assert 1.0 < (found.high - found.sigmas) / exact < 1.25


def test_the_alarm_asks_for_the_near_end_of_the_interval() -> None:
    assert Drift("dark", 0, 1, 5.0, 3.1, 6.9, 9).beyond(3)
    assert not Drift("dark", 0, 1, 5.0, 2.9, 7.1, 9).beyond(3)
    assert Drift("dark", 1, 0, -5.0, -6.9, -3.1, 9).beyond(3)
    assert not Drift("dark", 1, 0, -9.0, -math.inf, math.inf, 2).beyond(3)
    assert not Drift("dark", 1, 0, -9.0, -10, -8, 9).beyond(None)


def test_noise_is_no_drift_and_three_prompts_are_too_few() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [row // 2 for row in range(32)]
    fired = 0
    for _ in range(200):
        base, model = torch.randn(2, 32, generator=generator, dtype=torch.float64)
        fired += statistic_drift("entropy", base, model, prompts).beyond(3.0)
    assert fired == 0
    assert not statistic_drift("entropy", base[:6], base[:6] + 100, prompts[:6]).beyond(3.0)


def test_a_drift_is_said_once_until_it_is_back() -> None:
    alarm, far, near = Alarm(), Drift("dark", 0, 1, 9, 8, 10, 9), Drift("dark", 0, 0, 0, 0, 0, 9)
    said = []
    for found in (far, far, near, far):
        said.append(len(alarm.drift_warnings([found], 3.0, "rollout")))
        state = json.loads(json.dumps(alarm.state()))
        alarm = Alarm()
        alarm.load(state)
    assert said == [1, 0, 0, 1]
    assert len(alarm.drift_warnings([far], 3.0, "evaluation")) == 1


# Runs --------------------------------------------------------------------------------------------


def validated(model: str, folder: Path, *given: str) -> config.TrainingStage:
    """A run with evaluations on the prompts that it trains on."""
    plain = fakes.settings(model, folder).model_dump(mode="json")
    plain["tasks"][0]["validation"] = plain["tasks"][0]["prompts"]
    plain["evaluation"] = {"every": 1, "prompts": 8}
    return config.parse(plain, [*OPEN, "alarm.images=16", *given])


def monitor(loop: Loop) -> Monitor:
    (found,) = [each for each in loop.listeners if isinstance(each, Monitor)]
    return found


def lines(loop: Loop) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (loop.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_model_that_has_not_moved_does_not_drift(random_model: str, tmp_path: Path) -> None:
    loop = fakes.wired(validated(random_model, tmp_path / "run"))
    check = monitor(loop).check(loop.rollout(3), 3)
    assert {found.name for found in check.drifts} >= {"dark", "entropy", "grid", "diversity"}
    # the base samples these images in a smaller batch, which rounds differently on some CPUs
    assert [found.sigmas for found in check.drifts] == pytest.approx(
        [0] * len(check.drifts), abs=1e-3
    )
    assert check.drifts[0].n == 2


def test_a_run_may_be_compared_with_what_it_starts_from(random_model: str, tmp_path: Path) -> None:
    """A LoRA that is far from the base, such as a style: the run has not moved."""
    style = fakes.teachers(random_model, tmp_path)["even"]
    given = [f"lora.init={style}", "alarm.reference=start"]
    with pytest.raises(config.ConfigError, match=r"alarm\.reference"):
        validated(random_model, tmp_path / "run", *given[1:])
    for settings, moved in ((given[:1], True), (given, False)):
        loop = fakes.wired(validated(random_model, tmp_path / "run", *settings))
        check = monitor(loop).check(loop.rollout(3), 3)
        assert (max(abs(found.sigmas) for found in check.drifts) > 1e-3) is moved
        sizes = [row["sigmas"] for row in check.rows]
        assert sizes == sorted(sizes, reverse=True)  # the most drifted first
    fakes.shake(loop.backbone)  # the student alone
    again = monitor(loop).check(loop.rollout(3), 3)
    assert max(abs(found.sigmas) for found in again.drifts) > 1e-3


def test_the_alarm_changes_nothing_that_is_learnt(random_model: str, tmp_path: Path) -> None:
    found = []
    for name, given in {"with": OPEN, "without": [*OPEN[:2], "alarm=null"]}.items():
        given = [*given, "train.updates=2"]
        loop = fakes.wired(fakes.settings(random_model, tmp_path / name, *given))
        loop.run()
        found.append([p.detach().clone() for p in loop.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_run_logs_its_drift_and_shows_it(finished_run: fakes.FinishedRun) -> None:
    rows = finished_run.rows
    rollouts = [row for row in rows if any(name.startswith("image_drift/") for name in row)]
    assert [row["update"] for row in rollouts] == [2]  # nothing was learnt before the first
    assert "image_drift_alarms" in rollouts[0]
    assert samples.read_json(finished_run.folder, samples.DRIFT)


def test_a_run_beyond_its_limit_stops_with_a_checkpoint(random_model: str, tmp_path: Path) -> None:
    given = ["alarm.warn=0.001", "alarm.stop=0.001", "optimizer.lr=0.3", "train.updates=6"]
    given += ["rollout.prompts=8"]  # an interval takes four of a check
    loop = fakes.wired(validated(random_model, tmp_path / "run", *given), moved=False)
    with pytest.raises(TrainingError, match="alarm.stop"):
        loop.run()
    assert loop.checkpoints.latest() is not None
    assert 0 < loop.update < 6
    assert monitor(loop).alarm.drifting["the rollout"]


# Processes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_measure_what_one_does(random_model: str, tmp_path: Path) -> None:
    """Five prompts: the processes do not have equally many."""
    found = []
    for name, processes in {"one": 1, "two": 2}.items():
        stage = validated(
            random_model,
            tmp_path / name,
            "train.updates=3",
            "alarm.images=10",
            "rollout.prompts=12",
        )
        path = tmp_path / f"{name}.yaml"
        path.write_text(config.to_yaml(stage))
        command = ["-m", "flowalign.commands.cli", "train", "--config", str(path)]
        if processes == 1:
            fakes.AcceleratorState._reset_state(reset_partial_state=True)
            assert train.main(command[3:]) == 0
        else:
            done = fakes.launch(*command, processes=2)
            assert done.returncode == 0, done.stderr[-3000:]
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(row) for row in rows])
    for one, two in zip(*found, strict=True):
        for name in (name for name in one if name.startswith("image_drift")):
            # in standard deviations; batches of other sizes round differently on some CPUs
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-2), name
    checks = [samples.read_json(tmp_path / name, samples.DRIFT) for name in ("one", "two")]
    shown = [[row["prompt"] for row in check["rows"]] for _, check in filter(None, checks)]
    assert shown[0] == shown[1] and len(shown[0]) == 5
