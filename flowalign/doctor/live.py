"""What a few images of the real run show: its ratio, its rewards, its teachers, one update.

The costliest look is the one at what the teachers are worth: of every task with a reward and
validation prompts, WORTH images of its teacher and as many of the student's start.
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
from flowalign.config import parse
from flowalign.config.schema import ConfigError, OpdStage, SftStage, TrainingStage
from flowalign.data import load_prompts, subset
from flowalign.doctor import reward as rewards
from flowalign.doctor.estimate import predict
from flowalign.doctor.findings import Finding
from flowalign.doctor.plan import Plan
from flowalign.eval.suite import Settings, generate
from flowalign.loop import Loop, TrainingError, pairs_of
from flowalign.rewards.scoring import score
from flowalign.rollout import Noise, Schedule, places, sample
from flowalign.student.sft import Sft
from flowalign.teachers.bank import Bank
from flowalign.types import Conditioning, PromptBatch, Reward, Rollout

COPIES = 4  # images of a prompt, at most
IMAGES = 16  # of an update, at most: enough to tell its speed
APART = 1e-6  # of a velocity, relatively: as good as equal
WORTH = 128  # prompts on which a teacher is compared with the student's start, at most
FEW = 8  # pairs of scores, of which no error can be told


@dataclass
class Live:
    """Findings, and what was measured: FLOP/s of an update, seconds of scoring an image."""

    findings: list[Finding]
    rate: float | None = None
    scoring: float = 0.0


def examine(config: TrainingStage) -> Live:
    """Score probes with each reward, then run two small updates of the stage in a folder that is
    thrown away."""
    found = Live([])
    for task in config.tasks:
        if task.reward:
            found.findings += _scored(task.name, task.reward.name, task.reward.options)
    with tempfile.TemporaryDirectory() as folder:
        small = _small(config, folder)
        try:
            loop, _, built = train.wire(small)
            loop.on_update = lambda update, metrics: None
            found.findings += _looked_at(small, loop)
            found.findings += _worth(config, loop, built)
            before = _velocity(loop, rollout := _states(small, loop))
            loop.run()
            found.findings += _moved(before, _velocity(loop, rollout))
            _time(small, loop, found)
        except (ConfigError, ModelError, TrainingError) as error:
            found.findings.append(Finding("fault", f"update: {error}"))
        except torch.cuda.OutOfMemoryError as error:
            text = str(error).splitlines()[0]
            found.findings.append(Finding("fault", f"memory: even a small update fails: {text}"))
    return found


def _scored(task: str, name: str, options: dict[str, object]) -> Iterator[Finding]:
    """The findings of `flowalign doctor --reward` that are no "ok", and one line that is."""
    try:
        health = rewards.diagnose(name, options, count=4, size=None)
    except (ValueError, ImportError, OSError) as error:
        known = str(error).startswith("the built-in prompts do not suit")
        yield Finding("note" if known else "fault", f"reward {name!r} of task {task!r}: {error}")
        return
    bad = [finding for finding in health.findings if finding.level == "fault"]
    for finding in bad:
        yield Finding("fault", f"reward {name!r} of task {task!r}: {finding.text}")
    if not bad:
        cost = next(f.text for f in health.findings if "ms an image" in f.text)
        yield Finding("ok", f"reward {name!r} of task {task!r}: sound; {cost}")


def _small(config: TrainingStage, folder: str) -> TrainingStage:
    """The run with a few images, two updates and no evaluation; batch sizes stay."""
    copies = min(COPIES, config.rollout.copies)
    prompts = max(2, len(config.tasks), min(config.rollout.prompts, IMAGES // copies))
    changes = [
        f"output={json.dumps(folder)}", "train.trackers=[]", "train.updates=2",
        "train.checkpoint_every=2", "train.sample_every=1000", "train.max_invalid_share=1.0",
        f"rollout.prompts={prompts}", f"rollout.copies={copies}",
        "optimizer.updates_per_rollout=1", "student.diagnose_every=1000",
        *(f"tasks.{i}.weight=1.0" for i in range(len(config.tasks))),
    ]  # fmt: skip
    data = config.model_dump(mode="json") | {"evaluation": None}
    return parse(data, [c for c in changes if c.split(".")[0] in data or "." not in c])


# What is looked at -----------------------------------------------------------------------------


def _states(config: TrainingStage, loop: Loop) -> Rollout:
    """A rollout of all states of the window, with their successors where there is noise."""
    found = dataclasses.replace(
        Schedule.of(config, loop.backbone), chosen=None, actions=config.rollout.kind != "ode"
    )
    where = places(config.rollout.prompts, config.rollout.copies)
    return sample(
        loop.backbone,
        loop.prompts.batch(0).select([prompt for prompt, _ in where]),
        found,
        guidance=config.rollout.guidance,
        noise=Noise((config.seed, 0)),
        places=where,
        batch_size=config.rollout.batch_size,
        decode=False,
    )


def _looked_at(config: TrainingStage, loop: Loop) -> Iterator[Finding]:
    rollout = _states(config, loop)
    if rollout.log_probs is not None and not isinstance(config, SftStage):
        yield from _ratio(config, loop, rollout)
    if isinstance(config, OpdStage | SftStage):
        yield from _taught(config, loop, rollout)


def _ratio(config: TrainingStage, loop: Loop, rollout: Rollout) -> Iterator[Finding]:
    """The ratio of new and old policy before any update, through the update's own forward path."""
    grid = Schedule.of(config, loop.backbone)
    plan, worst = Plan(config), 0.0
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
        new = sde.log_prob(grid.transition(pairs.x, velocity, pairs.steps), x_next)
        worst = max(worst, float(((new - old).exp() - 1).abs().nan_to_num(math.inf).max()))
    limit = config.grpo.clip_range  # pyright: ignore[reportAttributeAccessIssue]
    text = f"ratio: within {worst:.2g} of 1 before the first update"
    if worst <= limit / 10:
        yield Finding("ok", text)
        return
    level = "fault" if plan.ratio and worst > limit / 2 else "note"
    used = "" if plan.ratio else " (which this stage does not use)"
    yield Finding(
        level,
        f"{text}{used}; the clip range is {limit:g}. Rollout and update do not see one policy: in "
        "a dtype of few bits let rollout.batch_size equal optimizer.micro_batch.",
    )


def _taught(config: OpdStage | SftStage, loop: Loop, rollout: Rollout) -> Iterator[Finding]:
    """Labels of each teacher on a few states: finite, and neither the base's nor the student's."""
    x, rows = rollout.states[:2, 0], torch.arange(min(2, len(rollout)))
    sigma = rollout.sigmas[rollout.steps[0]].to(x).expand(len(x))
    cond, bank = rollout.conditioning.select(rows), _bank(loop)
    for name, teacher in config.teachers.items():
        source = bank.source(name)
        label, base = (
            _velocity_of(loop.backbone, adapter, x, sigma, cond, source.guidance)
            for adapter in (source.adapter, None)
        )
        gap = _relative(label, base)
        if not math.isfinite(gap):
            text = f"teacher {name!r}: its velocity is not finite; its adapter or dtype is broken."
            yield Finding("fault", text)
        elif teacher.adapter is not None and gap < APART:
            yield Finding("fault", f"teacher {name!r}: equals the base: there is nothing to learn.")
        else:
            yield Finding("ok", f"teacher {name!r}: {gap:.1%} from the base")


@torch.no_grad()
def _velocity_of(
    backbone: Backbone,
    adapter: str | None,
    x: Tensor,
    sigma: Tensor,
    cond: Conditioning,
    guidance: float,
) -> Tensor:
    with backbone.adapter(adapter):
        return backbone.velocity(x, sigma, cond, guidance=guidance)


def _bank(loop: Loop) -> Bank:
    algorithm = loop.algorithm
    found = algorithm.bank if isinstance(algorithm, Sft) else algorithm.teachers  # type: ignore
    assert isinstance(found, Bank)
    return found


def _worth(config: TrainingStage, loop: Loop, built: Mapping[str, Reward]) -> Iterator[Finding]:
    """Does a teacher score less on its own task than the student does at its start?

    Each is sampled as it takes part: the teacher at the guidance of its labels, the student at the
    one that it is trained at; the same held-out prompts and noise. A student that has learnt all
    that its labels say scores as the teacher does here.
    """
    if not isinstance(config, OpdStage | SftStage):
        return
    r, count = config.rollout, WORTH
    if config.evaluation:
        count = min(count, config.evaluation.prompts)
    for task in config.tasks:
        reward = built.get(task.name)
        if reward is None or task.validation is None or getattr(reward, "groupwise", False):
            continue
        prompts = subset(load_prompts(task.validation, task.name), count)
        (source,) = _bank(loop).sources([task.name])
        settings = Settings(r.steps, config.guidance, config.seed, r.batch_size)
        start = _scores(loop.backbone, prompts, settings, reward)
        with loop.backbone.adapter(source.adapter):
            settings = dataclasses.replace(settings, guidance=source.guidance)
            taught = _scores(loop.backbone, prompts, settings, reward)
        both = torch.stack([start, taught])[:, start.isfinite() & taught.isfinite()]
        if both.shape[1] < FEW:
            yield Finding("note", f"worth: too few images of task {task.name!r} could be scored")
            continue
        gap = both[1] - both[0]
        mean, error = float(gap.mean()), float(gap.std() / len(gap) ** 0.5)
        before, after = both.mean(1).tolist()
        text = (
            f"worth: on task {task.name!r} its teacher at guidance {settings.guidance:g} scores "
            f"{after:.3f}, the student's start at {config.guidance:g} {before:.3f}: {mean:+.3f} ± "
            f"{error:.3f} on {len(gap)} prompts"
        )
        if mean < -2 * error:
            text += (
                ". Its labels make the student worse. Look at its guidance, its adapter and task."
            )
        yield Finding("fault" if mean < -2 * error else "ok", text)


def _scores(backbone: Backbone, prompts: PromptBatch, settings: Settings, reward: Reward) -> Tensor:
    """The number [P] that a reward is known by, of an image of each prompt; NaN = invalid."""
    found = score(reward, generate(backbone, prompts, settings), prompts.prompts, prompts.metadata)
    value = found.parts.get(getattr(reward, "headline", None) or "", found.value)
    return value.float().cpu().where(found.valid.cpu(), torch.nan)


def _velocity(loop: Loop, rollout: Rollout) -> Tensor:
    """The student's velocity at the first states."""
    keep = torch.zeros(len(rollout), dtype=torch.bool)
    keep[:2] = True
    pairs = next(pairs_of(rollout, keep, 2))
    with torch.no_grad():
        return loop.velocity(pairs)


def _moved(before: Tensor, after: Tensor) -> Iterator[Finding]:
    """What two updates did to the velocity."""
    gap = _relative(after, before)
    if not gap < 0.5:
        yield Finding(
            "fault",
            f"update: two of them change the velocity by {gap:.0%}. Lower optimizer.lr, or give it "
            "a warm-up.",
        )
    elif gap == 0:
        text = "update: two of them change nothing (a warm-up, or rewards that are all alike?)"
        yield Finding("note", text)
    else:
        yield Finding("ok", f"update: two of them change the velocity by {gap:.2%}")


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _time(config: TrainingStage, loop: Loop, found: Live) -> None:
    """FLOP/s of the second update (the first one warms up), and what scoring took."""
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    images = config.rollout.prompts * config.rollout.copies
    seconds = last[metrics.SECONDS_ROLLOUT] + last[metrics.SECONDS_UPDATE]
    rewarded = Plan(config).ratio and any(task.reward for task in config.tasks)
    if rewarded:
        found.scoring = last[metrics.SECONDS_SCORE] / images
    else:
        seconds += last[metrics.SECONDS_SCORE]  # labels
    estimate = predict(config, device_type=loop.backbone.device.type)
    found.rate = estimate.flops / seconds
