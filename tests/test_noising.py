"""noising.py: noise levels, and clean latents with noise added."""

import dataclasses
from pathlib import Path

import fakes
import pytest
import torch
from torch.testing import assert_close

from flowalign.config.rollout import steps_within
from flowalign.training.algorithm import pairs_of
from flowalign.training.noising import noised, of_sampler, stratified
from flowalign.types import Rollout


@pytest.fixture
def rollout(random_model: str, tmp_path: Path) -> Rollout:
    return fakes.wired(fakes.forward(random_model, tmp_path / "run")).rollout(0)


def unshifted(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    return sigmas / (shift - (shift - 1) * sigmas)


def test_stratified_levels_lie_one_in_each_part_of_the_way() -> None:
    for seed in range(20):
        sigmas = stratified(3.0, 5, (seed,))
        u = unshifted(sigmas, 3.0)
        assert [int(5 * value) for value in u.tolist()] == [4, 3, 2, 1, 0]
        assert torch.equal(sigmas, stratified(3.0, 5, (seed,)))
    assert not torch.equal(stratified(3.0, 5, (0,)), stratified(3.0, 5, (1,)))


def test_stratified_levels_keep_to_their_part_of_the_way() -> None:
    drawn = torch.cat([stratified(3.0, 4, (seed,), (0.25, 0.75)) for seed in range(50)])
    u = unshifted(drawn, 3.0)
    assert 0.25 < float(u.min()) < 0.3 and 0.7 < float(u.max()) < 0.75


def test_levels_of_the_sampler_are_its_own() -> None:
    sigmas = torch.linspace(1, 0, 11)
    for seed in range(20):
        drawn = of_sampler(sigmas, 3, (seed,), (0.0, 0.99))
        steps = [int((sigmas == value).nonzero()) for value in drawn]
        assert all(low <= step < low + 3 for low, step in zip([0, 3, 6], steps, strict=True))
    assert torch.equal(of_sampler(sigmas, 9, (0,), (0.0, 0.99)), sigmas[:9])  # all but the last
    assert torch.equal(of_sampler(sigmas, 10, (0,)), sigmas[:10])


def test_random_levels_of_the_sampler_leave_out_any() -> None:
    """As DiffusionNFT's code, which trains the first 9 of a permutation of 10 steps."""
    sigmas = torch.linspace(1, 0, 11)
    drawn = [of_sampler(sigmas, 9, (seed,), stratified=False) for seed in range(200)]
    assert all(bool((levels.diff() < 0).all()) for levels in drawn)
    left_out = [sum(bool((levels == sigma).any()) for levels in drawn) for sigma in sigmas[:10]]
    assert sum(left_out) == 1800 and 150 < min(left_out) <= max(left_out) < 200


def test_the_steps_of_the_official_ranges() -> None:
    assert steps_within(10, (0.0, 0.99)) == (0, 9)  # DiffusionNFT
    assert steps_within(25, (0.0, 0.99)) == (0, 24)
    assert steps_within(14, (0.01, 0.9)) == (1, 12)  # AWM: without the first, and int(14 * .9)
    assert steps_within(10, (0.0, 0.9)) == (0, 9)  # .9 * 10 is not 8.99..


def test_the_states_lie_between_image_and_noise(rollout: Rollout) -> None:
    assert rollout.latents is not None
    sigmas = torch.tensor([1.0, 0.6, 0.0])
    noisy, velocity = noised(rollout, sigmas, (0, 0, 9))
    states, clean = noisy.states, rollout.latents
    noise = velocity + clean[:, None]
    assert_close(states[:, 0], noise[:, 0])
    assert_close(states[:, 1], 0.4 * clean + 0.6 * noise[:, 1])
    assert torch.equal(states[:, 2], clean)
    assert noisy.steps == [0, 1, 2] and noisy.sigmas.tolist()[:3] == sigmas.tolist()
    flat = noise.flatten(2).flatten(0, 1)  # every image and level has a noise of its own
    distances = torch.cdist(flat, flat) + torch.eye(len(flat)) * 1e3
    assert float(distances.min()) > 1
    assert abs(float(flat.mean())) < 0.05 and abs(float(flat.std()) - 1) < 0.05


def test_images_may_have_levels_of_their_own(rollout: Rollout) -> None:
    assert rollout.latents is not None
    sigmas = torch.rand(len(rollout), 2, generator=torch.Generator().manual_seed(0))
    noisy, velocity = noised(rollout, sigmas, (0, 0, 9))
    noise = velocity + rollout.latents[:, None]
    s = sigmas[:, :, None, None, None]
    assert_close(noisy.states, (1 - s) * rollout.latents[:, None] + s * noise)
    everything = torch.ones(len(rollout), dtype=torch.bool)
    for pairs in pairs_of(noisy, everything, 4):
        assert torch.equal(pairs.sigma, sigmas[pairs.rows, pairs.columns])
        assert torch.equal(pairs.x, noisy.states[pairs.rows, pairs.columns])


def test_the_noise_belongs_to_the_image_and_not_to_its_row(rollout: Rollout) -> None:
    assert rollout.latents is not None
    rows = [5, 2]
    part = dataclasses.replace(
        rollout, states=rollout.states[rows], latents=rollout.latents[rows],
        group=rollout.group[rows], copy=rollout.copy[rows],
    )  # fmt: skip
    sigmas = torch.tensor([0.9, 0.3])
    (_, velocity), (_, of_part) = noised(rollout, sigmas, (3, 1)), noised(part, sigmas, (3, 1))
    assert torch.equal(of_part, velocity[rows])
    assert not torch.equal(noised(rollout, sigmas, (3, 2))[1], velocity)
