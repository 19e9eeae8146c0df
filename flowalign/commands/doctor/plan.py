"""What is wrong with a stage before any weight is loaded: its numbers, prompts and adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch

from flowalign import sde
from flowalign.backbone import Backbone, ModelError
from flowalign.backbone.adapters import AdapterError, read_lora
from flowalign.backbone.base import without_data
from flowalign.backbone.structure import cut_prompts, read_family
from flowalign.commands.findings import Finding, fault, note
from flowalign.config import TrainingStage
from flowalign.training.algorithm import algorithm_class
from flowalign.training.data import load_prompts, subset
from flowalign.training.preflight import against_card
from flowalign.training.step import decay_at
from flowalign.types import Schedule

SAMPLE = 500  # prompts of a set, about, whose length is checked
LARGE = 10**8  # parameters of a large model
FEWEST = 20_000  # images; no published run of a large model learnt a reward from fewer


def examine(config: TrainingStage) -> list[Finding]:
    findings = [*_numbers(config)]
    backbone = None
    with suppress(LookupError):  # its shapes are not known
        backbone = without_data(config.model)
        findings += [*_noise(config, backbone), *_volume(config, backbone)]
    findings += [*_average(config), *_prompts(config)]
    if backbone:
        findings += _lengths(config, backbone)
    return [*findings, *_working(config)]


def _numbers(config: TrainingStage) -> Iterator[Finding]:
    """float16; rollout, labels, update and evaluation at different CFG scales; evaluations with
    fewer steps than the rollouts; what the model's card is against; a clip range that clips every
    ratio, or none."""
    if config.model.dtype == "float16":
        yield note("dtype: float16 overflows where bfloat16 does not. Use bfloat16 if the GPU can.")
    trained, evaluation = config.guidance, config.evaluation_sampling
    for name, scale in config.mixtures.items():
        said = f"guidance: {name} labels at CFG scale {scale}, the student is trained at {trained}"
        if scale > trained:
            yield note(f"{said}: it absorbs CFG. Sample it at {trained}.")
        else:
            text = f"{said}: it unlearns guidance. Leave {name}.guidance out."
            yield note(text) if name == "anchor" else fault(text)
    if trained != config.rollout.guidance:
        yield note(f"guidance: trained at {trained}, rollouts at {config.rollout.guidance}.")
    if config.evaluates and evaluation.guidance != trained:
        yield fault(
            f"guidance: trained at {trained}, evaluated at {evaluation.guidance}, which is another "
            f"sampler. Set evaluation.guidance = {trained}."
        )
    if evaluation.steps < config.rollout.steps:
        yield fault(
            f"schedule: evaluated with {evaluation.steps} steps, but rollouts have "
            f"{config.rollout.steps}. The evaluated images are worse than in training. Use as many "
            "steps, or more."
        )
    yield from (Finding(level, text) for level, text in against_card(config))
    for key, value in config.clip_ranges.items():
        # log-probs are means over pixels: ratios stay within about 1e-4 of 1, with rounding errors
        # of 1e-7
        if not 1e-6 <= value <= 1e-2:
            count = "every ratio" if value < 1e-6 else "no ratio"
            yield fault(f"clip: {key} = {value:g} clips {count}. 1e-5 to 1e-3 is usual.")


def _noise(config: TrainingStage, backbone: Backbone) -> Iterator[Finding]:
    """Trained steps with hardly any noise."""
    rollout = config.rollout
    # without noise, or no state of a rollout is trained
    if rollout.kind == "ode" or algorithm_class(config).keeps(config).noise_levels:
        return
    try:
        sigmas = backbone.sigmas(rollout.steps)
    except ModelError as error:
        yield fault(f"schedule: {error}")
        return
    schedule = Schedule(sigmas, rollout.kind, rollout.noise_level, rollout.trained)
    window = schedule.trained
    zero = torch.zeros(len(window), 1, 1, 1)  # the standard deviation depends on the step alone
    std = sde.scheduled_transition(schedule, zero, zero, torch.tensor(window)).std.flatten()
    # log-probs and KL divide by the variance: 1e-6 here
    quiet = [step for step, value in zip(window, std.tolist(), strict=True) if value < 1e-3]
    if quiet:
        yield fault(
            f"noise: steps {quiet} of the trained window have a standard deviation of "
            f"{float(std.min()):.2g}, so that log-probs and KL explode. "
            "Let rollout.window stop before them, or raise rollout.noise_level."
        )


def _volume(config: TrainingStage, backbone: Backbone) -> Iterator[Finding]:
    """Fewer images than a reward was ever seen to be learnt from."""
    size = sum(parameter.numel() for parameter in backbone.transformer.parameters())
    if config.credited and size >= LARGE and config.images < FEWEST:
        yield note(
            f"images: {config.images:,} in all. Published runs of such models draw 100,000 to "
            f"1,000,000, and none is known that learnt a reward from fewer than {FEWEST:,}."
        )


def _average(config: TrainingStage) -> Iterator[Finding]:
    """A moving average that lags behind by half of the run."""
    ema, total = config.ema, config.optimizer_steps
    if ema is None or ema.every > total:  # then the run returns its adapter
        return
    late = (n for n in range(ema.every, total + 1, ema.every) if n > total // 2)
    old = math.prod(decay_at(step, ema.decay) for step in late)
    old *= decay_at(total, ema.decay) ** (total % ema.every / ema.every)
    if old > 0.1:
        yield Finding(
            "fault" if old > 0.5 else "note",
            f"ema: {old:.0%} of the average that is kept comes from the first half of the run. "
            "Lower ema.decay or ema.every, train longer, or write `ema: null`.",
        )


def _prompts(config: TrainingStage) -> Iterator[Finding]:
    """Validation prompts that a task trains on."""
    trained = {p for t in config.tasks for p in load_prompts(t.prompts, t.name).prompts}
    for task in config.tasks:
        if not (config.evaluation and task.validation):
            continue
        validation = load_prompts(task.validation, task.name)
        prompts = subset(validation, config.evaluation.prompts).prompts
        if shared := [prompt for prompt in prompts if prompt in trained]:
            yield Finding(
                "fault" if len(shared) > len(prompts) / 4 else "note",
                f"validation: {len(shared)} of {len(prompts)} prompts of {task.validation} (task "
                f"{task.name!r}) are trained on, such as {shared[0]!r}. Remove them from one set.",
            )


def _lengths(config: TrainingStage, backbone: Backbone) -> Iterator[Finding]:
    """Prompts that the text encoder cuts. Those of which nothing is left, the preflight refuses."""
    limit, most = backbone.text.max_sequence_length, backbone.family.longest
    for task in config.tasks:
        prompts = load_prompts(task.prompts, task.name).prompts
        prompts = prompts[:: max(1, len(prompts) // SAMPLE)]  # of all parts: many sets are sorted
        cut = cut_prompts(config.model, prompts)
        about = ""
        if cut is None:  # without its tokenizer: about 4 tokens for 3 words
            cut = [p for p in prompts if len(p.split()) * 4 // 3 + 1 > limit]
            about = "about "
        if cut:
            share = len(cut) / len(prompts)
            yield Finding(
                "fault" if share > 0.05 else "note",
                f"length: {about}{share:.0%} of the prompts of task {task.name!r} have more than "
                f"model.max_sequence_length = {limit} tokens and are cut, such as "
                f"{cut[0][:60]!r}. Raise it (up to {most}).",
            )


def _working(config: TrainingStage) -> Iterator[Finding]:
    """Adapters that change nothing. Those that are not finite are refused on reading."""
    for name, source in config.inputs.items():
        with suppress(AdapterError, OSError):  # an earlier stage will write it
            lora = read_lora(source, family=partial(read_family, config.model))
            if not any(bool(lora.weights[f"{layer}.lora_B.weight"].any()) for layer in lora.ranks):
                yield fault(
                    f"{name}: equals the base: all B are 0, as in a LoRA that was never trained. "
                    "Use the adapter of a finished run, or null for the base itself."
                )
