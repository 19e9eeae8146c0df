"""The training loop under GRPO, on a reward that is not ours and a model of random weights."""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import lines, weights
from torch import Tensor
from torch.testing import assert_close

from flowalign import sde
from flowalign.training.algorithm import Prepared, TrainingError, pairs_of
from flowalign.training.loop import Loop
from flowalign.training.losses import kl_factors
from flowalign.training.step import strided
from flowalign.types import Rollout, Scores

LINEAR = ["optimizer.eps=1.0", "optimizer.lr=30.0"]  # Adam's first step ~ lr * gradient


def updated(model: str, folder: Path, *overrides: str, reward: str = "redness", count: int = 1,
            moved: bool = True) -> Loop:  # fmt: skip
    """A run after `count` updates."""
    found = fakes.settings(model, folder, f"train.updates={count}", *overrides, reward=reward)
    loop = fakes.wired(found, moved=moved)
    loop.run()
    return loop


def ratio_errors(loop: Loop, rollout: Rollout, keep: Tensor, size: int) -> Tensor:
    """|ratio - 1| of every pair, computed as an update does, in micro-batches of `size`."""
    found = []
    for pairs in pairs_of(rollout, keep, size):
        gaussian = sde.scheduled_transition(
            loop.algorithm.plan(0), pairs.x, loop.algorithm.velocity(pairs), pairs.steps
        )
        x_next, old_log_prob = pairs.action()
        log_prob = sde.log_prob(gaussian, x_next)
        assert log_prob.requires_grad and old_log_prob is not None
        found.append((torch.exp(log_prob - old_log_prob) - 1).abs().detach())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "guidance", "window"),
    [("sde", 1, "null"), ("sde", 4.5, "[0, 2]"), ("cps", 1, "[1, 3]"), ("cps", 4.5, "null")],
)
def test_the_first_ratio_is_one(random_model, tmp_path, kind: str, guidance: float, window: str):
    overrides = [f"rollout.{k}={v}" for k, v in
                 {"kind": kind, "guidance": guidance, "window": window}.items()]  # fmt: skip
    overrides += ["optimizer.micro_batch=8", "train.updates=2"]
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run", *overrides), moved=True)
    rollout = loop.rollout(0)
    everything = torch.ones(8, dtype=torch.bool)
    with loop.step.averaged():
        pass
    assert ratio_errors(loop, rollout, everything, 8).max() == 0
    some = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
    assert ratio_errors(loop, rollout, some, 8).max() == 0
    for keep, size in ((some, 1), (some, 3), (everything, 16), (everything, 100)):
        assert ratio_errors(loop, rollout, keep, size).max() <= 1e-6
    loop.run()
    first, *later = lines(loop)
    assert first["ratio_error"] == 0 and all(line["ratio_error"] == 0 for line in later)


def test_gradient_accumulation_changes_nothing(random_model: str, tmp_path: Path) -> None:
    whole = updated(random_model, tmp_path / "whole", *LINEAR, "optimizer.micro_batch=24")
    before = fakes.wired(fakes.settings(random_model, tmp_path / "before"), moved=True)
    assert (weights(whole) - weights(before)).abs().max() > 1e-3
    for micro in (1, 5):
        size = f"optimizer.micro_batch={micro}"
        parts = updated(random_model, tmp_path / str(micro), *LINEAR, size)
        assert_close(weights(parts), weights(whole), rtol=0, atol=1e-5)
        assert lines(parts)[0]["grad_norm"] == pytest.approx(lines(whole)[0]["grad_norm"], rel=1e-3)


def test_dropping_images_of_no_advantage_changes_nothing(random_model: str, tmp_path: Path) -> None:
    class KeepAll:
        """The loop's algorithm, but for keeping every image."""

        def __init__(self, inner) -> None:
            self.inner = inner

        def __getattr__(self, name: str):
            return getattr(self.inner, name)

        def prepare(self, rollout: Rollout, update: int) -> Prepared:
            found = self.inner.prepare(rollout, update)
            return dataclasses.replace(found, keep=torch.ones_like(found.keep))

    dropped = updated(random_model, tmp_path / "a", *LINEAR, reward="first_of_pair")
    assert lines(dropped)[0]["kept_share"] == 0.5
    found = fakes.settings(random_model, tmp_path / "b", *LINEAR, "train.updates=1",
                           reward="first_of_pair")  # fmt: skip
    kept = fakes.wired(found, moved=True)
    kept.algorithm = KeepAll(kept.algorithm)  # pyright: ignore[reportAttributeAccessIssue]
    kept.run()
    assert_close(weights(kept), weights(dropped), rtol=0, atol=1e-5)


def test_updates_per_rollout_are_optimizer_steps_on_shares(random_model: str, tmp_path: Path):
    loop = updated(random_model, tmp_path / "run", "optimizer.updates_per_rollout=2",
                   "optimizer.warmup=9", count=2)  # fmt: skip
    assert (loop.update, loop.step.count) == (2, 4)
    steps = {float(state["step"]) for state in loop.step.optimizer.optimizer.state.values()}
    assert steps == {4.0}
    assert loop.step.lr.get_last_lr() == [pytest.approx(1e-3 * 4 / 9)]
    assert lines(loop)[1]["ratio_error"] > 0  # the second share sees moved weights


@pytest.mark.parametrize(("schedule", "rates"), [("constant", [1, 1, 1]),
                                                 ("linear", [1, 2 / 3, 1 / 3]),
                                                 ("cosine", [1, 0.75, 0.25])])  # fmt: skip
def test_the_learning_rate_goes_as_its_schedule_over_the_whole_run(
    random_model: str, tmp_path: Path, schedule: str, rates: list[float]
) -> None:
    given = [f"optimizer.schedule={schedule}", "rollout.steps=2"]
    loop = updated(random_model, tmp_path / "run", *given, count=3)
    assert [line["lr"] / 1e-3 for line in lines(loop)] == pytest.approx(rates)


@pytest.mark.slow
def test_a_few_updates_raise_the_reward(random_model: str, tmp_path: Path) -> None:
    overrides = ["optimizer.lr=3e-2", "rollout.group_size=32", "rollout.batch_size=64",
                 "optimizer.micro_batch=64", "grpo.clip_range=1.0"]  # fmt: skip
    loop = updated(random_model, tmp_path / "run", *overrides, count=20, moved=False)
    rewards = torch.tensor([line["reward"] for line in lines(loop)])
    spread = lines(loop)[0]["reward_std"]  # among images; that of a mean of 64 is an eighth
    assert rewards[-3:].mean() > rewards[:3].mean() + 0.7 * spread


@pytest.mark.parametrize(("how", "reason"), [("nan", "returned nan"), ("raise", "on holiday")])
def test_a_failing_reward_stops_the_run_with_its_reason(
    random_model: str, tmp_path: Path, how: str, reason: str
) -> None:
    options = f"tasks.0.reward.options={{rows: [0, 1, 2, 4, 5], how: {how}}}"
    found = fakes.settings(random_model, tmp_path / "run", options, reward="Faulty")
    with pytest.raises(TrainingError, match=f"max_invalid_share.*{reason}.*--resume"):
        fakes.wired(found).run()


def test_the_logged_kl_is_the_mean_over_all_trained_steps(random_model: str, tmp_path: Path):
    """A small rollout is measured completely, whatever the micro-batch and the kept images are."""
    logged = []
    for micro in (5, 24):
        size = f"optimizer.micro_batch={micro}"
        loop = updated(random_model, tmp_path / str(micro), size, reward="first_of_pair")
        logged.append(lines(loop)[0]["kl"])
    weighted = fakes.settings(random_model, tmp_path / "other", "grpo.kl_weight=1.0")
    other = fakes.wired(weighted, moved=True)
    prepared: Any = other.prepare(other.rollout(0))
    everything = torch.ones(8, dtype=torch.bool)
    kls = [
        other.algorithm.loss(pairs, other.algorithm.velocity(pairs), prepared).metrics["kl"]
        for pairs in pairs_of(prepared.rollout, everything, 8)
    ]
    assert max(kls) > 1.5 * min(kls)
    assert logged == pytest.approx([sum(kls) / len(kls)] * 2, rel=1e-3)


def test_the_kl_is_the_one_that_is_named(random_model: str, tmp_path: Path) -> None:
    """The log shows the exact one either way, so that runs can be compared."""
    plain = fakes.wired(fakes.settings(random_model, tmp_path / "plain")).algorithm  # no KL
    for form in ("exact", "published"):
        given = ["grpo.kl_weight=1.0", *[f"grpo.kl={form}"] * (form != "exact")]
        loop = fakes.wired(fakes.settings(random_model, tmp_path / form, *given), moved=True)
        prepared: Any = loop.prepare(loop.rollout(0))
        sigmas = prepared.rollout.sigmas
        for pairs in pairs_of(prepared.rollout, torch.ones(8, dtype=torch.bool), 8):  # a step each
            velocity = loop.algorithm.velocity(pairs)
            found = loop.algorithm.loss(pairs, velocity, prepared)
            part = float((found.total - plain.loss(pairs, velocity, prepared).total).detach())
            factor = float(kl_factors(sigmas, form)[pairs.steps[0]])
            assert part == pytest.approx(factor * found.metrics["kl"], rel=1e-3)


@pytest.mark.parametrize(("images", "count"), [(8, 3), (48, 9), (48, 1), (4, 40)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_pairs_that_are_measured_are_the_same_on_any_number_of_processes(
    images: int, count: int, world: int
) -> None:
    """Every step equally often, images from all over the batch."""
    numbers = [torch.arange(images)[rank::world] for rank in range(world)]
    found = [
        (int(of_rank[row]), int(column))
        for of_rank in numbers
        for row, column in zip(*strided(of_rank, images, count), strict=True)
    ]
    assert len(found) == len(set(found)) == count * min(images, -(-32 // count))
    assert set(Counter(column for _, column in found).values()) == {len(found) // count}
    assert max(image for image, _ in found) >= images * 3 // 4


def test_the_kl_weight_acts_only_where_the_student_has_moved(random_model: str, tmp_path: Path):
    def after(weight: float) -> list[Tensor]:
        given = ["optimizer.lr=1e-2", f"grpo.kl_weight={weight}"]
        loop = fakes.wired(fakes.settings(random_model, tmp_path / f"run_{weight}", *given))
        learnt = []
        for update in range(2):
            loop.learn(loop.prepare(loop.rollout(update)))
            learnt.append(weights(loop))
        return learnt

    (first, second), (same, other) = after(0.0), after(10.0)
    assert torch.equal(first, same)
    assert (second - other).abs().max() > 1e-3


class Told:
    """Redness that counts its evaluations, of four prompts each, and may say something else there:
    a mean, half a point more or less; or, for NaN, that it failed on most images, and that what is
    left is wonderful. On the class, as each run builds its own."""

    says: tuple[float | None, ...] = ()
    seen = 0

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[Any]) -> Scores:
        found, kind = fakes.redness(images, prompts, metadata), type(self)
        if not all(prompt.startswith("held") for prompt in prompts):
            return found
        kind.seen += 1
        said = dict(enumerate(kind.says, 1)).get(kind.seen)
        if said is None:
            return found
        value = torch.tensor([0.5, -0.5, 0.5, -0.5]) + said  # ± .29
        lost = torch.tensor([99.0, *[torch.nan] * 3])
        return Scores.of(lost if math.isnan(said) else value, red=found.parts["red"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[Told]:
    monkeypatch.setattr(Told, "seen", 0)
    monkeypatch.setattr(Told, "says", ())
    return Told


def evaluated(model: str, folder: Path, count: int, *, resume: bool = False) -> Loop:
    """A run that is evaluated at every update, from 0 on."""
    held_out = folder.parent / "held_out.txt"
    held_out.parent.mkdir(parents=True, exist_ok=True)
    held_out.write_text("\n".join(f"held {letter}" for letter in "ABCD"))
    given = [f"tasks.0.validation={held_out}", "evaluation={every: 1, prompts: 4}",
             "tasks.0.reward.name=test_loop:Told", "train.checkpoint_every=1",
             "rollout.steps=2", f"train.updates={count}"]  # fmt: skip
    loop = fakes.wired(fakes.settings(model, folder, *given))
    assert loop.resume() == resume
    loop.run()
    return loop


@pytest.mark.parametrize(
    ("means", "kept"),
    [
        ((2.0, 1.8), 1), ((2.0, 1.6), 0), ((2.0, 2.0), 0), ((2.0, 1.8, 1.7), 1),
        ((2.0, 1.6, 1.9), 2),
    ],
)  # fmt: skip
def test_the_first_weights_are_kept_only_where_those_after_are_clearly_worse(
    random_model: str, tmp_path: Path, told: type[Told], means: Any, kept: int
) -> None:
    told.says = means
    loop = evaluated(random_model, tmp_path / "run", len(means) - 1)
    assert loop.evaluations.best == {"headline": pytest.approx(means[kept]), "update": kept}


def test_an_evaluation_over_few_images_never_chooses_the_best(
    random_model: str, tmp_path: Path, told: type[Told]
) -> None:
    told.says = (None, torch.nan)
    loop = evaluated(random_model, tmp_path / "run", 2)
    rows = [row for row in lines(loop) if any(key.startswith("eval/") for key in row)]
    assert [row.get("eval/lost") for row in rows] == [None, 1, None]
    assert [row["update"] for row in rows if "eval/headline" in row] == [0, 2]
    assert loop.evaluations.best["headline"] < 1 and loop.evaluations.best["update"] != 1
    assert "eval/red/reward" not in rows[1]


def test_a_run_whose_last_evaluation_was_lost_stops_and_takes_it_again(
    random_model: str, tmp_path: Path, told: type[Told]
) -> None:
    whole = evaluated(random_model, tmp_path / "whole" / "run", 1)
    told.seen, told.says = 0, (None, torch.nan)
    with pytest.raises(TrainingError, match="--resume"):
        evaluated(random_model, tmp_path / "run", 1)
    assert (tmp_path / "run" / "checkpoints" / "update_000001").is_dir()
    told.seen, told.says = 0, ()
    again = evaluated(random_model, tmp_path / "run", 1, resume=True)
    assert again.evaluations.best == whole.evaluations.best
    assert [row for row in lines(again) if "eval/headline" in row] == [
        row for row in lines(whole) if "eval/headline" in row
    ]
    assert not any("eval/lost" in row for row in lines(again))
    assert told.seen == 1  # nothing else was repeated


def test_dropped_images_count_neither_for_the_policy_nor_for_the_kl(random_model, tmp_path) -> None:
    """Else the KL would be stronger the more groups are all alike."""
    given = ["grpo.kl_weight=1.0", "rollout.group_size=4"]
    found = fakes.settings(random_model, tmp_path / "run", *given, reward="first_of_pair")
    loop = fakes.wired(found, moved=True)
    prepared = loop.prepare(loop.rollout(0))
    assert isinstance(prepared, Prepared)
    credit: Any = prepared
    assert torch.equal(prepared.keep, credit.advantage != 0) and prepared.keep.sum() == 4
    assert loop.learn(prepared)["grad_norm"] > 0
    nothing = dataclasses.replace(prepared, keep=torch.zeros(8, dtype=torch.bool))
    assert loop.learn(nothing)["grad_norm"] == 0
