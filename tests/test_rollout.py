# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# (diffusers annotates a pipeline's result and latents loosely)
"""The sampling loop: it is diffusers' own at zero noise, and every image owns its noise."""

from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowalign import sde
from flowalign.backbone import Backbone
from flowalign.config import RolloutConfig, WindowConfig
from flowalign.training.algorithm import STUDENT
from flowalign.training.rollout import Noise, Schedule, places, sample, shard, window_of
from flowalign.types import Rollout, Source

STEPS = 4


@pytest.fixture(scope="module")
def backbone(random_model: str) -> Backbone:
    return fakes.adapted(random_model)


def run(
    backbone: Backbone, kind: str = "sde", *, window: tuple[int, int] = (0, 3),
    shared: bool = False, prompts: slice = slice(0, 4), batch_size: int = 32,
) -> Rollout:  # fmt: skip
    schedule = Schedule(backbone.sigmas(STEPS), kind, 0.7, window)
    where = places(4, 2)[2 * prompts.start : 2 * prompts.stop]
    batch = fakes.batch(4).select([prompt for prompt, _ in where])
    options = {"places": where, "batch_size": batch_size}
    noise = Noise((7, 0), shared)
    return sample(backbone, batch, schedule, guidance=1.0, noise=noise, **options)


def images(rollout: Rollout) -> Tensor:
    assert rollout.images is not None
    return rollout.images


@pytest.mark.parametrize("kind", ["sde", "cps", "ode"])
def test_noise_belongs_to_the_image(backbone: Backbone, kind: str) -> None:
    whole = run(backbone, kind)
    for batch_size in (1, 3):
        assert_close(images(run(backbone, kind, batch_size=batch_size)), images(whole),
                     rtol=0, atol=1e-5)  # fmt: skip
    shards = [run(backbone, kind, prompts=slice(0, 2)), run(backbone, kind, prompts=slice(2, 4))]
    for name in ("images", "states", "group") + (("log_probs",) if kind != "ode" else ()):
        joined = torch.cat([getattr(shard, name) for shard in shards])
        assert_close(joined, getattr(whole, name), rtol=0, atol=1e-5)
    assert sum((shard.batch.prompts for shard in shards), []) == whole.batch.prompts


def test_only_copies_that_share_their_noise_start_alike(backbone: Backbone) -> None:
    shared, own = run(backbone, shared=True), run(backbone)
    start, later = shared.states[:, 0], shared.states[:, 1]
    assert torch.equal(start[0::2], start[1::2])
    assert (later[0::2] - later[1::2]).flatten(1).std(1).min() > 0.1
    for first in (start[0::2], own.states[:, 0]):  # distinct otherwise, and standard normal
        flat = first.flatten(1)
        assert torch.corrcoef(flat).triu(1).abs().max() < 0.35  # 256 numbers: 5.6 std errors
        assert_close(flat.std(), torch.tensor(1.0), rtol=0, atol=0.1)
    assert run(backbone).group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_only_trained_steps_are_kept_with_the_log_prob_of_what_is_kept(
    backbone: Backbone, kind: str
) -> None:
    whole, window = run(backbone, kind), run(backbone, kind, window=(1, 3))
    assert window.steps == [1, 2] and window.states.shape[:2] == (8, 2)
    for rollout in (whole, window):
        assert rollout.next_states is not None and rollout.log_probs is not None
        assert torch.equal(rollout.states[:, 1:], rollout.next_states[:, :-1])
        schedule = Schedule(rollout.sigmas, kind, 0.7, (0, 3))
        for column, step in enumerate(rollout.steps):
            x = rollout.states[:, column]
            velocity = backbone.velocity(
                x, float(rollout.sigmas[step]), rollout.conditioning, guidance=1.0
            )
            gaussian = sde.scheduled_transition(schedule, x, velocity, torch.full((8,), step))
            found = sde.log_prob(gaussian, rollout.next_states[:, column])
            assert torch.equal(found, rollout.log_probs[:, column])


@pytest.mark.parametrize(("prompts", "copies", "shares"), [(16, 16, 2), (8, 4, 1), (8, 2, 1)])
def test_an_optimizer_step_learns_from_the_same_images_on_any_number_of_processes(
    prompts: int, copies: int, shares: int
) -> None:
    everyone = places(prompts, copies)
    size = len(everyone) // shares
    for world in (1, 2, 4, 8, 16):
        held = [shard(prompts, copies, shares, rank, world) for rank in range(world)]
        own = size // world
        for share in range(shares):
            together = [place for part in held for place in part[share * own : (share + 1) * own]]
            assert together == everyone[share * size : (share + 1) * size], world


def test_each_image_is_sampled_by_its_own_source(random_model: str, tmp_path: Path) -> None:
    """Whatever the order of the sources, and the batch: as each source alone samples it."""
    found = fakes.adapted(random_model)
    for name, path in fakes.teachers(random_model, tmp_path).items():
        found.load_adapter(name, path, frozen=True)
    schedule = Schedule(found.sigmas(STEPS), "ode", 0.0, None)
    where = places(4, 2)
    options = {"guidance": 9.0, "noise": Noise((7, 0)), "places": where, "batch_size": 3}
    batch = fakes.batch(4).select([prompt for prompt, _ in where])
    each = [Source("odd", 1.0), Source(None, 2.0), Source("even", 3.0), Source("odd", 3.0)] * 2
    mixed = images(sample(found, batch, schedule, sources=each, **options))
    for source in set(each):
        alone = images(sample(found, batch, schedule, sources=[source] * 8, **options))
        rows = [row for row, of in enumerate(each) if of == source]
        assert_close(mixed[rows], alone[rows], rtol=0, atol=1e-5)
        assert (alone[rows] - alone[[(row + 2) % 8 for row in rows]]).abs().max() > 1e-3
    assert found.active == STUDENT


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"kind": "sde"}, (0, 9)),
        ({"kind": "cps"}, (0, 9)),
        ({"kind": "ode"}, (0, 10)),  # its last step needs no noise
        ({"kind": "ode", "steps": 1}, (0, 1)),
        ({"kind": "ode", "window": (0, 9)}, (0, 9)),
    ],
)
def test_by_default_all_steps_are_trained_that_can_be(
    settings: dict[str, Any], trained: tuple[int, int]
) -> None:
    rollout = RolloutConfig(**settings)
    assert rollout.trained == trained and not list(rollout.problems())
    sliding = RolloutConfig(kind=rollout.kind, window=WindowConfig(width=4))
    assert window_of(sliding, 6) == ((6, 10) if rollout.kind == "ode" else (0, 4))


def test_a_window_slides_from_high_to_low_noise_and_starts_over() -> None:
    """One step every `every` updates, over all places inside of all steps but the last."""
    slow, wide = (RolloutConfig(window=WindowConfig(width=w, every=e)) for w, e in ((4, 3), (9, 1)))
    found = [window_of(slow, update) for update in range(21)]
    assert found[::3] == [(0, 4), (1, 5), (2, 6), (3, 7), (4, 8), (5, 9), (0, 4)]
    assert all(found[i] == found[i - i % 3] for i in range(21))
    assert {window_of(wide, update) for update in range(5)} == {(0, 9)}
