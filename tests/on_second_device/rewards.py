"""Every reward with a network on `second:1`, scored in the thread that scores beside sampling."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import pytest
import test_hpsv2
import test_imagereward
import test_mask2former
import torch
from PIL import Image
from small_models import PROMPTS, clip_folder, pictures
from test_aesthetic import head_weights
from torch import nn

from flowalign import rewards
from flowalign.rewards.geneval import RULES
from flowalign.rewards.scoring import AsyncScorer, Worker
from flowalign.types import PromptBatch, Reward, Scores

HERE, THERE, CPU = map(torch.device, ("second:1", "second:0", "cpu"))
CLAUSES = [[{"class": name, "count": 1, "color": "red"}] for name in ("person", "dog", "kite")]

hpsv2, imagereward, mask2former = (
    test.options for test in (test_hpsv2, test_imagereward, test_mask2former)
)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(clip_folder(tmp_path_factory.mktemp("clip")))


@pytest.fixture
def clipscore(clip: str) -> dict[str, Any]:
    return {"model": clip}


@pytest.fixture
def pickscore(clip: str) -> dict[str, Any]:
    return {"model": clip}


diversity = clipscore


@pytest.fixture
def similarity(clip: str, tmp_path) -> dict[str, Any]:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    return {"model": clip, "images": str(tmp_path)}


@pytest.fixture
def aesthetic(clip: str, tmp_path) -> dict[str, Any]:
    torch.save(head_weights(), tmp_path / "head.pth")
    return {"model": clip, "head": str(tmp_path / "head.pth")}


@pytest.fixture(autouse=True)
def _every_box_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "threshold", 0.0)


@pytest.fixture
def geneval(mask2former: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in mask2former.items() if key != "device"}
    return {"detector": "mask2former", "detector_options": options}


@pytest.fixture
def weighted(pickscore: dict[str, Any], geneval: dict[str, Any]) -> dict[str, Any]:
    gate = {"reward": {"name": "pickscore", "options": pickscore}, "median": 0.5, "spread": 0.1}
    parts = [{"name": "normalized", "options": gate}, {"name": "geneval", "options": geneval}]
    return {"rewards": parts}


WITH_NETWORKS = [
    "aesthetic", "clipscore", "diversity", "geneval", "hpsv2", "imagereward", "pickscore",
    "similarity", "weighted",
]  # fmt: skip


def batch(name: str) -> PromptBatch:
    prompts = ["one"] * 6 if name == "diversity" else PROMPTS
    return PromptBatch(prompts, [name] * 6, [{"include": clause} for clause in 2 * CLAUSES])


def networks(thing: Any, depth: int = 12) -> Iterator[nn.Module]:
    """The networks that a reward holds."""
    if isinstance(thing, nn.Module):
        yield thing
    elif isinstance(thing, dict) and depth:
        for value in thing.values():
            yield from networks(value, depth - 1)
    elif isinstance(thing, MethodType) and depth:  # such as the encoder of `diversity`
        yield from networks(thing.__self__, depth - 1)
    elif type(thing).__module__.startswith("flowalign") and depth:
        yield from networks(vars(thing), depth - 1)


def places(reward: Reward) -> set[torch.device]:
    """Where its weights lie."""
    return {p.device for network in networks(reward) for p in network.parameters()}


def in_the_background(reward: Reward, asked: PromptBatch) -> Scores:
    """The scores of images that the device has only just made."""
    images, _ = pictures(6, 40, 48)

    def score(images: torch.Tensor, batch: PromptBatch) -> Scores:
        return rewards.score(reward, images, batch.prompts, batch.metadata)

    scorer = AsyncScorer(score)
    scorer.submit(images.to(HERE) * 0.5 + images.to(HERE) / 2, asked)
    return scorer.collect()


@pytest.mark.parametrize("name", WITH_NETWORKS)
def test_a_reward_scores_on_its_device_in_a_worker_thread(
    name: str, request: pytest.FixtureRequest
) -> None:
    options = {**request.getfixturevalue(name)}
    options.pop("device", None)
    asked = batch(name)
    known = rewards.RewardSpec(name, options).build(CPU)
    assert places(known) == {CPU}
    resident = {CPU} if name == "aesthetic" else set()  # its head stays there
    expected = in_the_background(known, asked)
    assert not expected.failures and expected.value.std() > 0
    for device in (HERE, torch.device("second"), None):
        reward = rewards.RewardSpec(name, options).build(device)
        assert places(reward) - resident == {HERE}
        found = in_the_background(reward, asked)
        assert not found.failures
        torch.testing.assert_close(found.value, expected.value, atol=1e-4, rtol=1e-4)
    other = rewards.RewardSpec(name, options).build(THERE)
    assert places(other) - resident == {THERE}
    assert not in_the_background(other, asked).failures


@pytest.mark.parametrize("name", ["clipscore", "geneval", "hpsv2", "imagereward"])
def test_an_offloaded_reward_leaves_the_device_as_it_was(
    name: str, request: pytest.FixtureRequest
) -> None:
    options = {**request.getfixturevalue(name), "device": str(HERE)}
    if name == "geneval":
        options["detector_options"] = {**options["detector_options"], "offload": True}
    else:
        options["offload"] = True
    reward, asked = rewards.build(name, **options), batch(name)
    for _ in range(2):
        assert places(reward) == {CPU}
        assert not in_the_background(reward, asked).failures


def test_a_worker_works_where_it_was_made_whoever_asks() -> None:
    """A server's threads begin at device 0; its reward was built in the main thread."""
    worker = Worker()
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: worker.submit(lambda: torch.zeros(1, device="second")).result())
    assert made.result().device == HERE


def test_the_worker_waits_for_what_the_caller_has_made(clipscore: dict[str, Any]) -> None:
    """And works on a stream of its own, which the caller need not wait for."""
    streams, mine = [], torch.accelerator.current_stream()
    reward = rewards.build("clipscore", **clipscore, device=str(HERE))

    def score(images: torch.Tensor, batch: PromptBatch) -> Scores:
        streams.append(torch.accelerator.current_stream())
        return rewards.score(reward, images, batch.prompts, batch.metadata)

    scorer, asked = AsyncScorer(score), batch("clipscore")
    for _ in range(2):
        images, _ = pictures(6, 40, 48)
        scorer.submit(images.to(HERE).flip(0), asked)
    assert not scorer.collect().failures
    assert streams[0] == streams[1] != mine and streams[0].device == HERE
    assert torch.accelerator.current_stream() == mine
