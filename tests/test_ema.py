"""ema.py against the published code's numbers, and what it adds at both ends of a run."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.testing import assert_close

from flowalign.training.step import MovingAverage, decay_at

VECTORS = json.loads((Path(__file__).parent / "golden" / "ema.json").read_text())


def tensors(rows: list[list[float]], dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor(row, dtype=dtype) for row in rows]


@pytest.mark.parametrize("case", VECTORS["decay"], ids=lambda case: str(case["decay"]))
def test_the_warm_up_counts_optimizer_steps(case: dict) -> None:
    """Their steps count from 0: ours are the steps that were made, one more."""
    for theirs, decay in zip(case["optimization_step"], case["current_decay"], strict=True):
        assert decay_at(theirs + 1, case["decay"]) == pytest.approx(decay, rel=1e-12)


@pytest.mark.parametrize("trace", VECTORS["traces"], ids=lambda trace: trace["name"])
def test_the_average_is_the_published_one(trace: dict) -> None:
    dtype = torch.float32 if trace["dtype"] == "torch.float32" else torch.float64
    parameters = [Parameter(value) for value in tensors(trace["init"], dtype)]
    ema = MovingAverage(parameters, decay=trace["decay"], every=trace["update_step_interval"])
    for step in trace["steps"]:
        for parameter, value in zip(parameters, tensors(step["params"], dtype), strict=True):
            parameter.data.copy_(value)
        ema.step(parameters, step["optimization_step"] + 1)
        assert_close(ema.shadow_params, tensors(step["ema"], dtype), rtol=1e-6, atol=1e-9)


def run(steps: int, every: int) -> tuple[MovingAverage, list[Parameter]]:
    """A parameter that is 0 and, after its n-th step, n."""
    parameters = [Parameter(torch.zeros(2))]
    ema = MovingAverage(parameters, decay=0.9, every=every)
    for step in range(1, steps + 1):
        parameters[0].data.fill_(float(step))
        ema.step(parameters, step)
    return ema, parameters


@pytest.mark.parametrize("steps", [0, 1, 4, 7])
def test_before_the_first_averaging_it_is_the_adapter_itself(steps: int) -> None:
    ema, parameters = run(steps, 8)
    with ema.of(parameters, steps):
        assert parameters[0].tolist() == [steps, steps]
    assert ema.shadow_params[0].tolist() == [0, 0]


def test_steps_after_the_last_averaging_count_for_their_share() -> None:
    """Four of eight steps: the square root of the decay that eight would have."""
    ema, parameters = run(12, 8)
    old = float(ema.shadow_params[0][0])
    assert old == pytest.approx(8 * (1 - 8 / 17))
    with ema.of(parameters, 12):
        kept = (12 / 21) ** 0.5
        assert float(parameters[0].data[0]) == pytest.approx(kept * old + (1 - kept) * 12, rel=1e-5)
    assert float(ema.shadow_params[0][0]) == old  # it was a look: a run that goes on is the same


@pytest.mark.parametrize("steps", [3, 8, 12])
def test_the_adapter_is_put_back_to_the_bit(steps: int) -> None:
    ema, parameters = run(steps, 8)
    parameters[0].data.copy_(torch.tensor([0.1, 1e-30]))
    before = parameters[0].detach().clone()
    with pytest.raises(KeyError), ema.of(parameters, steps):
        raise KeyError
    assert torch.equal(parameters[0].data, before)
