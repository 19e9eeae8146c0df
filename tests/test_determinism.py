"""train.deterministic: torch's own switch while a run lasts, and what cannot keep it is refused."""

from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from safetensors.torch import load_file

from flowalign.backbone.attention import unavailable
from flowalign.checks import Launch, check_stage
from flowalign.commands import run
from flowalign.config import ConfigError

ON = "train.deterministic=true"


def flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


class Witness:
    """Redness that notes how torch is set, while it scores."""

    seen: set[tuple[bool, ...]] = set()

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        self.seen.add((*flags(), torch.is_deterministic_algorithms_warn_only_enabled()))
        return fakes.redness(images, prompts, metadata)


@pytest.mark.parametrize("override", [ON, "train.deterministic=false"])
def test_a_run_is_deterministic_from_its_start_to_its_end_only(
    random_model: str, tmp_path: Path, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Witness, "seen", set())
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = flags()
    given = ["tasks.0.reward.name=test_determinism:Witness", "train.updates=1", override]
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    run.train(fakes.settings(random_model, tmp_path / "run", *given))
    assert Witness.seen == {(True, True, False, False) if override == ON else (*before, False)}
    assert flags() == before


def outcome(model: str, folder: Path, *given: str) -> tuple[bytes, list[dict[str, float]]]:
    """The weights of a run's adapter, and its log without times."""
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    held_out = f"tasks.0.validation={folder.parent / 'prompts.txt'}"
    evaluated = [held_out, "evaluation={every: 1, prompts: 4}"]
    run.train(fakes.settings(model, folder, ON, "train.updates=2", *evaluated, *given))
    (file,) = folder.glob("adapter/*.safetensors")
    weights = {name: value.numpy().tobytes() for name, value in load_file(file).items()}
    return b"".join(weights[name] for name in sorted(weights)), fakes.timeless(folder)


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], ["model.dtype=bfloat16", "rollout.guidance=4.5"]])
def test_two_runs_are_equal_to_the_bit(random_model: str, tmp_path: Path, given: list[str]) -> None:
    one, two = (outcome(random_model, tmp_path / name / "run", *given) for name in ("a", "b"))
    assert one == two and len(one[1]) == 5


def refused(config: Any) -> str:
    try:
        check_stage(config, Launch())
    except ConfigError as error:
        return str(error)
    return ""


def test_attention_whose_backward_pass_varies_is_refused(tmp_path: Path) -> None:
    fits = {"null": True, "native": True, "_native_math": True, "_native_efficient": True,
            "_native_cudnn": False, "flash": False, "xformers": False, "sage": False}  # fmt: skip
    for backend, repeatable in fits.items():
        given = [ON, f"model.attention={backend}", "model.id=black-forest-labs/FLUX.1-dev"]
        problem = refused(fakes.settings("tiny", tmp_path / "run", *given))
        missing = unavailable(backend) if backend != "null" else None
        assert ("deterministic" in problem) != repeatable, backend
        without = refused(fakes.settings("tiny", tmp_path / "run", *given[1:]))
        assert ("model.attention" in without) == bool(missing), backend


@pytest.mark.gpu
def test_two_runs_on_a_gpu_are_equal_to_the_bit(random_model: str, tmp_path: Path) -> None:
    given = "model.dtype=bfloat16"
    one, two = (outcome(random_model, tmp_path / name / "run", given) for name in ("a", "b"))
    assert one == two
