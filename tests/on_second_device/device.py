"""The second device itself: it refuses what a GPU refuses, and computes what the CPU computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

HERE, THERE = torch.device("second:1"), torch.device("second:0")


def in_a_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: y + x,
        lambda x, y: x.add_(y),
        lambda x, y: x @ y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: nn.functional.linear(x, y),
        lambda x, y: x.index_select(0, y[0].long()),
        lambda x, y: torch.lerp(x, x, y),
        lambda x, y: torch._foreach_add([x], [y]),
    ],
)
@pytest.mark.parametrize("place", ["cpu", THERE])
def test_operands_of_two_devices_are_refused(mix, place):
    with pytest.raises(RuntimeError, match="on the same device"):
        mix(torch.ones(3, 3, device=HERE), torch.ones(3, 3, device=place))


def test_a_thread_has_a_current_device_and_a_new_one_begins_at_0():
    def index() -> tuple[int | None, ...]:
        made = torch.empty(1, device="second"), torch.ones(1).to("second")
        return torch.accelerator.current_device_index(), *(x.device.index for x in made)

    assert index() == (1, 1, 1) and in_a_thread(index) == (0, 0, 0)
    assert torch.accelerator.current_accelerator() == torch.device("second")
    with pytest.raises(ValueError):
        torch.empty(1, device="second:2")


def test_a_stream_must_wait_for_what_another_has_written():
    side = torch.Stream(device=HERE)
    x = torch.ones(3, device=HERE)
    with side:
        with pytest.raises(RuntimeError, match="has not waited"):
            x.add(1)
        side.wait_stream(torch.accelerator.current_stream(THERE))  # the wrong one
        with pytest.raises(RuntimeError, match="has not waited"):
            x.cpu()
    event = torch.accelerator.current_stream().record_event()
    late = torch.ones(3, device=HERE)
    side.wait_event(event)
    with side:
        y = x + 1
        with pytest.raises(RuntimeError, match="has not waited"):
            late.add(1)
        seen = y.tolist()  # the CPU has waited, and all that it starts is later
    assert (y + late).tolist() == [3, 3, 3] and seen == [2, 2, 2]
