"""Weights are on the device while somebody is inside, on the CPU otherwise, and never change."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from flowalign.backbone.placement import Placement


class Tied(nn.Module):
    """Two names for one parameter, and a buffer that no file holds."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.register_buffer("steps", torch.arange(3.0), persistent=False)


def devices(model: nn.Module) -> set[str]:
    return {t.device.type for t in (*model.parameters(), *model.buffers())}


def test_weights_come_and_go_unchanged():
    model = Tied().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    placement = Placement(model, "meta", offload=True)  # meta: a device that is not the CPU
    assert devices(model) == {"cpu"} and not model.training
    with placement:
        weight = model.one.weight
        assert devices(model) == {"meta"}
        assert model.two.weight is weight and not weight.requires_grad
        with placement:  # moved once, whoever comes in addition
            assert model.one.weight is weight
        assert devices(model) == {"meta"}
    assert devices(model) == {"cpu"} and model.two.weight is model.one.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.steps, torch.arange(3.0))


def test_the_last_of_two_threads_clears_the_device():
    model = Tied()
    placement = Placement(model, "meta", offload=True)
    inside, leave = threading.Barrier(2, timeout=10), threading.Event()

    def work() -> None:
        with placement:
            inside.wait()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    with placement:
        inside.wait()
    assert devices(model) == {"meta"}
    leave.set()
    thread.join()
    assert devices(model) == {"cpu"}


@pytest.mark.gpu
def test_a_gpu_holds_nothing_between_calls():
    model = nn.Linear(1024, 1024)
    placement = Placement(model, "cuda", offload=True)
    before = torch.cuda.memory_allocated()
    with placement:
        assert torch.cuda.memory_allocated() >= before + 4 * 1024**2
        assert model(torch.ones(1, 1024, device="cuda")).device.type == "cuda"
    assert torch.cuda.memory_allocated() < before + 4 * 1024**2
