"""Every stage, its evaluations and its resumption on `second:1`, with the numbers of the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fakes
import pytest
import test_checkpoint
import test_nft
import torch
from fakes import Rows
from small_models import clip_folder
from test_train import config_file
from torch import Tensor
from torch.testing import assert_close

from flowalign import config
from flowalign.commands import evaluate as evaluation
from flowalign.commands import train
from flowalign.training.loop import Loop
from flowalign.types import Scores

HERE, CPU = torch.device("second:1"), torch.device("cpu")
SMOOTH = ["optimizer.eps=1.0", "optimizer.lr=30.0"]  # Adam's own steps blow up what rounding does
PICKSCORE = "reward={name: pickscore, options: {model: tiny}}"
DISTILLED = [
    "student.noise_levels.select=all",
    "anchor={adapter: null, weight: 0.5, guidance: 2.0}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate is told on a machine whose devices it does not know."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(HERE))
    fakes.AcceleratorState._reset_state(reset_partial_state=True)


def on_device(images: Tensor, prompts: Sequence[str], metadata: Rows) -> Scores:
    """A plugin that draws where the images are."""
    assert images.device == HERE
    noise = torch.rand(len(images), device="second")  # of the thread's current device
    return Scores.of(fakes.redness(images, prompts, metadata).value + 1e-2 * noise)


def lines(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run, but for times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def settings(model: str, output: Path, stage: str) -> config.TrainingStage:
    """Two updates of a stage with everything on, two evaluations, a reward with a network."""
    held_out = f"validation={output.parent / 'prompts.txt'}"
    tasks = range(2 if stage in ("opd", "sft") else 1)
    judged = [f"tasks.{task}.{said}" for task in tasks for said in (PICKSCORE, held_out)]
    shared = [*SMOOTH, *judged, "evaluation={every: 1, prompts: 3}", "train.updates=2"]
    if stage == "grpo":
        return fakes.settings(model, output, *shared, "optimizer.updates_per_rollout=2")
    if stage in test_nft.STAGES:
        both = [*test_nft.STAGES[stage], "optimizer.updates_per_rollout=2"]
        return fakes.forward(model, output, *shared, *both, stage=stage)
    if stage == "dpo":
        return fakes.pairs(model, output, *shared, "dpo.beta=10")  # of little rounding
    more = DISTILLED if stage == "opd" else ["sft.noise_levels=3"]
    return fakes.distillation(model, output, *shared, *more, stage=stage)


def trained(config: config.TrainingStage) -> Loop:
    """The run of a config whose adapter already matters."""
    loop = fakes.wired(config, moved=True)
    loop.run()
    return loop


@pytest.mark.parametrize("stage", ["grpo", "nft", "awm", "opd", "sft", "dpo"])
def test_a_stage_gives_the_numbers_of_the_cpu(
    random_model: str, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(settings(random_model, tmp_path / "second" / "run", stage))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    expected = trained(settings(random_model, tmp_path / "cpu" / "run", stage))
    for loop, device in ((found, HERE), (expected, CPU)):
        assert {p.device for p in loop.backbone.core.parameters()} == {device}
    ours, theirs = lines(found.folder), lines(expected.folder)
    for one, other in zip(ours, theirs, strict=True):
        # of a drift, in sigmas: a pixel may lie on the other side of a bound
        wide = {key for key in other if key.startswith("image_drift")}
        assert one.keys() == other.keys()
        for key, value in other.items():
            near = {"abs": 0.05} if key in wide else {"rel": 1e-2, "abs": 1e-4}
            assert one[key] == pytest.approx(value, nan_ok=True, **near), key
    for one, other in zip(found.parameters, expected.parameters, strict=True):
        assert_close(one.detach().cpu(), other.detach(), rtol=1e-3, atol=1e-4)
    assert len(ours) == 5 and all(row.get("invalid_share", 0) == 0 for row in ours)


@pytest.mark.parametrize("reward", ["runs:on_device", "fakes:noisy_redness"])
def test_what_is_stopped_goes_on_to_the_numbers_of_what_was_not(
    random_model: str, tmp_path: Path, reward: str
) -> None:
    """With a reward that draws on the device, whose generator is part of a checkpoint."""

    def run(name: str, *overrides: str, resume: bool = False) -> dict[str, Any]:
        given = [f"tasks.0.reward.name={reward}", "optimizer.updates_per_rollout=2"]
        given += [*test_checkpoint.EVALUATED, *overrides]
        loop = test_checkpoint.run(random_model, tmp_path / name, *given, resume=resume)
        return test_checkpoint.state(loop)

    torch.manual_seed(0)
    whole = run("whole")
    torch.manual_seed(0)
    run("run", "train.updates=2")
    torch.rand(3, device=HERE)  # what another process would not know
    test_checkpoint.assert_same(run("run", resume=True), whole)


def test_the_command_with_all_that_it_draws(random_model: str, tmp_path: Path) -> None:
    """Up to the page, and once more to its resumption."""
    held_out = [f"tasks.0.validation={tmp_path / 'prompts.txt'}", "evaluation={prompts: 2}"]
    given = [*held_out, f"tasks.0.{PICKSCORE}", "train.updates=1"]
    path = config_file(random_model, tmp_path / "run", *given)
    assert train.main(["--config", str(path)]) == 0
    assert train.main(["--config", str(path), "--resume", "train.updates=2"]) == 0
    assert (tmp_path / "run" / "report.html").exists()


def test_an_evaluation_gives_the_numbers_of_the_cpu(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base, an adapter, two judges of the same images, fidelity; what is stored is kept."""
    teacher = fakes.teachers(random_model, tmp_path)["even"]
    judges = {"look": {"name": "pickscore", "options": {"model": "tiny"}},
              "red": {"name": "fakes:redness"}}  # fmt: skip
    features = str(clip_folder(tmp_path / "clip"))
    path = fakes.evaluation(
        random_model, tmp_path, [f"a {i}" for i in range(20)],
        {"name": "b", "images": 2, "rewards": judges},
        models={"base": None, "even": teacher}, compare={"even": ["base"]},
        sampling={"steps": 2, "guidance": 2.0, "batch_size": 8},
        fidelity={"features": features, "reference": str(tmp_path / "clean")},
    )  # fmt: skip

    def evaluated(device: torch.device) -> dict[str, Any]:
        fakes.AcceleratorState._reset_state(reset_partial_state=True)
        output = tmp_path / device.type
        assert evaluation.main(["--config", str(path), f"output={output}"]) == 0
        return json.loads((output / "results.json").read_text())["models"]

    _references(tmp_path / "clean", 40)
    found = {}
    for device in (CPU, HERE):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
        found[device] = evaluated(device)
    for name, models in found[CPU].items():
        for mark, rows in models["images"].items():
            both = rows, found[HERE][name]["images"][mark]
            values = [[row["value"] for row in its] for its in both]
            assert values[0] == pytest.approx(values[1], abs=2e-3) and len(values[0]) == 40
        mine, known = (f[name]["fidelity"]["mean"] for f in (found[HERE], found[CPU]))
        assert mine == pytest.approx(known, rel=0.02)
    (tmp_path / "second" / "results.json").unlink()
    assert evaluated(HERE)["even"]["images"] == found[HERE]["even"]["images"]


def _references(folder: Path, count: int) -> None:
    from flowalign.report.pictures import png

    folder.mkdir()
    for index in range(count):
        image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index))
        (folder / f"{index}.png").write_bytes(png(image))
