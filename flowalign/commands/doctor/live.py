"""Test a reward and a run on a few images: does the reward work, what does it score and cost; the
run's ratio, its teachers and its first updates.

A reward scores scenes of the tiny world with their own prompts and with other prompts, noise and
plain grey. A fault is what breaks a training run: scores that depend on the batch, or never differ.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign import rewards, sde
from flowalign.backbone import ModelError
from flowalign.backbone.tiny.scenes import rendered
from flowalign.commands import build
from flowalign.commands.doctor.count import predict
from flowalign.commands.doctor.pace import PHASES, Pace
from flowalign.commands.findings import fault, note, ok
from flowalign.config import ConfigError, Stage, TrainingStage, parse
from flowalign.rewards.gradient import gradient_problems
from flowalign.rewards.scoring import score
from flowalign.training import metrics
from flowalign.training.algorithm import TrainingError, algorithm_class, pairs_of
from flowalign.training.data import load_prompts
from flowalign.training.inputs import Inputs
from flowalign.training.loop import Loop
from flowalign.training.nonfinite import NotFinite
from flowalign.types import Problem, PromptBatch, Rollout, Scores

REWARD_SCENES = 16  # that a reward scores
IMAGES_A_PROMPT = 4  # of a small run at most, and for a reward that compares them
FEWEST_IMAGES = 16  # of an update, at least: enough to see what it does
UPDATES = 3  # of a small run; the first one warms up, and the others are timed
PROBES = ("tiny/geneval_test", "tiny/ocr_test", "tiny/preference_test")
TOLERANCE = 1e-4  # relative, of scores: float32 sums in another order


def examine_stage(config: Stage, inputs: Inputs | None = None) -> tuple[list[Problem], Pace | None]:
    """Score probe images with each reward. Then run a few small updates, in a temporary folder.
    Findings, and how fast this machine ran them; None = it was not measured. inputs: what was
    opened of the stage."""
    findings = list[Problem]()
    judging = dict[str, float]()
    pace = None
    for judged in config.judged:
        if judged.place.startswith("evaluation.watch"):
            continue
        rewards = judged.rewards.values()
        cost = sum(_reward(judged.name, r.name, r.options, findings) for r in rewards)
        if rewards and math.isfinite(cost):
            judging[judged.name] = cost
    try:
        if isinstance(config, TrainingStage):
            with tempfile.TemporaryDirectory() as folder:
                pace = _train(config, folder, judging, findings, inputs)
    except (ConfigError, ModelError, TrainingError) as error:
        findings.append(fault("update", str(error)))
    except torch.cuda.OutOfMemoryError as error:
        text = str(error).splitlines()[0]  # the rest is a table of allocations
        findings.append(fault("memory", f"even a small run fails: {text}"))
    return findings, pace


def _reward(task: str, name: str, options: dict[str, Any], findings: list[Problem]) -> float:
    """Add the faults that `flowalign doctor --reward` finds, or one line that says "ok". Returns
    its seconds for an image, NaN if it could not score."""
    title = f"reward {name!r} of task {task!r}"
    try:
        diagnosed, cost = diagnose(name, options, count=4)
    except (ValueError, ImportError, OSError) as error:
        finding = note if isinstance(error, UnsuitedError) else fault
        findings.append(finding(title, str(error)))
        return math.nan
    faults = [fault(title, str(f)) for f in diagnosed if f.level == "fault"]
    findings += faults or [ok(title, f"sound; {1000 * cost:.1f} ms an image")]
    return cost


# A small run -------------------------------------------------------------------------------------


def _train(
    config: TrainingStage,
    folder: str,
    judging: dict[str, float],
    findings: list[Problem],
    inputs: Inputs | None,
) -> Pace:
    """Findings of a small run, and its pace."""
    small = small_run(config, folder)
    loop, progress = build.wire(small, inputs=inputs)
    progress.main = False  # silent
    prepared = loop.prepare(loop.rollout(0))
    if isinstance(prepared, NotFinite):
        raise TrainingError(f"{prepared}. {prepared.remedy}.")
    rollout = prepared.rollout
    if rollout.log_probs is not None and small.clip_ranges:
        findings.append(_ratio(small, loop, rollout))
    two = next(pairs_of(rollout, torch.arange(len(rollout)) < 2, 2))  # they show a change
    with torch.no_grad():
        before = loop.algorithm.velocity(two)
    loop.run()
    with torch.no_grad():
        gap = float((loop.algorithm.velocity(two) - before).norm() / before.norm())
    text = f"the first updates change the velocity by {gap:.2%}"
    if gap == 0:
        findings.append(note("update", f"{text}. Is it the warm-up, or are all rewards equal?"))
    elif gap < 0.5:
        findings.append(ok("update", text))
    else:  # or NaN
        findings.append(fault("update", f"{text}. Lower optimizer.lr, or use optimizer.warmup."))
    return _pace(small, inputs, loop.backbone.device.type, judging)


def small_run(config: Any, folder: str) -> TrainingStage:
    """The run with a few updates, no evaluation, and images for two full batches of each kind."""
    rollout = config.rollout
    algorithm = algorithm_class(config)
    keeps = algorithm.keeps(config)
    states = keeps.noise_levels or len(algorithm.trained_steps(config, 0))
    batch = max(config.optimizer.micro_batch, keeps.ascended)
    if keeps.labels:
        batch = max(batch, config.student.label_batch)
    images = max(FEWEST_IMAGES, 2 * rollout.batch_size, math.ceil(2 * batch / states))
    images = min(images, rollout.images)
    copies = min(rollout.group_size, max(IMAGES_A_PROMPT, math.ceil(images / rollout.prompts)))
    prompts = max(len(config.tasks), min(rollout.prompts, math.ceil(images / copies)), 2)
    changes = [
        f"output={json.dumps(folder)}", "train.trackers=[]", f"train.updates={UPDATES}",
        f"train.checkpoint_every={UPDATES}", "train.sample_every=1000",
        "train.max_invalid_share=1.0",
        f"rollout.prompts={prompts}", f"rollout.group_size={copies}",
        "optimizer.updates_per_rollout=1",
    ]  # fmt: skip
    if prompts < rollout.prompts:  # each task needs some
        changes += [f"tasks.{i}.weight=1.0" for i in range(len(config.tasks))]
    if config.patience is not None:  # it counts evaluations, of which there are none
        changes.append("student.patience=null")
    return parse(config.model_dump(mode="json") | {"evaluation": None}, changes)


def _pace(
    small: TrainingStage, inputs: Inputs | None, device_type: str, judging: dict[str, float]
) -> Pace:
    """The pace, from the total seconds of all updates but the first."""
    lines = [json.loads(line) for line in small.folder.log.read_text().splitlines()]
    timed = [line for line in lines if metrics.SECONDS_UPDATE in line][1:]
    rolled, waited, updated = (sum(line[name] for line in timed) for name in metrics.SECONDS)
    flops = dict.fromkeys(PHASES, 0.0)
    phases = predict(small, inputs, device_type=device_type, drawn=range(1, UPDATES)).phases
    for phase in phases:
        flops[phase.kind] += len(timed) * phase.flops
    learning = flops["learning"] / updated
    sampled = any(p.name == "rollout" for p in phases)
    rate = flops["sampling"] / rolled if sampled else learning
    rates = dict.fromkeys([*PHASES, "rewards"], rate) | {"learning": learning}
    waiting = None
    if small.learns_from_rewards:
        waiting = waited / (len(timed) * small.rollout.images)
    elif flops["labels"]:
        rates["labels"] = flops["labels"] / waited
    source = f"measured here, {rates['learning'] / 1e12:.3g} TFLOP/s in updates"
    return Pace(rates, source, waiting, judging)


@torch.no_grad()
def _ratio(config: TrainingStage, loop: Loop, rollout: Rollout) -> Problem:
    """The ratio of new and old policy before any update, by the forward path of the update."""
    if loop.backbone.compiled:
        return ok("ratio", "1 before the first update: compiled, old and new are of one graph")
    schedule = loop.algorithm.plan(0)
    worst = 0.0
    keep = torch.ones(len(rollout), dtype=torch.bool)
    for pairs in pairs_of(rollout, keep, config.optimizer.micro_batch):
        x_next, old = pairs.action()
        assert old is not None
        velocity = loop.algorithm.velocity(pairs)
        new = sde.scheduled_transition(schedule, pairs.x, velocity, pairs.steps)
        change = sde.log_prob(new, x_next) - old
        worst = max(worst, float((change.exp() - 1).abs().nan_to_num(math.inf).max()))
    limit = min(config.clip_ranges.values())
    text = f"within {worst:.2g} of 1 before the first update"
    if worst <= limit / 10:
        return ok("ratio", text)
    return Problem(
        "ratio",
        f"{text}; the clip range is {limit:g}. Rollout and update compute different log-probs. In "
        "a 16-bit dtype let rollout.batch_size equal optimizer.micro_batch.",
        "fault" if worst > limit / 2 else "note",
    )


# Rewards -----------------------------------------------------------------------------------------


class UnsuitedError(ValueError):
    """No built-in prompts have what a reward needs, such as a metadata key."""


def diagnose(
    name: str,
    options: Mapping[str, Any],
    count: int = REWARD_SCENES,
    sources: Sequence[str] = PROBES,
) -> tuple[list[Problem], float]:
    """Build a reward and examine it on `count` scenes: the findings, and its seconds for an image.
    sources: prompt sets; the first that it can score counts. Raises ValueError for a name or
    options that do not work, UnsuitedError where no prompts suit it, and whatever its constructor
    raises.
    """
    spec = rewards.RewardSpec(name, options)
    spec.check()
    batches = _suited(spec, count, sources)
    reward = spec.build()
    copies = IMAGES_A_PROMPT if reward.groupwise else 1

    def ask(images: Tensor, rows: Sequence[int]) -> Scores:
        selected = batch.select(rows)
        return score(reward, images, selected.prompts, selected.metadata)

    for batch in batches:  # what is loaded or compiled on first use is not timed
        batch = batch.select([row for row in range(len(batch)) for _ in range(copies)])
        scenes = _scenes(batch)
        rows = list(range(len(batch)))
        if bool(ask(scenes[:copies], rows[:copies]).valid.any()):
            break
    probes = {
        "its prompt": scenes,
        "another prompt": scenes.roll(copies, 0),
        "noise": torch.rand(scenes.shape, generator=torch.Generator().manual_seed(0)),
        "grey": torch.full_like(scenes, 0.5),
    }
    began = time.perf_counter()
    answers = {kind: ask(images, rows) for kind, images in probes.items()}
    cost = (time.perf_counter() - began) / (len(probes) * len(rows))
    speed = f"{1000 * cost:.1f} ms an image in batches of {len(rows)}"
    findings = [ok("", speed), *_answers(answers)]
    first = answers["its prompt"]
    ways = {"asked again": [rows], "in reverse order": [rows[::-1]]}
    if copies == 1:
        ways["one by one"] = [[row] for row in rows]
    if not bool(first.valid.any()):
        ways = {}  # there is no score to compare with
    for way, parts in ways.items():
        order = [row for part in parts for row in part]
        value = torch.cat([ask(scenes[part], part).value for part in parts])
        worst = float((value - first.value[order])[first.valid[order]].abs().max())
        scale = float(first.value[first.valid].abs().max())
        same = worst <= TOLERANCE * max(scale, TOLERANCE)
        findings.append((ok if same else fault)(way, f"differs by at most {worst:.2g}"))
    if reward.differentiable:
        problems = gradient_problems(reward, scenes, batch.prompts, batch.metadata)
        findings += [fault("gradient", text) for text in problems]
    return findings, cost


def _suited(spec: rewards.RewardSpec, count: int, sources: Sequence[str]) -> list[PromptBatch]:
    """The prompt sets that the reward says it can score. Raises UnsuitedError if there is none."""
    batches = []
    problem = None
    for source in sources:
        batch = load_prompts(source, "doctor")
        batch = batch.select(range(0, len(batch), max(1, len(batch) // count))[:count])
        try:
            spec.check_prompts(batch.prompts, batch.metadata)
            batches.append(batch)
        except ValueError as error:
            problem = error
    if not batches:
        listed = ", ".join(sources)
        raise UnsuitedError(f"the prompts of {listed} do not suit reward {spec.name!r}: {problem}")
    return batches


def _scenes(batch: PromptBatch) -> Tensor:
    """[B,3,H,W]: the scenes of these prompts; any of the tiny world where they describe none."""
    try:
        return rendered(batch.metadata, seed=0)
    except ValueError:
        others = load_prompts(PROBES[0], "doctor").metadata
        return rendered([others[row % len(others)] for row in range(len(batch))], seed=0)


def _answers(answers: Mapping[str, Scores]) -> Iterator[Problem]:
    """The scores of each kind of probe. Are there any, do they differ, does the prompt matter?"""
    valid = {kind: s.value[s.valid].float().cpu() for kind, s in answers.items()}
    for kind, values in valid.items():
        if len(values):
            low, middle, high = values.quantile(torch.tensor([0.0, 0.5, 1.0])).tolist()
            yield ok(f"scenes with {kind}", f"{low:.4g} to {high:.4g}, median {middle:.4g}")
    count = sum(len(scores.value) for scores in answers.values())
    if lost := count - sum(map(len, valid.values())):
        reason = next(text for scores in answers.values() for text in scores.failures.values())
        level = "note" if answers["its prompt"].valid.all() else "fault"
        yield Problem(f"failed on {lost} of {count} images", reason, level)
    values = torch.cat(list(valid.values())).tolist()
    if values and max(values) - min(values) <= TOLERANCE * max(map(abs, values)):
        yield fault("constant", f"every image scores {values[0]:.4g}, so nothing can be learned")
    paired, other, *plain = (float(v.mean()) if len(v) else math.nan for v in valid.values())
    gap = paired - other
    if math.isfinite(gap):
        text = f"a scene scores {gap:+.4g} more with its own prompt than with another one"
        yield (ok if gap > 0 else note)("", text)
    medians = {kind: float(values.median()) for kind, values in valid.items() if len(values)}
    for kind in ("noise", "grey"):
        if medians.get(kind, -math.inf) > medians.get("its prompt", math.inf):
            yield note(f"{kind} scores more than scenes", "alone, this reward may be hacked so")
