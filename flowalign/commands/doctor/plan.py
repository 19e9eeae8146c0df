"""What is wrong with a stage before any weight is loaded: its numbers, prompts and adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from flowalign import sde
from flowalign.backbone import Backbone, ModelError
from flowalign.backbone.adapters import AdapterError, read_lora
from flowalign.backbone.structure import cut_prompts, read_family, without_data
from flowalign.commands.doctor.findings import Finding, fault, note
from flowalign.config import TrainingStage
from flowalign.training.algorithm import algorithm_class
from flowalign.training.data import load_prompts, subset
from flowalign.training.preflight import against_card
from flowalign.training.step import MovingAverage
from flowalign.types import Schedule

SAMPLE = 500  # prompts of a set, about, whose length is checked


@dataclass(frozen=True)
class Plan:
    """A stage, and the shapes of its base model."""

    config: TrainingStage

    @cached_property
    def backbone(self) -> Backbone | None:
        """The base without data; None where its shapes are not known."""
        with suppress(LookupError):
            return without_data(self.config.model)


def examine(config: TrainingStage) -> list[Finding]:
    """All findings of a stage, in the order of CHECKS."""
    plan = Plan(config)
    return [finding for check in CHECKS for finding in check(plan)]


# Numbers ---------------------------------------------------------------------------------------


def dtypes(plan: Plan) -> Iterator[Finding]:
    """float16, which overflows."""
    if plan.config.model.dtype == "float16":
        yield note("dtype: float16 overflows where bfloat16 does not. Use bfloat16 if the GPU can.")


def guidance(plan: Plan) -> Iterator[Finding]:
    """Rollout, labels, update and evaluation at different CFG scales."""
    config, trained = plan.config, plan.config.guidance
    for name, scale in config.mixtures.items():
        said = f"guidance: {name} labels at CFG scale {scale}, the student is trained at {trained}"
        if scale > trained:
            yield note(f"{said}: it absorbs CFG. Sample it at {trained}.")
        else:
            text = f"{said}: it unlearns guidance. Leave {name}.guidance out."
            yield note(text) if name == "anchor" else fault(text)
    if trained != config.rollout.guidance:
        yield note(f"guidance: trained at {trained}, rollouts at {config.rollout.guidance}.")
    evaluated = config.evaluation_sampling.guidance
    if config.evaluates and evaluated != trained:
        yield fault(
            f"guidance: trained at {trained}, evaluated at {evaluated}, which is another sampler. "
            f"Set evaluation.guidance = {trained}."
        )


def steps(plan: Plan) -> Iterator[Finding]:
    """Evaluations with fewer steps than the rollouts."""
    trained, evaluated = plan.config.rollout.steps, plan.config.evaluation_sampling.steps
    if evaluated < trained:
        yield fault(
            f"schedule: evaluated with {evaluated} steps, but rollouts have {trained}. The "
            "evaluated images are worse than in training. Use as many steps, or more."
        )


def card(plan: Plan) -> Iterator[Finding]:
    """What the model's card is against."""
    return (Finding(level, text) for level, text in against_card(plan.config))


def noise(plan: Plan) -> Iterator[Finding]:
    """Trained steps with hardly any noise."""
    config, rollout, backbone = plan.config, plan.config.rollout, plan.backbone
    if rollout.kind == "ode" or backbone is None:
        return
    if algorithm_class(config).keeps(config).noise_levels:  # it trains no state of a rollout
        return
    pixels = [height * width for height, width in config.model.image_sizes]
    try:  # of the smallest size: where the shift depends on it, its last steps have the least noise
        sigmas = backbone.sigmas(rollout.steps, backbone.sizes[pixels.index(min(pixels))])
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


def clip(plan: Plan) -> Iterator[Finding]:
    """A clip range that clips every ratio, or none. Log-probs are means over pixels: ratios stay
    within about 1e-4 of 1, with rounding errors of 1e-7."""
    for key, value in plan.config.clip_ranges.items():
        if not 1e-6 <= value <= 1e-2:
            count = "every ratio" if value < 1e-6 else "no ratio"
            yield fault(f"clip: {key} = {value:g} clips {count}. 1e-5 to 1e-3 is usual.")


def average(plan: Plan) -> Iterator[Finding]:
    """A moving average that lags behind by half of the run."""
    ema, total = plan.config.ema, plan.config.optimizer_steps
    if ema is None:
        return
    # average a number that is 1 in the first half of the run and 0 after it
    probe = [torch.ones(1)]
    moving = MovingAverage(probe, decay=ema.decay, every=ema.every)
    for step in range(ema.every, total + 1, ema.every)[-20_000:]:  # earlier ones have decayed
        probe[0].fill_(float(step <= total // 2))
        moving.step(probe, step)
    probe[0].fill_(0.0)
    with moving.of(probe, total):
        old = float(probe[0])
    if old > 0.1:
        yield Finding(
            "fault" if old > 0.5 else "note",
            f"ema: {old:.0%} of the average that is kept comes from the first half of the run. "
            "Lower ema.decay or ema.every, train longer, or write `ema: null`.",
        )


# Prompts ---------------------------------------------------------------------------------------


def held_out(plan: Plan) -> Iterator[Finding]:
    """Validation prompts that a task trains on."""
    config = plan.config
    if config.evaluation is None:
        return
    trained = {p for task in config.tasks for p in load_prompts(task.prompts, task.name).prompts}
    for task in config.tasks:
        if task.validation is None:
            continue
        validation = load_prompts(task.validation, task.name)
        prompts = subset(validation, config.evaluation.prompts).prompts
        shared = [prompt for prompt in prompts if prompt in trained]
        if shared:
            yield Finding(
                "fault" if len(shared) > len(prompts) / 4 else "note",
                f"validation: {len(shared)} of {len(prompts)} prompts of {task.validation} (task "
                f"{task.name!r}) are trained on, such as {shared[0]!r}. Remove them from one set.",
            )


def variety(plan: Plan) -> Iterator[Finding]:
    """Fewer prompts than an update draws, so that each is drawn several times."""
    tasks, drawn = plan.config.tasks, plan.config.rollout.prompts
    for task in tasks:
        different = len(set(load_prompts(task.prompts, task.name).prompts))
        share = round(drawn * task.weight / sum(other.weight for other in tasks))
        if different < share:
            yield note(
                f"prompts: task {task.name!r} has {different} different ones, and an update draws "
                f"about {share}: the same again and again. Add prompts, or lower rollout.prompts."
            )


def lengths(plan: Plan) -> Iterator[Finding]:
    """Prompts that the text encoder cuts. Those of which nothing is left, the preflight refuses."""
    if (backbone := plan.backbone) is None:
        return
    limit, most = backbone.text.max_sequence_length, backbone.family.longest
    for task in plan.config.tasks:
        prompts = load_prompts(task.prompts, task.name).prompts
        prompts = prompts[:: max(1, len(prompts) // SAMPLE)]  # of all parts: many sets are sorted
        cut = cut_prompts(plan.config.model, prompts)
        # without its tokenizer: about 4 tokens for 3 words
        about = "" if cut else "about "
        long = cut[0] if cut else [p for p in prompts if len(p.split()) * 4 // 3 + 1 > limit]
        if long:
            share = len(long) / len(prompts)
            yield Finding(
                "fault" if share > 0.05 else "note",
                f"length: {about}{share:.0%} of the prompts of task {task.name!r} have more than "
                f"model.max_sequence_length = {limit} tokens and are cut, such as "
                f"{long[0][:60]!r}. Raise it (up to {most}).",
            )


# Adapters --------------------------------------------------------------------------------------


def working(plan: Plan) -> Iterator[Finding]:
    """Adapters that change nothing. Those that are not finite are refused on reading."""
    family = partial(read_family, plan.config.model)
    for name, source in plan.config.inputs.items():
        with suppress(AdapterError, OSError):  # an earlier stage will write it
            lora = read_lora(source, family=family)
            if any(bool(lora.weights[f"{layer}.lora_B.weight"].any()) for layer in lora.ranks):
                continue
            yield fault(
                f"{name}: equals the base: all B are 0, as in a LoRA that was never trained. "
                "Use the adapter of a finished run, or null for the base itself."
            )


CHECKS: tuple[Callable[[Plan], Iterator[Finding]], ...] = (
    dtypes, guidance, steps, card, noise, clip, average, held_out, variety, lengths, working,
)  # fmt: skip
