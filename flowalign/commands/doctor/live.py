"""What a few images of the real run show: its ratio, rewards and teachers, its first updates."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign import sde
from flowalign.backbone import Backbone, ModelError
from flowalign.commands import build
from flowalign.commands.doctor import reward as rewards
from flowalign.commands.doctor.estimate import predict
from flowalign.commands.doctor.findings import Finding, fault, note, ok
from flowalign.commands.doctor.pace import KINDS, Pace
from flowalign.config import ConfigError, SamplingConfig, Stage, TrainingStage, parse
from flowalign.rewards import RewardBase
from flowalign.rewards.scoring import score
from flowalign.teachers.bank import Bank
from flowalign.training import metrics
from flowalign.training.algorithm import TrainingError, algorithm_class, pairs_of
from flowalign.training.data import load_prompts, subset
from flowalign.training.loop import Loop
from flowalign.training.losses import guard_log_ratio
from flowalign.training.rollout import Noise, generate, places, sample, schedule_of
from flowalign.types import PromptBatch, Rollout

COPIES = 4  # images of a prompt, at most
IMAGES = 16  # of an update, at least: enough to see what it does
UPDATES = 3  # of a small run; the first one warms up, and the others are timed
WORTH = 128  # prompts on which a teacher is compared with the student's start, at most
FEW = 8  # pairs of scores, below which a standard error means nothing
EQUAL = 1e-6  # relative distance of two velocities below which they count as equal


def examine(config: Stage) -> tuple[list[Finding], Pace | None]:
    """Score probe images with each reward. Then run a few small updates, in a temporary folder.
    Findings, and how fast this machine ran them; None = it was not measured."""
    findings, judging, pace = list[Finding](), {}, None
    for judged in config.judged:
        costs = [
            _reward(judged.name, reward.name, reward.options, findings)
            for reward in judged.rewards.values()
            if not judged.place.startswith("evaluation.watch")
        ]
        if costs and None not in costs:
            judging[judged.name] = sum(cost for cost in costs if cost is not None)
    try:
        if isinstance(config, TrainingStage):
            with tempfile.TemporaryDirectory() as folder:
                pace = _train(config, folder, judging, findings)
    except (ConfigError, ModelError, TrainingError) as error:
        findings.append(fault(f"update: {error}"))
    except torch.cuda.OutOfMemoryError as error:
        text = str(error).splitlines()[0]  # the rest is a table of allocations
        findings.append(fault(f"memory: even a small run fails: {text}"))
    return findings, pace


def _train(
    config: TrainingStage, folder: str, judging: dict[str, float], findings: list[Finding]
) -> Pace:
    """Findings of a small run, and its pace."""
    small = _small(config, folder)
    loop, _, built = build.wire(small)
    loop.log.on_update = lambda update, metrics: None
    rollout = _rollout(small, loop)
    if rollout.log_probs is not None and small.clip_ranges:
        findings += _ratio(small, loop, rollout)
    if isinstance(bank := loop.algorithm.teachers, Bank):
        findings += _labels(loop.backbone, bank, rollout)
        findings += _worth(config, loop.backbone, bank, built)
    before = _velocity(loop, rollout)
    loop.run()
    findings += _moved(before, _velocity(loop, rollout))
    return _pace(small, Path(folder), loop.backbone.device.type, judging)


def _pace(small: TrainingStage, folder: Path, device_type: str, judging: dict[str, float]) -> Pace:
    """From the seconds that all updates but the first took, in total."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if metrics.SECONDS_UPDATE in line][1:]

    def seconds(name: str) -> float:
        return sum(line[name] for line in timed)

    estimate = predict(small, device_type=device_type, drawn=range(1, UPDATES))
    flops = dict.fromkeys(KINDS, 0.0)
    for phase in estimate.phases:
        flops[phase.kind] += len(timed) * phase.flops
    sampling = flops["sampling"] / seconds(metrics.SECONDS_ROLLOUT)
    learning = flops["learning"] / seconds(metrics.SECONDS_UPDATE)
    labels, waiting, waited = sampling, None, seconds(metrics.SECONDS_SCORE)
    if small.learns_from_rewards:
        waiting = waited / (len(timed) * small.rollout.images)
    elif flops["labels"]:
        labels = flops["labels"] / waited
    rates = {"sampling": sampling, "labels": labels, "learning": learning}
    source = f"measured here, {learning / 1e12:.3g} TFLOP/s in updates"
    return Pace(rates | {"alarm": sampling, "rewards": sampling}, source, waiting, judging)


def _reward(task: str, name: str, options: dict[str, Any], findings: list[Finding]) -> float | None:
    """Add the faults that `flowalign doctor --reward` finds, or one line that says "ok". Returns
    its seconds for an image, None if it was not asked."""
    title = f"reward {name!r} of task {task!r}"
    try:
        found, cost = rewards.diagnose(name, options, count=4, size=None)
    except rewards.UnsuitedError as error:
        findings.append(note(f"{title}: {error}"))
        return None
    except (ValueError, ImportError, OSError) as error:
        findings.append(fault(f"{title}: {error}"))
        return None
    faults = [fault(f"{title}: {f.text}") for f in found if f.level == "fault"]
    findings += faults or [ok(f"{title}: sound; {1000 * cost:.1f} ms an image")]
    return cost


def _small(config: TrainingStage, folder: str) -> TrainingStage:
    """The run with a few updates, no evaluation, and images for two full batches of each kind."""
    rollout, algorithm = config.rollout, algorithm_class(config)
    states = algorithm.keeps(config).noise_levels or len(algorithm.trained_steps(config, 0))
    batch = max(size for key, size in config.batch_sizes.items() if key != "rollout.batch_size")
    images = max(IMAGES, 2 * rollout.batch_size, math.ceil(2 * batch / states))
    images = min(images, rollout.images)
    copies = min(rollout.copies, max(COPIES, math.ceil(images / rollout.prompts)))
    prompts = max(len(config.tasks), min(rollout.prompts, math.ceil(images / copies)), 2)
    changes = [
        f"output={json.dumps(folder)}", "train.trackers=[]", f"train.updates={UPDATES}",
        f"train.checkpoint_every={UPDATES}", "train.sample_every=1000",
        "train.max_invalid_share=1.0",
        f"rollout.prompts={prompts}", f"rollout.copies={copies}",
        "optimizer.updates_per_rollout=1",
    ]  # fmt: skip
    if prompts < rollout.prompts:  # few, and each task shall have some
        changes += [f"tasks.{i}.weight=1.0" for i in range(len(config.tasks))]
    if "student" in type(config).model_fields:
        changes.append("student.diagnose_every=1000")
    return parse(config.model_dump(mode="json") | {"evaluation": None}, changes)


def _rollout(config: TrainingStage, loop: Loop) -> Rollout:
    """All states of the window, with their successors where there is noise."""
    steps = dataclasses.replace(
        schedule_of(config, loop.backbone), chosen=None, actions=config.rollout.kind != "ode"
    )
    images = places(config.rollout.prompts, config.rollout.copies)
    return sample(
        loop.backbone,
        loop.prompts.batch(0).select([prompt for prompt, _ in images]),
        steps,
        guidance=config.rollout.guidance,
        noise=Noise((config.seed, 0)),
        places=images,
        batch_size=config.rollout.batch_size,
        decode=False,
    )


# Checks ----------------------------------------------------------------------------------------


def _ratio(config: TrainingStage, loop: Loop, rollout: Rollout) -> Iterator[Finding]:
    """The ratio of new and old policy before any update, by the forward path of the update."""
    steps, worst = schedule_of(config, loop.backbone), 0.0
    keep = torch.ones(len(rollout), dtype=torch.bool)
    for pairs in pairs_of(rollout, keep, config.optimizer.micro_batch):
        x_next, old = pairs.action()
        velocity = pairs.velocity(loop.backbone, config.rollout.guidance).detach()
        new = sde.scheduled_transition(steps, pairs.x, velocity, pairs.steps)
        if pairs.mean is None:
            change = sde.log_prob(new, x_next) - old
        else:
            change = guard_log_ratio(new, pairs.mean, x_next)
        worst = max(worst, float((change.exp() - 1).abs().nan_to_num(math.inf).max()))
    limit = min(config.clip_ranges.values())
    text = f"ratio: within {worst:.2g} of 1 before the first update"
    if worst <= limit / 10:
        yield ok(text)
        return
    yield Finding(
        "fault" if worst > limit / 2 else "note",
        f"{text}; the clip range is {limit:g}. Rollout and update compute different "
        "log-probs. In a 16-bit dtype let rollout.batch_size equal optimizer.micro_batch.",
    )


@torch.no_grad()
def _labels(backbone: Backbone, bank: Bank, rollout: Rollout) -> Iterator[Finding]:
    """Labels of each teacher at two states: finite, and other than the base's."""
    x, rows = rollout.states[:2, 0], torch.arange(min(2, len(rollout)))
    sigma = rollout.sigmas[rollout.steps[0]].to(x).expand(len(x))
    cond = rollout.conditioning.select(rows)
    for name in bank.members:
        source = bank.source(name)
        with backbone.adapter(source.adapter):
            label = backbone.velocity(x, sigma, cond, guidance=source.guidance)
        with backbone.adapter(None):
            base = backbone.velocity(x, sigma, cond, guidance=source.guidance)
        gap = _relative(label, base)
        if not math.isfinite(gap):
            yield fault(
                f"teacher {name!r}: its velocity is not finite. Its adapter or dtype is broken."
            )
        elif source.adapter is not None and gap < EQUAL:
            yield fault(f"teacher {name!r}: equals the base. There is nothing to learn.")
        else:
            yield ok(f"teacher {name!r}: {gap:.1%} from the base")


def _worth(
    config: TrainingStage, backbone: Backbone, bank: Bank, built: Mapping[str, RewardBase]
) -> Iterator[Finding]:
    """Whether a teacher scores less on its own task than the student does at its start.

    The teacher samples at the guidance of its labels, the student at the one of its training, both
    the same held-out prompts from the same noise. The teacher's score is what there is to learn.
    """
    count = min(WORTH, config.evaluation.prompts) if config.evaluation else WORTH
    for task in config.tasks:
        reward = built.get(task.name)
        if reward is None or task.validation is None or reward.groupwise:
            continue
        prompts = subset(load_prompts(task.validation, task.name), count)
        (source,) = bank.sources([task.name])
        r = config.rollout
        settings = SamplingConfig(
            steps=r.steps, guidance=config.guidance, seed=config.seed, batch_size=r.batch_size
        )
        start = _scores(backbone, prompts, settings, reward)
        with backbone.adapter(source.adapter):
            settings = settings.model_copy(update={"guidance": source.guidance})
            taught = _scores(backbone, prompts, settings, reward)
        both = torch.stack([start, taught])[:, start.isfinite() & taught.isfinite()]
        if both.shape[1] < FEW:
            yield note(f"worth: too few images of task {task.name!r} could be scored")
            continue
        gap = both[1] - both[0]
        mean, error = float(gap.mean()), float(gap.std() / len(gap) ** 0.5)
        before, after = both.mean(1).tolist()
        text = (
            f"worth: on task {task.name!r} its teacher at guidance {source.guidance:g} scores "
            f"{after:.3f}, the student's start at {config.guidance:g} {before:.3f}: {mean:+.3f} ± "
            f"{error:.3f} on {len(gap)} prompts"
        )
        if mean < -2 * error:
            text += ". Its labels make the student worse. Check its guidance, adapter and task."
        yield Finding("fault" if mean < -2 * error else "ok", text)


def _scores(
    backbone: Backbone, prompts: PromptBatch, settings: SamplingConfig, reward: RewardBase
) -> Tensor:
    """The reward's headline number [P] of one image of each prompt; NaN = invalid."""
    images = generate(backbone, prompts, settings)
    scores = score(reward, images, prompts.prompts, prompts.metadata)
    value = scores.parts.get(reward.headline or "", scores.value)
    return value.float().cpu().where(scores.valid.cpu(), torch.nan)


@torch.no_grad()
def _velocity(loop: Loop, rollout: Rollout) -> Tensor:
    keep = torch.arange(len(rollout)) < 2  # two images are enough to see a change
    return loop.algorithm.velocity(next(pairs_of(rollout, keep, 2)))


def _moved(before: Tensor, after: Tensor) -> Iterator[Finding]:
    gap = _relative(after, before)
    if not gap < 0.5:  # or NaN
        yield fault(
            f"update: the first updates change the velocity by {gap:.0%}. Lower optimizer.lr, or "
            "use optimizer.warmup."
        )
    elif gap == 0:
        yield note(
            "update: the first updates change nothing. Is it the warm-up, or are all rewards equal?"
        )
    else:
        yield ok(f"update: the first updates change the velocity by {gap:.2%}")


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
