"""Resume: what is stopped, at any moment, goes on to the very numbers of what was not."""

import shutil
import signal
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from torch import Tensor

from flowalign.system.signals import Interrupted
from flowalign.training.algorithm import Pairs
from flowalign.training.loop import Loop
from flowalign.training.run.checkpoint import Checkpoints, get_rng
from flowalign.types import StepLoss

LINEAR = "optimizer={schedule: linear, lr: 0.001}"
EVALUATED = ["evaluation={every: 2, prompts: 2}"]
EVERY = "evaluation={every: 1, prompts: 2}"


def run(model: str, output: Path, *overrides: str, reward: str = "noisy_redness",
        resume: bool = False) -> Loop:  # fmt: skip
    held_out = f"tasks.0.validation={output.parent / 'prompts.txt'}"
    loop = fakes.wired(fakes.settings(model, output, held_out, *overrides, reward=reward))
    assert loop.resume() == resume
    loop.run()
    return loop


def state(loop: Loop) -> dict[str, Any]:
    """All that a run has become: weights, EMA, optimizer, schedule, generators, best, log."""
    assert loop.step.ema is not None
    return {
        "adapter": [p.detach().clone() for p in loop.parameters],
        "ema": [p.clone() for p in loop.step.ema.shadow_params],
        "optimizer": loop.step.optimizer.state_dict(), "lr": loop.step.lr.state_dict(),
        "rng": get_rng(), "best": loop.evaluations.best,
        "algorithm": {k: [*map(torch.clone, v)] for k, v in loop.algorithm.tensors().items()},
        "metrics": fakes.timeless(loop),
    }  # fmt: skip


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Equal to the bit, at any depth."""
    assert type(found) is type(expected), where
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}.{i}")
    else:
        assert found == expected, where


@pytest.fixture(scope="module")
def once(
    random_model: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The folder of a run of four updates at once, and its state."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, state(run(random_model, folder))


@pytest.fixture(scope="module")
def whole(once: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return once[1]


def test_two_updates_and_two_more_are_four(
    random_model: str, tmp_path: Path, once: tuple[Path, dict[str, Any]]
) -> None:
    """Their checkpoints, too, to the byte."""
    run(random_model, tmp_path / "run", "train.updates=2")
    assert_same(state(run(random_model, tmp_path / "run", resume=True)), once[1])
    expected, found = (run / "checkpoints/update_000004" for run in (once[0], tmp_path / "run"))
    names = {path.name for path in expected.iterdir() if path.is_file()}
    for name in names - {"manifest.json", "metrics.jsonl"}:  # they hold paths and seconds
        assert (expected / name).read_bytes() == (found / name).read_bytes(), name


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 3)])
def test_a_resumed_run_has_the_learning_rates_of_its_new_length(
    random_model: str, tmp_path: Path, before: int, after: int
) -> None:
    """As if it had always been so long."""
    run(random_model, tmp_path / "run", LINEAR, f"train.updates={before}", *EVALUATED)
    shutil.rmtree(tmp_path / "run/checkpoints/update_000004", ignore_errors=True)
    loop = run(random_model, tmp_path / "run", LINEAR, f"train.updates={after}", *EVALUATED,
               resume=True)  # fmt: skip
    rates = [row["lr"] for row in state(loop)["metrics"] if "lr" in row]
    assert rates[2:] == pytest.approx([1e-3 * (1 - n / after) for n in range(2, after)])


FORWARD = ["optimizer.lr=1e-2", "{}.kl_weight=0.1"]
NFT = [*FORWARD, "nft.old={decay: 0.5, rise: 0.25}"]
AWM = [*FORWARD, "awm.ema_kl_weight=1.0", "awm.average={decay: 0.5, rise: 0.25}"]
PICK = ["tasks.0.reward={name: pickscore, options: {model: tiny}}", "rollout.prompts=7",
        "rollout.group_size=2", "rollout.batch_size=14"]  # fmt: skip
TWICE = "optimizer.updates_per_rollout=2"


@pytest.mark.parametrize(
    ("stage", "given"),
    [
        pytest.param("grpo", [EVERY, TWICE, "ema.every=3"], id="evaluations"),
        pytest.param("grpo", PICK, id="a reward that knows prompts", marks=pytest.mark.slow),
        pytest.param("opd", ["student.noise_levels={select: random, count: 1}"], id="opd"),
        pytest.param("sft", [], id="sft", marks=pytest.mark.slow),
        pytest.param("nft", [*NFT, TWICE], id="nft with two steps"),
        pytest.param("awm", [*AWM, TWICE], id="awm with two steps", marks=pytest.mark.slow),
        pytest.param("gradient", FORWARD, id="gradient", marks=pytest.mark.slow),
        pytest.param("dpo", [], id="dpo", marks=pytest.mark.slow),
    ],
)
def test_so_they_are_under_every_algorithm(random_model, tmp_path, stage: str, given: list[str]):
    def ran(folder: str, *overrides: str, resume: bool = False) -> dict[str, Any]:
        output, words = tmp_path / folder / "run", [text.replace("{}", stage) for text in given]
        if stage == "grpo":
            return state(run(random_model, output, *words, *overrides, resume=resume))
        make = fakes.distillation if stage in ("opd", "sft") else fakes.forward
        kind = {} if stage in ("gradient", "dpo") else {"stage": stage}
        make = {"gradient": fakes.ascending, "dpo": fakes.pairs}.get(stage, make)
        loop = fakes.wired(make(random_model, output, *words, *overrides, **kind))
        assert loop.resume() == resume
        loop.run()
        return state(loop)

    once = ran("once", "train.updates=2")
    ran("parts", "train.updates=1")
    assert_same(ran("parts", "train.updates=2", resume=True), once)


def interrupted(model: str, folder: Path, call: int, *overrides: str) -> Any:
    """The state of a run that was signalled at this call of its reward, and resumed."""
    once = f"once: {folder / 'interrupted'}"
    options = f"tasks.0.reward.options={{call: {call}, {once}}}"
    given = [options, *overrides]
    with pytest.raises(Interrupted):
        run(model, folder / "run", *given, reward="Interrupting")
    saved = [p.name for p in Checkpoints(folder / "run", 3).all()]
    return saved, state(run(model, folder / "run", *given, reward="Interrupting", resume=True))


def test_a_signal_in_a_rollout_leaves_the_last_update(
    random_model: str, tmp_path: Path, whole: dict[str, Any]
) -> None:
    saved, end = interrupted(random_model, tmp_path, 3, "train.checkpoint_every=100")
    assert saved == ["update_000002"]
    assert_same(end, whole)


def test_ctrl_c_in_an_evaluation_repeats_it(random_model: str, tmp_path: Path) -> None:
    given = [*EVALUATED, "train.updates=2"]
    once = state(run(random_model, tmp_path / "once" / "run", *given))
    # calls: evaluation, 2 updates, evaluation
    _, end = interrupted(random_model, tmp_path, 4, *given)
    assert_same(end, once)


def test_ctrl_c_while_learning_lets_the_update_end(random_model, tmp_path, whole: dict[str, Any]):
    held_out = f"tasks.0.validation={tmp_path / 'prompts.txt'}"
    given = fakes.settings(random_model, tmp_path / "run", held_out, reward="noisy_redness")
    loop = fakes.wired(given)
    learn = loop.algorithm.loss

    def loss(pairs: Pairs, velocity: Tensor, prepared: Any) -> StepLoss:
        if loop.update == 2:
            signal.raise_signal(signal.SIGINT)
            loop.algorithm.loss = learn
        return learn(pairs, velocity, prepared)

    loop.algorithm.loss = loss
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    latest = loop.checkpoints.latest()
    assert latest is not None and latest.name == "update_000003"
    assert_same(state(run(random_model, tmp_path / "run", resume=True)), whole)
