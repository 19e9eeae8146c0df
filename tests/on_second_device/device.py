"""The second device itself: it refuses what a GPU refuses, and computes what the CPU computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

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


def test_numbers_and_indices_of_the_cpu_are_taken():
    x, rows = torch.arange(6.0, device=HERE).view(3, 2), torch.tensor([2, 0])
    assert (x * torch.tensor(2.0)).tolist() == [[0, 2], [4, 6], [8, 10]]
    assert x[rows].tolist() == x[[2, 0]].tolist() == x[rows.to(HERE)].tolist() == [[4, 5], [0, 1]]
    with pytest.raises(RuntimeError):
        x[rows.to(THERE)]
    with pytest.raises(RuntimeError):
        torch.ones(3)[rows.to(HERE)]
    x[torch.tensor([True, False, True])] = 0.0
    assert x.tolist() == [[0, 0], [2, 3], [0, 0]]


def test_a_thread_has_a_current_device_and_a_new_one_begins_at_0():
    def index() -> tuple[int | None, ...]:
        made = torch.empty(1, device="second"), torch.ones(1).to("second")
        return torch.accelerator.current_device_index(), *(x.device.index for x in made)

    assert index() == (1, 1, 1) and in_a_thread(index) == (0, 0, 0)
    assert torch.accelerator.current_accelerator() == torch.device("second")
    with pytest.raises(ValueError):
        torch.empty(1, device="second:2")


def test_a_small_network_learns_what_it_learns_on_the_cpu():
    def learnt(device: torch.device | str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(2),
            nn.TransformerEncoderLayer(36, 2, 16, batch_first=True), nn.Linear(36, 1),
        ).to(device)  # fmt: skip
        images = torch.randn(2, 3, 8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model.eval()
        for _ in range(3):
            model(images.to(device)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.device == torch.device(device) for p in model.parameters())
        return [p.detach().cpu() for p in model.parameters()]

    for one, other in zip(learnt("cpu"), learnt(HERE), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_each_device_has_its_own_generator():
    def drawn(seed: int, device: torch.device | str) -> list[float]:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(3, generator=generator, device=device).tolist()

    assert drawn(1, HERE) == drawn(1, THERE) == drawn(1, "cpu") != drawn(2, HERE)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator(), device=HERE)
    states = [torch.get_device_module("second").get_rng_state(d) for d in (HERE, THERE)]
    first, of_cpu = torch.rand(3, device=HERE).tolist(), torch.get_rng_state()
    assert torch.equal(torch.get_device_module("second").get_rng_state(THERE), states[1])
    torch.get_device_module("second").set_rng_state(states[0], HERE)
    assert torch.rand(3, device=HERE).tolist() == first
    assert torch.equal(torch.get_rng_state(), of_cpu)


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


def test_values_leave_and_come_as_they_are(tmp_path):
    from safetensors.torch import load_file, save_file

    x = torch.randn(3, 4, device=HERE).T
    assert torch.equal(x.cpu().to(THERE).to(HERE).cpu(), x.cpu())
    save_file({"x": x.contiguous()}, tmp_path / "x.safetensors")
    torch.save(x, tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True, map_location="cpu")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], saved)
    with pytest.raises((TypeError, RuntimeError)):
        x.numpy()
