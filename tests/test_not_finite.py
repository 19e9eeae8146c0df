"""NaN and infinity: no step is taken, what went wrong first is named, and nothing of it is kept."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from fakes import weights
from torch import Tensor

from flowalign import config
from flowalign.commands import build
from flowalign.training.algorithm import Pairs, TrainingError
from flowalign.training.events import Learned, Listener
from flowalign.training.loop import Loop
from flowalign.training.run import processes


def rows(loop: Loop) -> list[dict[str, Any]]:
    """The log, which must be JSON."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    lines = (loop.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def spoil(loop: Loop, bad: Callable[[Pairs], bool], value: float = math.nan) -> None:
    """Let the student's velocity at the first of some pairs be no number."""
    real = loop.algorithm.velocity

    def velocity(pairs: Pairs) -> Tensor:
        found = real(pairs)
        return torch.cat([found[:1] * value, found[1:]]) if bad(pairs) else found

    loop.algorithm.velocity = velocity  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("stage", ["grpo", "opd", "sft"])
def test_a_velocity_that_is_nan_skips_its_step_alone_and_is_named(
    random_model: str, tmp_path: Path, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = ["train.updates=3", "ema={decay: 0.9, every: 1}", "optimizer.warmup=9"]
    if stage == "grpo":
        found = fakes.settings(random_model, tmp_path / "run", *given)
    else:
        found = fakes.distillation(random_model, tmp_path / "run", *given, stage=stage)
    loop = fakes.wired(found, moved=True)
    spoil(loop, lambda pairs: loop.update == 1 and not int(pairs.columns[0]))
    seen = []

    class Note(Listener):
        def learned(self, update: int, learned: Learned) -> None:
            average = [p.clone() for p in shadow(loop)]
            seen.append((weights(loop), loop.step.count, loop.step.lr.get_last_lr(), average))

    loop.listeners.append(Note())
    with caplog.at_level(logging.WARNING, "flowalign"):
        loop.run()
    assert [row["skipped_steps"] for row in rows(loop)] == [0, 1, 0]
    (first, steps, rate, average), (second, *same, again) = seen[0], seen[1]
    assert torch.equal(first, second) and [steps, rate] == same
    assert all(torch.equal(a, b) for a, b in zip(average, again, strict=True))
    assert not torch.equal(weights(loop), second) and loop.step.count == 2
    (said,) = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    batch = loop.prompts.batch(1)
    task, prompt = batch.tasks[0], batch.prompts[0]
    assert "velocity" in said and "step 0" in said and repr(task) in said and repr(prompt) in said


def shadow(loop: Loop) -> list[Tensor]:
    assert loop.step.ema
    return loop.step.ema.shadow_params


def test_updates_skipped_in_a_row_stop_the_run_at_its_last_good_checkpoint(random_model, tmp_path):
    given = ["train.updates=20", "train.checkpoint_every=1", "train.max_skipped=2"]
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", *given), moved=True)
    spoil(loop, lambda pairs: loop.update == 1 or loop.update >= 3, math.inf)
    with pytest.raises(TrainingError, match="max_skipped.*velocity.*update_000003"):
        loop.run()
    assert [row["skipped_steps"] for row in rows(loop)] == [0, 1, 0, 1, 1]
    kept = [path.name for path in loop.checkpoints.all()]
    assert kept == ["update_000001", "update_000003"]  # none while updates were skipped
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.parametrize("stage", ["grpo", "opd"])
def test_a_diverged_student_is_not_the_fault_of_reward_or_teacher(
    random_model: str, tmp_path: Path, stage: str
) -> None:
    given = ["train.max_skipped=2"]
    if stage == "grpo":
        found = fakes.settings(random_model, tmp_path / "run", *given)
    else:
        found = fakes.distillation(random_model, tmp_path / "run", *given)
    loop = fakes.wired(found, moved=True)
    for parameter in loop.parameters:
        parameter.data.fill_(1e30)  # finite, but no velocity of it is
    with pytest.raises(TrainingError, match="student.*step 1.*prompt.*optimizer.lr") as caught:
        loop.run()
    assert "the reward" not in str(caught.value) and "teacher" not in str(caught.value)


def test_a_cold_start_names_the_teacher_that_samples_nan(random_model: str, tmp_path: Path) -> None:
    loop = fakes.wired(fakes.distillation(random_model, tmp_path / "run", stage="sft"))
    loop.backbone.adapter_parameters("teacher_odd")[0].data.fill_(math.nan)
    with pytest.raises(TrainingError, match="teacher_odd"):
        loop.run()


def test_a_loss_and_a_gradient_are_named_where_nothing_before_them_is_wrong(random_model, tmp_path):
    for name, what in (("loss", "the loss is NaN"), ("grad", "the gradient is NaN")):
        found = fakes.settings(random_model, tmp_path / name / "run", "train.updates=1")
        loop = fakes.wired(found, moved=True)
        if name == "loss":
            real = loop.algorithm.loss

            def loss(*given: Any, real: Any = real) -> Any:
                found = real(*given)
                # NaN, while its gradient is 0
                return type(found)(found.total.detach() * math.nan + 0 * found.total)

            loop.algorithm.loss = loss  # pyright: ignore[reportAttributeAccessIssue]
        else:
            loop.parameters[0].register_hook(lambda grad: grad * math.inf)
        with pytest.raises(TrainingError, match=f"no optimizer step.*{what}"):
            loop.run()
        assert torch.isfinite(weights(loop)).all()


def scaled(loop: Loop, scale: float) -> torch.amp.GradScaler:
    """Give a run on the CPU the loss scale that accelerate uses for float16 on a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    loop.accelerator.scaler, loop.accelerator.native_amp = scaler, True
    loop.accelerator.state._mixed_precision = "fp16"
    assert loop.accelerator.mixed_precision == "fp16"
    loop.step.optimizer = AcceleratedOptimizer(
        loop.step.optimizer.optimizer, device_placement=False, scaler=scaler
    )
    loop.accelerator._optimizers = [loop.step.optimizer]
    return scaler


def test_float16_finds_its_scale_without_a_word(random_model, tmp_path, caplog) -> None:
    given = ["train.updates=3", "train.max_skipped=1"]
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", *given), moved=True)
    scaler = scaled(loop, 65536.0)
    loop.parameters[0].register_hook(lambda g: g * (math.inf if loop.update < 2 else 1))
    with caplog.at_level(logging.WARNING, "flowalign"):
        loop.run()
    assert [row["skipped_steps"] for row in rows(loop)] == [1, 1, 0]
    assert loop.step.count == 1 and scaler.get_scale() == 65536 / 4
    assert not [r for r in caplog.records if "skipped" in r.getMessage()]


def test_float16_stops_when_its_scale_is_used_up(random_model: str, tmp_path: Path) -> None:
    given = ["train.updates=9", "train.max_skipped=2"]
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", *given), moved=True)
    scaled(loop, 4.0)
    loop.parameters[0].register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainingError, match="max_skipped.*gradient"):
        loop.run()
    assert loop.update == 4  # 2, 1, 0.5 and 0.25: the last two are below 1


@pytest.mark.slow
def test_two_processes_skip_together_where_one_has_nan(random_model: str, tmp_path: Path) -> None:
    found = fakes.settings(random_model, tmp_path / "run", "train.updates=3")
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml(found))
    done = fakes.launch("-m", "test_not_finite", path, tmp_path, seconds=200)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one["steps"] == two["steps"] == 2 and torch.equal(one["weights"], two["weights"])
    assert torch.isfinite(one["weights"]).all()
    assert [row["skipped_steps"] for row in fakes.lines(tmp_path / "run")] == [0, 1, 0]
    assert "the student's velocity is NaN" in done.stderr  # the first process says it


def main() -> None:
    """On each of two processes: a run whose second one has a velocity that is NaN, once."""
    loop, *_ = build.wire(config.load(sys.argv[1]))  # type: ignore[arg-type]
    fakes.shake(loop.backbone)
    rank = loop.accelerator.process_index
    spoil(loop, lambda pairs: rank == 1 and loop.update == 1 and not int(pairs.columns[0]))
    loop.run()
    torch.save({"weights": weights(loop), "steps": loop.step.count}, f"{sys.argv[2]}/{rank}.pt")
    processes.part()


if __name__ == "__main__":
    main()
