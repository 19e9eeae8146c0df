"""student.py and sft.py: what is trained, on which states, and that it is what was meant."""

import dataclasses
import json
from pathlib import Path

import fakes
import pytest
import torch
from fakes import gradient, lines, weights
from torch import Tensor
from torch.testing import assert_close

from flowalign import sde
from flowalign.commands.run import train
from flowalign.config import StatesConfig
from flowalign.report import samples
from flowalign.report.summary import kept_adapter
from flowalign.training import metrics
from flowalign.training.algorithm import pairs_of
from flowalign.training.loop import Loop
from flowalign.training.losses import velocity_error
from flowalign.training.student.opd import Labels, Opd, chosen
from flowalign.training.student.sft import Sft

LINEAR = ["optimizer.eps=1.0", "optimizer.lr=30.0"]  # Adam's first step ~ lr * gradient
EXACT = "student.label_dtype=float32"
WATCH = "evaluation={watch: [{name: x, prompts: x, reward: {name: ocr}}]}"


def labelled(model: str, folder: Path, *overrides: str) -> tuple[Loop, Opd, Labels]:
    """A run, its algorithm, and its first rollout with labels."""
    loop = fakes.wired(fakes.distillation(model, folder, EXACT, *overrides), moved=True)
    assert isinstance(loop.algorithm, Opd)
    return loop, loop.algorithm, loop.algorithm.prepare(loop.rollout(0), 0)


@pytest.mark.parametrize("select", ["all", "random", "low_noise", "high_noise"])
def test_states_are_drawn_from_the_window_by_seed_and_update(select: str) -> None:
    window, states = [2, 3, 4, 5, 6], StatesConfig(select=select, count=3)  # pyright: ignore
    drawn = [chosen(states, window, (0, update)) for update in range(200)]
    assert drawn == [chosen(states, window, (0, update)) for update in range(200)]
    size = 5 if select == "all" else 3
    for d in drawn:
        assert len(set(d)) == size and set(d) <= set(window) and sorted(d) == list(d)
    if select != "all":
        assert len(set(drawn)) >= 3


def test_beta_leans_the_way_its_name_says() -> None:
    means = {}
    for select in ("low_noise", "random", "high_noise"):
        states = StatesConfig(select=select)
        drawn = [chosen(states, list(range(9)), (1, update))[0] for update in range(500)]
        means[select] = sum(drawn) / len(drawn)
    assert means["low_noise"] == pytest.approx(9 * 5 / 7 - 0.5, abs=0.3)
    assert means["random"] == pytest.approx(4, abs=0.4)
    assert means["high_noise"] == pytest.approx(9 * 2 / 7 - 0.5, abs=0.3)


@pytest.mark.parametrize(("gradient", "extra"), [("pathwise", 0), ("policy", 1)])
def test_the_rollout_stops_at_the_last_trained_state(
    random_model: str, tmp_path: Path, gradient: str, extra: int
) -> None:
    """No later step, no decoding; and no forward at that state unless its action is needed."""
    loop = fakes.wired(
        fakes.distillation(random_model, tmp_path / "run", f"student.gradient={gradient}",
                           "student.noise_levels={select: random, count: 1}"))  # fmt: skip
    calls: list[int] = []
    loop.backbone.core.register_forward_pre_hook(lambda *_: calls.append(1))
    for update in range(6):
        calls.clear()
        rollout = loop.rollout(update)
        assert rollout.images is None and rollout.latents is None
        assert len(calls) == rollout.steps[-1] + extra
        assert rollout.states.shape[:2] == (8, 1)


def test_the_states_are_those_of_the_whole_rollout(random_model: str, tmp_path: Path) -> None:
    loop, _, labels = labelled(random_model, tmp_path / "run")
    one = dataclasses.replace(loop.algorithm.plan(0), chosen=(2,))
    loop.algorithm.plan = lambda update: one  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(loop.rollout(0).states[:, 0], labels.rollout.states[:, 2])


def test_the_pathwise_gradient_is_that_of_the_written_kl(random_model: str, tmp_path: Path) -> None:
    loop, student, labels = labelled(random_model, tmp_path / "run")
    (pairs,) = pairs_of(labels.rollout, torch.ones(8, dtype=torch.bool), 100)
    ours = gradient(loop, student.loss(pairs, loop.algorithm.velocity(pairs), labels).total)
    label = labels.velocity[pairs.rows, pairs.columns]
    a, b = (
        sde.scheduled_transition(labels.rollout.schedule, pairs.x, velocity, pairs.steps)
        for velocity in (loop.algorithm.velocity(pairs), label)
    )
    written = gradient(loop, sde.kl(a, b).mean())
    assert_close(ours, written, rtol=1e-4, atol=1e-6 * float(written.abs().max()))


def test_each_image_is_pulled_to_the_teacher_of_its_task(random_model: str, tmp_path: Path) -> None:
    _, student, labels = labelled(random_model, tmp_path / "run")
    rollout = labels.rollout
    assert student.teachers
    label = student.teachers(rollout)
    assert label.teacher == rollout.batch.tasks and set(label.teacher) == {"even", "odd"}
    swapped = ["tasks.0.teacher=odd", "tasks.1.teacher=even"]
    *_, other = labelled(random_model, tmp_path / "swapped", *swapped)
    assert torch.equal(other.rollout.states, rollout.states)
    assert (other.velocity - label.velocity).abs().amax((1, 2, 3, 4)).min() > 1e-3


@pytest.mark.parametrize("anchor", ["null", "{adapter: null, weight: 0.5}"])
def test_a_student_that_is_its_teacher_has_no_loss(random_model: str, tmp_path: Path, anchor: str):
    """And an anchor on the base pulls it away, by its weight."""
    given = [f"lora.init={tmp_path / 'even'}", f"anchor={anchor}", EXACT]
    found = fakes.distillation(random_model, tmp_path / "run", *given, alone="even")
    loop = fakes.wired(found)
    student = loop.algorithm
    assert isinstance(student, Opd)
    labels = student.prepare(loop.rollout(0), 0)
    (pairs,) = pairs_of(labels.rollout, torch.ones(8, dtype=torch.bool), 100)
    loss = student.loss(pairs, loop.algorithm.velocity(pairs), labels)
    assert loss.metrics["distill"] == 0
    if anchor == "null":
        assert loss.total.item() == 0 and not gradient(loop, loss.total).any()
    else:
        away = loss.metrics["anchor"]
        assert away > 0 and loss.total.item() == pytest.approx(0.5 * away)


@pytest.mark.parametrize("how", ["policy", "published"])
def test_the_ratio_is_one_and_the_published_form_leaks(random_model: str, tmp_path: Path, how: str):
    weighting = "kl" if how == "policy" else "published"
    given = [f"student.gradient={how}", f"student.weighting={weighting}"]
    loop, student, labels = labelled(random_model, tmp_path / "run", *given)
    _, pairs, _ = pairs_of(labels.rollout, torch.ones(8, dtype=torch.bool), 8)  # as the rollout
    velocity = loop.algorithm.velocity(pairs)
    x_next, old = pairs.action()
    assert old is not None
    schedule = labels.rollout.schedule
    new = sde.log_prob(sde.scheduled_transition(schedule, pairs.x, velocity, pairs.steps), x_next)
    assert torch.equal(new, old)
    label = labels.velocity[pairs.rows, pairs.columns]
    error = ((velocity - label) ** 2).mean((1, 2, 3))
    distance = labels.weights[pairs.steps] * error
    if how == "policy":
        assert labels.advantage is not None
        advantage = labels.advantage[pairs.rows, pairs.columns]
        teacher = sde.scheduled_transition(labels.rollout.schedule, pairs.x, label, pairs.steps)
        assert_close(advantage, (sde.log_prob(teacher, x_next) - old).detach())
    else:
        advantage = -distance
    expected = gradient(loop, (-advantage * torch.exp(new - old.detach())).mean())
    ours = gradient(loop, student.loss(pairs, loop.algorithm.velocity(pairs), labels).total)
    assert_close(ours, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def test_a_run_comes_nearer_to_its_teachers(random_model: str, tmp_path: Path) -> None:
    """On the states that it started from; and it logs what a researcher asks for."""
    given = ["train.updates=10", "optimizer.lr=2e-2", "ema=null", "student.weighting=velocity",
             "student.noise_levels={select: random}"]  # fmt: skip
    loop = fakes.wired(fakes.distillation(random_model, tmp_path / "run", *given, alone="odd"))
    student = loop.algorithm
    assert isinstance(student, Opd)
    rollout = loop.rollout(0)
    assert student.teachers
    label = student.teachers(rollout).velocity
    (pairs,) = pairs_of(rollout, torch.ones(8, dtype=torch.bool), 100)

    def errors() -> Tensor:
        with torch.no_grad():
            return velocity_error(loop.algorithm.velocity(pairs), label[pairs.rows, pairs.columns])

    before = errors()
    loop.run()
    after = errors()
    assert after.mean() < 0.7 * before.mean()
    found = lines(loop)
    step = loop.algorithm.plan(0).trained[0]
    names = {f"weight/step_{step}", f"kl/step_{step}", "kl/even"}
    assert names <= found[0].keys()
    assert all(row["loss"] == pytest.approx(row["distill"]) for row in found)


def test_a_student_of_few_steps_comes_nearer_at_each_of_them(
    random_model: str, tmp_path: Path
) -> None:
    """At the last one, too: from there to the image is most of the way."""
    given = ["train.updates=12", "optimizer.lr=2e-2", "ema=null", "rollout.kind=ode",
             "student={weighting: velocity, noise_levels: {select: all}}"]  # fmt: skip
    loop = fakes.wired(fakes.distillation(random_model, tmp_path / "run", *given, alone="odd"))
    rollout = loop.rollout(0)
    assert rollout.steps == [0, 1, 2, 3] and loop.algorithm.teachers
    label = loop.algorithm.teachers(rollout).velocity

    def errors() -> Tensor:
        means = []
        for pairs in pairs_of(rollout, torch.ones(8, dtype=torch.bool), 8):  # one step each
            velocity = loop.algorithm.velocity(pairs).detach()
            means.append(velocity_error(velocity, label[pairs.rows, pairs.columns]).mean())
        return torch.stack(means)

    before = errors()
    loop.run()
    assert (errors() < 0.7 * before).all()


def evaluated(model: str, folder: Path, *overrides: str) -> fakes.config.TrainingStage:
    prompts = folder / "prompts.txt"
    given = ["evaluation={every: 1, prompts: 2}", "rollout.group_size=1",
             "train.checkpoint_every=1", "student.fixed_prompts=2"]  # fmt: skip
    given += [f"tasks.{index}.validation={prompts}" for index in range(2)]
    return fakes.distillation(model, folder / "run", *given, *overrides)


@pytest.mark.slow
def test_the_distance_at_fixed_states_is_that_to_the_targets(random_model: str, tmp_path: Path):
    """0 for a student that is its teacher; the same before and after an update of no step."""
    same = [f"lora.init={tmp_path / 'even'}", "optimizer.lr=1e-30", "ema=null", EXACT]
    config = evaluated(random_model, tmp_path, *same, "train.updates=1")
    train(config)
    rows = [row for row in lines(config.output) if metrics.HEADLINE in row]
    names = {f"fixed_path/{task}" for task in ("even", "odd")}
    for row in rows:
        assert {name: row[name] for name in names} == {name: rows[0][name] for name in names}
        assert row["fixed_path/even"] == 0
        assert row["fixed_path/odd"] > 1e-4


@pytest.mark.slow
def test_a_run_ends_where_its_student_comes_no_nearer(random_model: str, tmp_path: Path) -> None:
    """After `patience` evaluations, with a checkpoint; to resume it ends at once."""
    given = ["student.patience=2", "optimizer.lr=1e-30", "train.updates=9"]
    config = evaluated(random_model, tmp_path, *given)
    train(config)
    assert [row["update"] for row in lines(config.output) if metrics.HEADLINE in row] == [0, 1, 2]
    assert (Path(config.output) / "checkpoints" / "update_000002").is_dir()
    assert (Path(config.output) / "adapter" / "README.md").is_file()
    rows = lines(config.output)
    train(config, resume=True)
    assert lines(config.output) == rows


@pytest.mark.slow
def test_without_rewards_the_nearest_student_is_kept(random_model: str, tmp_path: Path) -> None:
    given = ["tasks.0.reward=null", "tasks.1.reward=null", "train.updates=2", "alarm=null"]
    config = evaluated(random_model, tmp_path, *given)
    train(config)
    rows = [row for row in lines(config.output) if metrics.HEADLINE in row]
    for row in rows:
        assert row[metrics.HEADLINE] == -row["fixed_path"]
        assert min(shares := [row[f"fixed_path/{x}"] for x in ("even", "odd")]) <= row["fixed_path"]
        assert row["fixed_path"] <= max(shares)
    for name in ("fixed_path", "fixed_path/even", "fixed_path/odd"):  # it starts as the base
        assert rows[0][name] == pytest.approx(1)
    best = json.loads((Path(config.output) / "adapter" / "scores.json").read_text())
    assert best["headline"] == max(row[metrics.HEADLINE] for row in rows)
    assert [row["update"] for row in rows] == [0, 1, 2]
    # for people a distance, which is not negative
    text = f"(held-out distance to the teachers {-best['headline']:.3f} of"
    assert text in str(kept_adapter(Path(config.output)))
    # and images of the held-out prompts, which have no score
    assert samples.updates(Path(config.output), samples.EVALUATION) == [0, 1, 2]


# Cold start --------------------------------------------------------------------------------------


def test_sft_learns_the_straight_way_to_the_teachers_images(random_model: str, tmp_path: Path):
    found = fakes.distillation(random_model, tmp_path / "run", "sft.noise_levels=3", stage="sft")
    loop = fakes.wired(found, moved=True)
    assert isinstance(loop.algorithm, Sft)
    rollout = loop.rollout(0)
    assert rollout.latents is not None
    bank = loop.algorithm.teachers
    assert bank
    sampled = [source.adapter for source in bank.sources(rollout.batch.tasks)]
    assert sampled == [f"teacher_{task}" for task in rollout.batch.tasks]
    targets = loop.algorithm.prepare(rollout, 0)
    states = targets.rollout
    assert states.states.shape[1] == 3
    sigma = states.sigmas[:3].reshape(1, 3, 1, 1, 1).to(states.states.device)
    straight = states.states - sigma * targets.velocity  # x_sigma - sigma v = x0
    assert_close(straight, rollout.latents[:, None].expand_as(straight), rtol=0, atol=1e-5)
    assert (states.sigmas.diff() < 0).all() and states.sigmas[0] <= 1


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (["tasks.0.teacher=nobody"], ["tasks.0.teacher", "nobody"]),
        (["tasks.0.teacher=odd"], ["teachers.even"]),
        (["rollout.kind=ode"], ["rollout.kind", "needs"]),
        (["student.gradient=published"], ["student.weighting", "published"]),
        (["student.noise_levels={select: random, count: 4}"], ["count", "rollout.window"]),
        (["student.gradient=policy", "student.guidance=2"], ["student.guidance", "2.0", "1.0"]),
        (["teachers.odd.reference=start"], ["teachers.odd.reference", "lora.init"]),
        (["student.patience=1"], ["student.patience", "evaluation"]),
        (["student={patience: 1, fixed_prompts: 0}"], ["student.patience", "fixed_prompts"]),
        (["evaluation={}", "tasks.1.reward=null", "tasks.1.validation=x"], ["tasks.1.reward"]),
        (["evaluation={}", "tasks.1.validation=x"], ["tasks.0.validation"]),
        ([WATCH, "tasks.0.reward=null", "tasks.1.reward=null"], ["evaluation.watch"]),
    ],
)
def test_what_cannot_be_learnt_is_refused(
    random_model: str, tmp_path: Path, given: list[str], keys: list[str]
) -> None:
    with pytest.raises(fakes.config.ConfigError) as caught:
        fakes.distillation(random_model, tmp_path / "run", *given)
    problems = list(map(str, caught.value.problems))
    assert any(all(key in problem for key in keys) for problem in problems), problems


def test_images_beyond_a_teacher_cannot_be_sampled(random_model: str, tmp_path: Path) -> None:
    given = "teachers.odd.extrapolate=2"
    with pytest.raises(fakes.config.ConfigError, match=r"teachers\.odd\.extrapolate"):
        fakes.distillation(random_model, tmp_path / "run", given, stage="sft")


@pytest.mark.slow
@pytest.mark.parametrize("scored", [[], ["odd"]])
@pytest.mark.parametrize("stage", ["opd", "sft"])
def test_a_task_without_a_reward_is_trained_and_not_evaluated(
    random_model: str, tmp_path: Path, stage: str, scored: list[str]
) -> None:
    """`evaluation` is on, as it is by default; the other task's scores are the headline."""
    prompts = str(tmp_path / "prompts.txt")
    given = ["evaluation={prompts: 2}", "rollout.group_size=1", "train.updates=1"]
    for index, name in enumerate(["even", "odd"]):
        key = f"tasks.{index}"
        given += [f"{key}.validation={prompts}"] if name in scored else [f"{key}.reward=null"]
    config = fakes.distillation(random_model, tmp_path / "run", *given, stage=stage)
    assert config.evaluates == bool(scored)
    train(config)
    assert (tmp_path / "run" / "adapter" / "README.md").is_file()
    assert bool(samples.updates(tmp_path / "run", samples.EVALUATION)) == bool(scored)
    taken = [row for row in lines(tmp_path / "run") if metrics.HEADLINE in row]
    assert len(taken) == 2 * len(scored)
    for row in taken:
        assert {key.split("/")[1] for key in row if key.count("/") == 2} == set(scored)
        assert row[metrics.HEADLINE] == row["eval/odd/reward"]


def test_micro_batches_change_neither_weights_nor_the_kl_of_a_task(random_model, tmp_path) -> None:
    """Micro-batches of 3 hold unequal numbers of each task."""
    found, moved = {}, []
    for size in (3, 8):
        given = [*LINEAR, "train.updates=1", f"optimizer.micro_batch={size}", "ema=null"]
        settings = fakes.distillation(random_model, tmp_path / str(size), *given)
        loop = fakes.wired(settings, moved=True)
        loop.run()
        moved.append(weights(loop))
        (line,) = lines(loop)
        found[size] = {name: value for name, value in line.items() if name.startswith("kl/")}
    assert_close(moved[0], moved[1], rtol=0, atol=1e-5)
    assert found[3].keys() == found[8].keys() and len(found[3]) > 2
    for name, value in found[8].items():
        assert found[3][name] == pytest.approx(value, rel=1e-4)
