"""What a few images of the real run show: its ratio, its rewards, its teachers, two updates.

The most expensive check samples WORTH images of a teacher, and as many of the student's start, for
every task with a reward and validation prompts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowalign import metrics, sde, train
from flowalign.backbone import Backbone, ModelError
from flowalign.config import ConfigError, SamplingConfig, parse
from flowalign.config.schema import DistillationStage, GrpoStage, OpdStage, TrainingStage
from flowalign.data import load_prompts, subset
from flowalign.doctor import reward as rewards
from flowalign.forecast.estimate import predict
from flowalign.forecast.findings import Finding, fault, note, ok
from flowalign.eval.suite import generate
from flowalign.loop import Loop, TrainingError, pairs_of
from flowalign.rewards.scoring import score
from flowalign.rollout import Noise, Schedule, places, sample
from flowalign.student.sft import Sft
from flowalign.teachers.bank import Bank
from flowalign.types import PromptBatch, Reward, Rollout

COPIES = 4  # images of a prompt, at most
IMAGES = 16  # of an update, at most: enough to measure its speed
EQUAL = 1e-6  # relative distance of two velocities below which they count as equal
WORTH = 128  # prompts on which a teacher is compared with the student's start, at most
FEW = 8  # pairs of scores, below which a standard error means nothing


@dataclass
class Live:
    """Findings and measurements: FLOP/s of an update, seconds of scoring an image."""

    findings: list[Finding]
    rate: float | None = None
    scoring: float = 0.0


def examine(config: TrainingStage) -> Live:
    """Score probe images with each reward, then run two small updates in a temporary folder."""
    result = Live([])
    for task in config.tasks:
        if task.reward:
            result.findings += _reward(task.name, task.reward.name, task.reward.options)
    with tempfile.TemporaryDirectory() as folder:
        small = _small(config, folder)
        try:
            loop, _, built = train.wire(small)
            loop.on_update = lambda update, metrics: None
            rollout = _rollout(small, loop)
            if rollout.log_probs is not None and isinstance(small, GrpoStage | OpdStage):
                result.findings += _ratio(small, loop, rollout)
            if isinstance(config, DistillationStage):
                algorithm = loop.algorithm
                bank = algorithm.bank if isinstance(algorithm, Sft) else algorithm.teachers  # type: ignore
                result.findings += _labels(config, loop.backbone, bank, rollout)
                result.findings += _worth(config, loop.backbone, bank, built)
            before = _velocity(loop, rollout)
            loop.run()
            result.findings += _moved(before, _velocity(loop, rollout))
            # the second update: the first one warms up
            last = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])
            seconds = last[metrics.SECONDS_ROLLOUT] + last[metrics.SECONDS_UPDATE]
            if config.learns_from_rewards:
                result.scoring = last[metrics.SECONDS_SCORE] / small.rollout.images
            else:
                seconds += last[metrics.SECONDS_SCORE]  # labels
            estimate = predict(small, device_type=loop.backbone.device.type)
            result.rate = estimate.flops / seconds
        except (ConfigError, ModelError, TrainingError) as error:
            result.findings.append(fault(f"update: {error}"))
        except torch.cuda.OutOfMemoryError as error:
            text = str(error).splitlines()[0]  # the rest is a table of allocations
            result.findings.append(fault(f"memory: even a small update fails: {text}"))
    return result


def _reward(task: str, name: str, options: dict[str, object]) -> Iterator[Finding]:
    """The faults that `flowalign doctor --reward` finds, or one line that says "ok"."""
    place = f"reward {name!r} of task {task!r}"
    try:
        health = rewards.diagnose(name, options, count=4, size=None)
    except rewards.UnsuitedError as error:
        yield note(f"{place}: {error}")
        return
    except (ValueError, ImportError, OSError) as error:
        yield fault(f"{place}: {error}")
        return
    faults = [finding for finding in health.findings if finding.level == "fault"]
    for finding in faults:
        yield fault(f"{place}: {finding.text}")
    if not faults:
        cost = next(f.text for f in health.findings if "ms an image" in f.text)
        yield ok(f"{place}: sound; {cost}")


def _small(config: TrainingStage, folder: str) -> TrainingStage:
    """The run with a few images, two updates and no evaluation; batch sizes stay."""
    copies = min(COPIES, config.rollout.copies)
    prompts = max(2, len(config.tasks), min(config.rollout.prompts, IMAGES // copies))
    changes = [
        f"output={json.dumps(folder)}", "train.trackers=[]", "train.updates=2",
        "train.checkpoint_every=2", "train.sample_every=1000", "train.max_invalid_share=1.0",
        f"rollout.prompts={prompts}", f"rollout.copies={copies}",
        "optimizer.updates_per_rollout=1",
        *(f"tasks.{i}.weight=1.0" for i in range(len(config.tasks))),
    ]  # fmt: skip
    if isinstance(config, OpdStage):
        changes.append("student.diagnose_every=1000")
    return parse(config.model_dump(mode="json") | {"evaluation": None}, changes)


def _rollout(config: TrainingStage, loop: Loop) -> Rollout:
    """All states of the window, with their successors where there is noise."""
    steps = dataclasses.replace(
        Schedule.of(config, loop.backbone), chosen=None, actions=config.rollout.kind != "ode"
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


def _ratio(config: GrpoStage | OpdStage, loop: Loop, rollout: Rollout) -> Iterator[Finding]:
    """The ratio of new and old policy before any update, by the forward path of the update."""
    steps, worst = Schedule.of(config, loop.backbone), 0.0
    keep = torch.ones(len(rollout), dtype=torch.bool)
    for pairs in pairs_of(rollout, keep, config.optimizer.micro_batch):
        x_next, old = pairs.action()
        velocity = loop.backbone.velocity(
            pairs.x,
            pairs.sigma,
            pairs.conditioning,
            guidance=config.rollout.guidance,
            rows=pairs.size,
        ).detach()
        new = sde.log_prob(steps.transition(pairs.x, velocity, pairs.steps), x_next)
        worst = max(worst, float(((new - old).exp() - 1).abs().nan_to_num(math.inf).max()))
    limit = config.grpo.clip_range
    text = f"ratio: within {worst:.2g} of 1 before the first update"
    if worst <= limit / 10:
        yield ok(text)
        return
    level = "fault" if config.needs_actions and worst > limit / 2 else "note"
    unused = "" if config.needs_actions else " (not used in this stage)"
    yield Finding(
        level,
        f"{text}{unused}; the clip range is {limit:g}. Rollout and update compute different "
        "log-probs. In a 16-bit dtype let rollout.batch_size equal optimizer.micro_batch.",
    )


@torch.no_grad()
def _labels(
    config: DistillationStage, backbone: Backbone, bank: Bank, rollout: Rollout
) -> Iterator[Finding]:
    """Labels of each teacher at two states: finite, and not those of the base."""
    x, rows = rollout.states[:2, 0], torch.arange(min(2, len(rollout)))
    sigma = rollout.sigmas[rollout.steps[0]].to(x).expand(len(x))
    cond = rollout.conditioning.select(rows)
    for name, teacher in config.teachers.items():
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
        elif teacher.adapter is not None and gap < EQUAL:
            yield fault(f"teacher {name!r}: equals the base. There is nothing to learn.")
        else:
            yield ok(f"teacher {name!r}: {gap:.1%} from the base")


def _worth(
    config: DistillationStage, backbone: Backbone, bank: Bank, built: Mapping[str, Reward]
) -> Iterator[Finding]:
    """Whether a teacher scores less on its own task than the student does at its start.

    The teacher samples at the guidance of its labels, the student at the one of its training, both
    the same held-out prompts from the same noise. The teacher's score is what there is to learn.
    """
    count = min(WORTH, config.evaluation.prompts) if config.evaluation else WORTH
    for task in config.tasks:
        reward = built.get(task.name)
        if reward is None or task.validation is None or getattr(reward, "groupwise", False):
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
    backbone: Backbone, prompts: PromptBatch, settings: SamplingConfig, reward: Reward
) -> Tensor:
    """The reward's headline number [P] of one image of each prompt; NaN = invalid."""
    images = generate(backbone, prompts, settings)
    scores = score(reward, images, prompts.prompts, prompts.metadata)
    value = scores.parts.get(getattr(reward, "headline", None) or "", scores.value)
    return value.float().cpu().where(scores.valid.cpu(), torch.nan)


@torch.no_grad()
def _velocity(loop: Loop, rollout: Rollout) -> Tensor:
    keep = torch.arange(len(rollout)) < 2  # two images are enough to see a change
    return loop.velocity(next(pairs_of(rollout, keep, 2)))


def _moved(before: Tensor, after: Tensor) -> Iterator[Finding]:
    gap = _relative(after, before)
    if not gap < 0.5:  # or NaN
        yield fault(
            f"update: two updates change the velocity by {gap:.0%}. Lower optimizer.lr, or use "
            "optimizer.warmup."
        )
    elif gap == 0:
        yield note(
            "update: two updates change nothing. Is it the warm-up, or are all rewards equal?"
        )
    else:
        yield ok(f"update: two updates change the velocity by {gap:.2%}")


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
