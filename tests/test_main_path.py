"""How many functions of ours lie between `train.main` and the transformer."""

import sys
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch.nn.modules.module import register_module_forward_pre_hook

from flowalign.commands import train
from flowalign.config import to_yaml

HOUSE = tuple(str(fakes.ROOT / room) for room in ("flowalign", "rewards", "teachers", "eval"))
MOST = 12  # three of them end a run early: at a signal, on a full disk, at a NaN


def frames() -> list[str]:
    """The functions of the library on the stack, outermost first."""
    names, frame = [], sys._getframe(1)
    while frame:
        if frame.f_code.co_filename.startswith(HOUSE):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


@pytest.mark.parametrize("stage", ["grpo", "opd"])
def test_the_transformer_is_few_calls_away(random_model: str, tmp_path: Path, stage: str) -> None:
    """For the rollout, the labels of a student, and the update with its KL to the base."""
    paths: dict[str, list[str]] = {}

    def note(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, SD3Transformer2DModel):
            stack = frames()
            if "_cosines" not in stack:  # a diagnostic, one call further
                kinds = {"learn": "update", "prepare": "labels", "rollout": "rollout"}
                kind = next(kind for name, kind in kinds.items() if name in stack)
                paths[kind] = max(paths.get(kind, []), stack, key=len)

    given = ["train.updates=1", "evaluation=null"]
    if stage == "grpo":
        config = fakes.settings(random_model, tmp_path / "x", *given, "grpo.kl_weight=0.1")
    else:
        config = fakes.distillation(random_model, tmp_path / "x", *given, "student.reward_weight=1")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    hook = register_module_forward_pre_hook(note)
    try:
        fakes.AcceleratorState._reset_state(reset_partial_state=True)
        assert train.main(["--config", str(path), f"output={tmp_path / 'run'}"]) == 0
    finally:
        hook.remove()
    assert paths.keys() == {"rollout", "update"} | ({"labels"} if stage == "opd" else set())
    for kind, stack in paths.items():
        assert stack[0] == "main" and len(stack) <= MOST, (kind, stack)
