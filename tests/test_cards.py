"""Steps and guidance where a config says nothing: those of the model's card."""

from typing import Any

import pytest
import torch

from flowalign.backbone import Backbone
from flowalign.checks import Launch
from flowalign.checks.numbers import card
from flowalign.commands.sample import recommended
from flowalign.config import EvalStage, ModelConfig, parse
from flowalign.training.inputs import Inputs

TURBO = "Tongyi-MAI/Z-Image-Turbo"
BENCHMARK = {"name": "red", "prompts": "test.txt", "reward": {"name": "ocr"}}
TASK = {**BENCHMARK, "prompts": "train.txt", "validation": "test.txt"}


def run(model: str, *overrides: str, stage: str = "grpo", **keys: Any) -> Any:
    """The config of a run that says nothing of steps and guidance."""
    data = {"stage": stage, "output": "run", "model": {"id": model}, "tasks": [TASK], **keys}
    return parse(data, overrides)


def against(config: Any) -> list[tuple[str, str]]:
    """(level, text) of each problem."""
    return [(problem.level, problem.text) for problem in card(config, Launch(), Inputs())]


@pytest.mark.parametrize(
    ("model", "steps", "guidance"),
    [
        ("Tongyi-MAI/Z-Image-Turbo", 8, 1.0),
        ("stabilityai/stable-diffusion-3.5-large-turbo", 4, 1.0),
        ("black-forest-labs/FLUX.1-dev", 10, 3.5),  # a base trains at 10 of its 50 steps
        ("models/Z-Image-Turbo", 8, 1.0),  # a folder of that name
        ("stabilityai/stable-diffusion-3.5-medium", 10, 4.5),
        ("somebody/else", 10, 4.5),
    ],
)
def test_defaults_are_those_of_the_card(model: str, steps: int, guidance: float) -> None:
    rollout = run(model).rollout
    assert (rollout.steps, rollout.guidance) == (steps, guidance)
    assert run(model, "rollout={steps: null, guidance: null}").rollout == rollout
    assert parse(run(model).model_dump(mode="json")) == run(model)  # of a run that goes on
    given = run(model, "rollout={steps: 6, guidance: 2.0}").rollout
    assert (given.steps, given.guidance) == (6, 2.0)
    data = {"stage": "eval", "output": "run", "model": {"id": model},
            "benchmarks": [BENCHMARK]}  # fmt: skip
    sampling = parse(data, stage=EvalStage).sampling
    assert (sampling.steps, sampling.guidance) == (steps, guidance)


def test_the_steps_of_z_image_turbo_are_those_of_its_card() -> None:
    """It says 9 of the grid that diffusers had before 0.39, whose last one does nothing."""
    assert recommended(TURBO) == (8, 1.0)
    even = torch.linspace(1, 0, 9)
    found = Backbone.load(ModelConfig(id=TURBO), "meta").sigmas(8)
    torch.testing.assert_close(found, 3 * even / (1 + 2 * even))


@pytest.mark.parametrize(
    ("stage", "level"), [("nft", "note"), ("awm", "note"), ("sft", "fault"), ("dpo", "fault")]
)
def test_training_a_distilled_model_back_to_straight_paths_is_named(stage: str, level: str) -> None:
    teachers = {"teachers": {"red": {"adapter": None}}} if stage == "sft" else {}
    given = "rollout={kind: ode, group_size: 2}"
    found = against(run(TURBO, given, stage=stage, **teachers))
    assert [given for given, _ in found] == [level] and "straight" in found[0][1]
    assert not against(run("Tongyi-MAI/Z-Image", given, stage=stage, **teachers))
    assert not against(run(TURBO))  # GRPO at its own steps


def test_a_student_of_a_distilled_model_stays_on_its_grid() -> None:
    teachers = {"teachers": {"red": {"adapter": "red"}}}
    jumps = "rollout.kind=ode", "student.substeps=4"
    for given in (["rollout.kind=sde"], ["rollout={kind: ode, steps: 12}"], jumps):
        ((level, text),) = against(run(TURBO, *given, stage="opd", **teachers))
        assert level == "fault" and "rollout.kind=ode rollout.steps=8" in text
    assert not against(run(TURBO, "rollout.kind=ode", stage="opd", **teachers))
    assert not against(run("Tongyi-MAI/Z-Image", stage="opd", **teachers))


def test_what_is_far_from_the_card_is_found() -> None:
    assert not against(run("black-forest-labs/FLUX.1-dev"))
    (scale,) = against(run(TURBO, "rollout.guidance=5"))
    assert scale[0] == "fault" and "rollout.guidance" in scale[1]
    (steps,) = against(run(TURBO, "rollout.steps=20"))
    assert steps[0] == "fault" and "steps" in steps[1]
    assert [level for level, _ in against(run("Qwen/Qwen-Image", "rollout.guidance=1"))] == ["note"]
    high = against(run("Qwen/Qwen-Image", "evaluation={guidance: 12}"))
    assert [level for level, _ in high] == ["note"] and "evaluation.guidance" in high[0][1]
