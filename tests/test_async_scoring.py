"""Scoring beside sampling: the same scores, sooner; what hangs is given up."""

import threading
import time
from pathlib import Path

import fakes
import pytest
import torch

from flowalign.rewards import scoring
from flowalign.rewards.scoring import AsyncScorer, score
from flowalign.types import PromptBatch, Scores

REDNESS = fakes.redness
BATCH = PromptBatch(["a", "b"], ["t", "t"], [{}, {}])
IMAGES = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def asking(reward):
    """What `AsyncScorer` calls, for one reward."""
    return lambda images, batch: score(reward, images, batch.prompts, batch.metadata)


def submit_all(scorer: AsyncScorer) -> None:
    for start in (0, 2, 4):
        scorer.submit(IMAGES[start : start + 2], BATCH)


def test_the_answers_come_in_order_and_are_those_of_asking_at_once():
    scorer = AsyncScorer(asking(fakes.redness))
    submit_all(scorer)
    assert scorer.waiting == 6
    found = scorer.collect()
    whole = fakes.redness(IMAGES, BATCH.prompts * 3, BATCH.metadata * 3)
    assert torch.equal(found.value, whole.value)
    assert torch.equal(found.parts["red"], whole.parts["red"])
    assert scorer.waiting == 0


def test_a_batch_that_hangs_is_masked_and_the_others_are_scored():
    never = threading.Event()
    calls = []

    def sleepy(images, prompts, metadata):
        calls.append(len(images))
        if len(calls) == 2:
            never.wait(30)
        return Scores.of(images.mean((1, 2, 3)))

    scorer = AsyncScorer(asking(sleepy), seconds=0.2)
    submit_all(scorer)
    found = scorer.collect()
    never.set()
    assert found.valid.tolist() == [True, True, False, False, True, True]
    assert found.reasons[2] == "TimeoutError: no answer within 0.2 s"
    assert calls == [2, 2, 2], "a batch was scored twice"


def test_no_image_is_sampled_while_a_reward_changes_a_setting_of_torch(monkeypatch):
    monkeypatch.setattr(scoring, "_changers", set())
    seen = []

    def meddling(images, prompts, metadata):
        torch.set_default_dtype(torch.float64)
        time.sleep(0.05)
        return Scores.of(images.mean((1, 2, 3)))

    scorer = AsyncScorer(asking(meddling))
    for start in (0, 2, 4):
        scorer.submit(IMAGES[start : start + 2], BATCH)
        seen.append(torch.get_default_dtype())
    assert seen == [torch.float32] * 3 and scorer.collect().valid.all()


def test_the_thread_ends_with_the_one_who_asks():
    before = set(threading.enumerate())  # other tests leave some that hang
    scorer = AsyncScorer(asking(fakes.redness))
    submit_all(scorer)
    scorer.collect()
    (thread,) = set(threading.enumerate()) - before
    del scorer
    thread.join(5)
    assert not thread.is_alive()


def test_what_the_caller_must_hear_is_raised_where_it_collects():
    def interrupted(images: torch.Tensor, batch: PromptBatch) -> Scores:
        raise KeyboardInterrupt

    scorer = AsyncScorer(interrupted)
    scorer.submit(IMAGES[:2], BATCH)
    with pytest.raises(KeyboardInterrupt):
        scorer.collect()


def finished(model: str, folder: Path, *overrides: str, reward: str = "noisy_redness") -> Path:
    found = fakes.settings(
        model, folder, "train.updates=2", "rollout.batch_size=2", *overrides, reward=reward
    )
    fakes.wired(found).run()
    return folder


def test_a_run_that_scores_while_sampling_gives_the_same_numbers(random_model, tmp_path):
    during = finished(random_model, tmp_path / "ahead", reward="redness")
    after = finished(
        random_model, tmp_path / "after", "train.score_while_sampling=false", reward="redness"
    )
    assert fakes.timeless(during) == fakes.timeless(after)


def test_scoring_and_sampling_take_turns_in_time(random_model, tmp_path, monkeypatch):
    """While the rollout samples its later batches the first ones are being scored."""
    asked = []

    def watched(images, prompts, metadata):
        asked.append((len(images), threading.current_thread() is threading.main_thread()))
        return REDNESS(images, prompts, metadata)

    monkeypatch.setattr(fakes, "redness", watched)
    loop = fakes.wired(fakes.settings(random_model, tmp_path, "rollout.batch_size=2"))
    rollout = loop.rollout(0)
    deadline = time.monotonic() + 10
    while len(asked) < 4 and time.monotonic() < deadline:  # before anybody collects
        time.sleep(0.01)
    assert asked == [(2, False)] * 4
    assert torch.isfinite(torch.tensor(loop.algorithm.prepare(rollout, 0).metrics["reward"]))


@pytest.mark.parametrize("reward", ["grouped", "redness"])
def test_a_groupwise_reward_waits_for_its_group(random_model, tmp_path, monkeypatch, reward):
    sizes = []

    def grouped(images, prompts, metadata):
        sizes.append(len(images))
        return fakes.redness(images, prompts, metadata)

    grouped.groupwise = reward == "grouped"
    monkeypatch.setattr(fakes, "grouped", grouped, raising=False)
    finished(random_model, tmp_path / reward, "train.updates=1", reward="grouped")
    assert set(sizes) == ({4} if grouped.groupwise else {2})


def test_a_reward_that_seeds_changes_nothing_but_what_rewards_draw(random_model, tmp_path):
    """Neither the first weights, where it is made, nor the noise of rollouts, where it is asked."""
    plain = finished(random_model, tmp_path / "plain", reward="redness")
    seeding = finished(random_model, tmp_path / "seeding", reward="Seeding")
    assert fakes.timeless(plain) == fakes.timeless(seeding)
