"""teachers/nft.py and what it shares with awm: the old policy, forward passes, resume, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import gradient, lines
from torch import Tensor
from torch.testing import assert_close

from flowalign.config import ConfigError
from flowalign.teachers.forward import Forward, Matched, Policy, rising_decay
from flowalign.teachers.nft import Nft
from flowalign.training.algorithm import STUDENT, pairs_of
from flowalign.training.loop import Loop
from flowalign.training.rollout import Noise, places, sample
from flowalign.types import Source

AVERAGED = "nft.old={decay: 0.5, rise: 0.25}"
SMOOTH = ["optimizer.eps=1.0", "optimizer.lr=30.0"]  # Adam's first step ~ lr * gradient
STAGES = {  # with all policies that the stage can have
    "nft": [AVERAGED, "nft.kl_weight=0.1"],
    "awm": ["awm.ema_kl_weight=1.0", "awm.average={decay: 0.5, rise: 0.25}", "awm.kl_weight=0.1"],
}


def run(model: str, folder: Path, *overrides: str, stage: str = "nft", **options: Any) -> Loop:
    moved = options.pop("moved", False)
    found = fakes.forward(model, folder, *overrides, stage=stage, **options)
    loop = fakes.wired(found, moved=moved)
    loop.run()
    return loop


def algorithm(loop: Loop) -> Forward:
    assert isinstance(loop.algorithm, Forward)
    return loop.algorithm


def old(loop: Loop) -> Policy:
    found = algorithm(loop).old
    assert found
    return found


def prepared(loop: Loop) -> Matched:
    found = loop.algorithm.prepare(loop.rollout(0), 0)
    assert isinstance(found, Matched)
    return found


def weights(parameters: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def passes(loop: Loop) -> list[str | None]:
    """The adapter of each forward pass from now on."""
    calls: list[str | None] = []
    core = loop.backbone.core
    core.register_forward_pre_hook(lambda *_: calls.append(loop.backbone.active))
    return calls


# What is learnt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["{decay: 0.0}", "{decay: 0.5}"])
def test_the_gradient_is_that_of_the_paper(random_model: str, tmp_path: Path, kept: str) -> None:
    """With an old policy that is the student, and with one that is not."""
    given = [f"nft.old={kept}", "nft.beta=0.5", "nft.advantage_clip=2.0", "nft.kl_weight=0.3"]
    loop = fakes.wired(fakes.forward(random_model, tmp_path / "run", *given), moved=True)
    found, backbone, latents = prepared(loop), loop.backbone, loop.rollout(0).latents
    assert latents is not None and isinstance(loop.algorithm, Nft)
    (pairs,) = pairs_of(found.rollout, torch.ones(8, dtype=torch.bool), 100)
    ours = gradient(loop, loop.algorithm.loss(pairs, loop.algorithm.velocity(pairs), found).total)

    def velocity(adapter: str | None) -> Tensor:
        with backbone.adapter(adapter):
            x, cond = pairs.x, pairs.conditioning
            return backbone.velocity(x, pairs.sigma, cond, guidance=1.0)

    v, v_old, v_ref = velocity(STUDENT), velocity("old" if "5" in kept else STUDENT), velocity(None)
    sigma, x0 = pairs.sigma[:, None, None, None], latents[pairs.rows]
    r = (found.advantage[pairs.rows] / 4 + 0.5).clamp(0, 1)
    branches = []
    for branch in (0.5 * v + 0.5 * v_old.detach(), 1.5 * v_old.detach() - 0.5 * v):
        error = pairs.x - sigma * branch - x0
        weight = error.detach().abs().mean((1, 2, 3), keepdim=True)
        branches.append((error**2 / weight).mean((1, 2, 3)))
    loss = 2 * (r * branches[0] + (1 - r) * branches[1]).mean() / 0.5
    loss = loss + 0.3 * ((v - v_ref.detach()) ** 2).mean()
    expected = gradient(loop, loss)
    assert_close(ours, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


UNEQUAL = torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.5, 0.0])


@pytest.mark.parametrize(
    "more", ["", AVERAGED, "nft.kl_weight=0.1", "optimizer.updates_per_rollout=2"]
)
def test_images_without_an_advantage_are_left_out_where_no_other_term_or_step_needs_them(
    random_model: str, tmp_path: Path, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no gradient while the student is the old policy."""
    loop = fakes.wired(fakes.forward(random_model, tmp_path, *filter(None, [more])), moved=True)
    credit = algorithm(loop).scored.credit(loop.rollout(0), 0)
    unequal = replace(credit, advantage=UNEQUAL.to(credit.advantage))
    monkeypatch.setattr(algorithm(loop).scored, "credit", lambda *_: unequal)
    found = prepared(loop)
    assert torch.equal(found.keep, torch.ones(8, dtype=torch.bool) if more else UNEQUAL != 0)
    if not more:
        (pairs,) = pairs_of(found.rollout, ~found.keep, 100)
        velocity = loop.algorithm.velocity(pairs)
        assert gradient(loop, loop.algorithm.loss(pairs, velocity, found).total).abs().max() < 1e-6


def test_the_drift_is_the_distance_to_the_base(random_model: str, tmp_path: Path) -> None:
    fresh = run(random_model, tmp_path / "fresh", "train.updates=1")
    assert lines(fresh)[0]["velocity_drift"] == 0
    loop = run(random_model, tmp_path / "run", "train.updates=1", moved=True)
    other = fakes.wired(fakes.forward(random_model, tmp_path / "other"), moved=True)
    pairs = next(pairs_of(prepared(other).rollout, torch.ones(8, dtype=torch.bool), 100))
    with other.backbone.base(), torch.no_grad():
        base = other.algorithm.velocity(pairs)
    expected = float(((other.algorithm.velocity(pairs).detach() - base) ** 2).mean())
    assert lines(loop)[0]["velocity_drift"] == pytest.approx(expected, rel=1e-4) and expected > 1e-4


# Forward passes: what the stage costs -------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_no_forward_pass_is_wasted(random_model: str, tmp_path: Path, stage: str) -> None:
    """4 steps to sample, 3 noise levels to learn, and as many pairs for the drift in the log."""
    given = "optimizer.micro_batch=8"
    loop = fakes.wired(fakes.forward(random_model, tmp_path / "run", given, stage=stage))
    calls = passes(loop)
    found = prepared(loop)
    assert calls == [STUDENT] * 4 and found.keep.all()
    calls.clear()
    loop.learn(found)
    assert calls == [STUDENT, None] * 3 + [STUDENT] * 3
    # logged: all but the drift; a backward pass counts as two
    assert loop.backbone.evaluations == len(found.rollout) * (4 + 3 * 3)
    assert not algorithm(loop).policies  # nor is there memory for weights that nobody asks for


def test_the_old_policy_is_asked_only_where_it_is_another(random_model: str, tmp_path: Path):
    """Of two optimizer steps, the first still has the weights that sampled."""
    given = ["optimizer.updates_per_rollout=2", "optimizer.micro_batch=4", "nft.noise_levels=1"]
    loop = fakes.wired(fakes.forward(random_model, tmp_path / "run", *given))
    calls = passes(loop)
    found = prepared(loop)
    assert calls == [STUDENT] * 4
    calls.clear()
    loop.learn(found)
    assert calls == [STUDENT, None, STUDENT, STUDENT, None, STUDENT, "old"]
    assert old(loop).is_student  # it has followed: the next rollout is the student's


@pytest.mark.parametrize("stage", STAGES)
def test_weights_cost_the_passes_that_they_need(random_model: str, tmp_path: Path, stage: str):
    given = [*STAGES[stage], "optimizer.micro_batch=8"]
    loop = fakes.wired(fakes.forward(random_model, tmp_path / "run", *given, stage=stage))
    found, calls = prepared(loop), passes(loop)
    loop.learn(found)
    each = {"nft": [STUDENT, None], "awm": [STUDENT, None, "average"]}[stage]
    assert calls == 3 * each  # old is the student in the first rollout


# The old policy ----------------------------------------------------------------------------------


def test_the_official_schedules() -> None:
    steps = [0, 1, 74, 75, 76, 200, 208, 209, 500, 1000, 5000]
    linear = [rising_decay(s, decay=0.5, rise=0.001, after=0) for s in steps]
    late = [rising_decay(s, decay=0.999, rise=0.0075, after=75) for s in steps]
    none = [rising_decay(s, decay=0.0, rise=0.001, after=0) for s in steps]
    golden = json.loads((Path(__file__).parent / "golden" / "forward_process.json").read_text())
    assert golden["meta"]["decay_steps"] == steps
    for found, kind in ((none, "0"), (linear, "1"), (late, "2")):
        assert found == pytest.approx(golden["meta"]["decay"][kind], abs=1e-12)


def test_the_old_policy_samples_and_follows(random_model: str, tmp_path: Path) -> None:
    loop = fakes.wired(fakes.forward(random_model, tmp_path / "run", AVERAGED, *SMOOTH))
    assert algorithm(loop).sources(["red"]) is None
    start = weights(old(loop).parameters)
    assert torch.equal(start, weights(loop.parameters))
    loop.learn(prepared(loop))  # one step: kept is .25
    student = weights(loop.parameters)
    assert (student - start).abs().max() > 1e-3
    assert_close(weights(old(loop).parameters), 0.25 * start + 0.75 * student)
    assert not any(p.requires_grad for p in old(loop).parameters)
    sources = algorithm(loop).sources(["red"] * 8)
    assert sources == [Source("old", 1.0)] * 8
    found = loop.rollout(1)
    settings = loop.config.rollout
    with loop.backbone.adapter("old"):
        expected = sample(
            loop.backbone, found.batch, loop.algorithm.plan(1), guidance=1.0, noise=Noise((0, 1)),
            places=places(settings.prompts, settings.group_size), batch_size=8,
        )  # fmt: skip
    assert found.latents is not None and expected.latents is not None
    assert torch.equal(found.latents, expected.latents)
    assert loop.backbone.active == STUDENT


def test_an_update_of_nan_moves_no_policy(random_model: str, tmp_path: Path) -> None:
    loop = fakes.wired(fakes.forward(random_model, tmp_path / "run", AVERAGED), moved=True)
    before = weights(old(loop).parameters).clone()
    found = prepared(loop)
    found.velocity.fill_(torch.nan)
    assert loop.learn(found)["skipped_steps"] == 1
    assert torch.equal(weights(old(loop).parameters), before)


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.kind=sde", "rollout.kind: 'sde'"), ("rollout.kind=cps", "rollout.kind: 'cps'"),
        ("rollout.shared_noise=true", "rollout.shared_noise: "),
        ("rollout.group_size=1", "rollout.group_size: got 1"),
        ("tasks.0.reward=null", "tasks.0.reward: missing"),
        ("{}.noise_levels=0", "{}.noise_levels: "),
        ("{}.levels=sampler and {}.noise_levels=4", "{}.noise_levels: 4 of"),
        ("{}.within=[0.5, 0.5]", "{}.within: [0.5, 0.5]"),
        ("{}.advantage_clip=0", "{}.advantage_clip: "),
        ("grpo.clip_range=0.1", "grpo: unknown key"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    random_model: str, tmp_path: Path, stage: str, override: str, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        overrides = override.replace("{}", stage).split(" and ")
        fakes.forward(random_model, tmp_path / "run", *overrides, stage=stage)
    start = said.replace("{}", stage)
    assert any(str(problem).startswith(start) for problem in error.value.problems)


def test_the_loss_may_have_a_cfg_scale_of_its_own(random_model: str, tmp_path: Path) -> None:
    given = ["rollout.guidance=4.5", "nft.guidance=1.0"]
    loop = fakes.wired(fakes.forward(random_model, tmp_path / "run", *given))
    assert loop.config.guidance == loop.algorithm.guidance == 1.0
    assert loop.config.evaluation_sampling.guidance == 4.5
