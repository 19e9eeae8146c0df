"""Numbers of a config that are valid, but bad for training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from flowalign import sde
from flowalign.backbone import Backbone, ModelError
from flowalign.backbone.structure import known
from flowalign.checks.launch import Launch
from flowalign.config.loading import card_of
from flowalign.training.algorithm import algorithm_class
from flowalign.training.inputs import Inputs
from flowalign.training.step import decay_at
from flowalign.types import Problem, Schedule

FEW_STEPS = 8  # steps, at most, of a model that was distilled to few
LARGE_MODEL = 10**8  # parameters of a large model
FEWEST_PUBLISHED = 20_000  # images; no published run of a large model learnt a reward from fewer


def card(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Steps and scales far from the model's card; for a model that was distilled to few steps,
    losses of straight paths and states off its grid."""
    name = config.model.id
    if not (config.trains and (recommended := card_of(name))):
        return
    steps, guidance = recommended
    distilled = steps <= FEW_STEPS
    level = "fault" if distilled else "note"
    if distilled and config.stage in ("nft", "awm", "sft", "dpo"):
        text = f"{name} was distilled to {steps} steps, and {config.stage} trains it back to"
        text += " straight paths, which take many. "
        if config.stage in ("nft", "awm"):
            text += f"Images blurred after thousands of updates, and held with {config.stage}."
            text += "kl_weight for hundreds (Flow-Factory #225). Set it, and look at the samples."
            yield Problem("card", text, "note")
        else:
            text += f"Use the model that it was distilled from, or grpo at {steps} steps."
            yield Problem("card", text, level)
    on_grid = config.rollout.kind == "ode" and config.rollout.steps == steps
    if distilled and config.stage == "opd" and not (on_grid and config.student.substeps == 1):
        yield Problem(
            "card",
            f"{name} was distilled to {steps} steps, so teachers are right at these noise levels "
            f"alone. Set rollout.kind=ode rollout.steps={steps} student.substeps=1.",
            level,
        )
    sampled = {"rollout.steps": config.rollout.steps}
    if config.evaluation and config.evaluation.steps:
        sampled["evaluation.steps"] = config.evaluation.steps
    bases = {f"{key}.guidance" for key in config.bases}
    far = {key: value for key, value in sampled.items() if distilled and value > 2 * steps}
    far |= {
        key: scale
        for key, scale in config.scales.items()
        if key not in bases and not guidance / 2 <= scale <= 2 * guidance
    }
    for key, value in far.items():
        yield Problem(
            "card",
            f"{key} = {value:g}; {name} has {steps} steps at guidance {guidance:g}.",
            level,
        )


def scales(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """float16; rollout, labels, update and evaluation at different CFG scales; evaluations with
    fewer steps than the rollouts; a clip range that clips every ratio, or none."""
    if config.model.dtype == "float16":
        yield Problem(
            "dtype",
            "float16 overflows where bfloat16 does not. Use bfloat16 if the GPU can.",
            "note",
        )
    trained = config.guidance
    evaluation = config.evaluation_sampling
    for name, scale in config.mixtures.items():
        text = f"{name} labels at CFG scale {scale}, the student is trained at {trained}: it"
        if scale > trained:
            yield Problem("guidance", f"{text} absorbs CFG. Sample it at {trained}.", "note")
        else:
            text += f" unlearns guidance. Leave {name}.guidance out."
            yield Problem("guidance", text, "note" if name == "anchor" else "fault")
    if trained != config.rollout.guidance:
        yield Problem(
            "guidance", f"trained at {trained}, rollouts at {config.rollout.guidance}.", "note"
        )
    if config.evaluates and evaluation.guidance != trained:
        yield Problem(
            "guidance",
            f"trained at {trained}, evaluated at {evaluation.guidance}, which is another sampler. "
            f"Set evaluation.guidance = {trained}.",
            "fault",
        )
    if evaluation.steps < config.rollout.steps:
        yield Problem(
            "schedule",
            f"evaluated with {evaluation.steps} steps, but rollouts have {config.rollout.steps}. "
            "The evaluated images are worse than in training. Use as many steps, or more.",
            "fault",
        )
    for key, value in config.clip_ranges.items():
        # log-probs are means over pixels: ratios stay within about 1e-4 of 1, with rounding errors
        # of 1e-7
        if not 1e-6 <= value <= 1e-2:
            count = "every ratio" if value < 1e-6 else "no ratio"
            yield Problem(
                "clip", f"{key} = {value:g} clips {count}. 1e-5 to 1e-3 is usual.", "fault"
            )


def noise(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Trained steps with hardly any noise."""
    rollout = config.rollout
    # without noise, or no state of a rollout is trained
    if rollout.kind == "ode" or algorithm_class(config).keeps(config).noise_levels:
        return
    try:
        sigmas = Backbone.load(config.model, "meta").sigmas(rollout.steps)
    except LookupError:  # its shapes are not known
        return
    except ModelError as error:
        yield Problem("schedule", str(error), "fault")
        return
    schedule = Schedule(sigmas, rollout.kind, rollout.noise_level, rollout.trained)
    window = schedule.trained
    zero = torch.zeros(len(window), 1, 1, 1)  # the standard deviation depends on the step alone
    std = sde.scheduled_transition(schedule, zero, zero, torch.tensor(window)).std.flatten()
    # log-probs and KL divide by the variance: 1e-6 here
    quiet = [step for step, value in zip(window, std.tolist(), strict=True) if value < 1e-3]
    if quiet:
        yield Problem(
            "noise",
            f"steps {quiet} of the trained window have a standard deviation of "
            f"{float(std.min()):.2g}, so that log-probs and KL explode. Let rollout.window stop "
            "before them, or raise rollout.noise_level.",
            "fault",
        )


def volume(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Fewer images than any published run needed to learn a reward."""
    spec = known(config.model)
    if not (spec and config.credited and config.images < FEWEST_PUBLISHED):
        return
    if sum(parameter.numel() for parameter in spec.family.core.parameters()) >= LARGE_MODEL:
        yield Problem(
            "images",
            f"{config.images:,} in all. Published runs of such models draw 100,000 to 1,000,000, "
            f"and none is known that learnt a reward from fewer than {FEWEST_PUBLISHED:,}.",
            "note",
        )


def slow_average(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """A moving average that lags behind by half of the run."""
    ema = config.ema
    total = config.optimizer_steps
    if ema is None or ema.every > total:  # then the run returns its adapter
        return
    late = (n for n in range(ema.every, total + 1, ema.every) if n > total // 2)
    old = math.prod(decay_at(step, ema.decay) for step in late)
    old *= decay_at(total, ema.decay) ** (total % ema.every / ema.every)
    if old > 0.1:
        yield Problem(
            "ema",
            f"{old:.0%} of the average that is kept comes from the first half of the run. Lower "
            "ema.decay or ema.every, train longer, or write `ema: null`.",
            "fault" if old > 0.5 else "note",
        )
