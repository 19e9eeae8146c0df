"""What is wrong with a run before any weight is loaded: its numbers, its prompts, its adapters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from flowalign import sde
from flowalign.adapters.files import AdapterError, Lora, read_lora
from flowalign.backbone import ModelError, scheduler_sigmas
from flowalign.config.schema import (
    EmaConfig,
    GrpoStage,
    OpdStage,
    SftStage,
    TrainingStage,
    mixtures,
)
from flowalign.data import load_prompts, subset
from flowalign.doctor.architectures import Architecture, build, find, local_folder
from flowalign.doctor.findings import Finding
from flowalign.ema import MovingAverage
from flowalign.losses import step_weights
from flowalign.preflight import adapters, start

CLIP_TOKENS = 77
SAMPLE = 2000  # prompts of a set that are looked at


@dataclass(frozen=True)
class Plan:
    """A stage, and the adapters that it will find."""

    config: TrainingStage

    @cached_property
    def loras(self) -> dict[str, Lora]:
        """{place in the config: adapter} of the adapters that lie here."""
        found = {}
        for place, source in adapters(self.config).items():
            with suppress(AdapterError, OSError):  # an earlier stage will write it
                found[place] = read_lora(source)
        return found

    @cached_property
    def transformer(self) -> Any | None:
        """The base as shapes alone; None where they are not known."""
        try:
            found = find(self.config.model.id, self.config.model.revision)
        except LookupError:
            return None
        with torch.device("meta"):
            return build(found).transformer

    @property
    def ratio(self) -> bool:
        """Whether a ratio of new and old policy is learnt from."""
        config = self.config
        return isinstance(config, GrpoStage) or (
            isinstance(config, OpdStage)
            and (config.student.gradient != "pathwise" or config.student.reward_weight > 0)
        )


def examine(config: TrainingStage) -> list[Finding]:
    """All findings of a stage, in the order of CHECKS."""
    plan = Plan(config)
    return [finding for check in CHECKS for finding in check(plan)]


# Numbers ---------------------------------------------------------------------------------------


def dtypes(plan: Plan) -> Iterator[Finding]:
    """float16, which overflows; float32 where there is a faster one."""
    stored = plan.config.model.dtype
    if stored == "float16":
        yield Finding(
            "note",
            "dtype: model.dtype float16 overflows where bfloat16 does not. Prefer bfloat16 on a "
            "GPU that has it.",
        )
    elif stored == "float32" and torch.cuda.is_available():
        yield Finding(
            "note",
            "dtype: all is float32; on a GPU model.dtype bfloat16 is some four times faster.",
        )


def attention(plan: Plan) -> Iterator[Finding]:
    """An attention backend that is not here."""
    name, transformer = plan.config.model.attention, plan.transformer
    if name is None or transformer is None:
        return
    if name.endswith("_hub"):
        yield Finding("note", f"attention: {name!r} is fetched from the Hub at the start.")
        return
    try:
        transformer.set_attention_backend(name)
    except (RuntimeError, ValueError, ImportError) as error:
        text = str(error).strip().splitlines()[0]
        yield Finding("fault", f"attention: model.attention {name!r}: {text} null takes SDPA.")
    else:
        yield Finding("ok", f"attention: {name!r} is available")


def guidance(plan: Plan) -> Iterator[Finding]:
    """One CFG scale in rollout, update and evaluation, or a reason for another."""
    config, own = plan.config, plan.config.guidance
    for place, scale in mixtures(config).items():
        taught = "is distilled into the student" if scale > own else "makes it unlearn its own"
        yield Finding(
            "fault" if scale < own and place != "anchor" else "note",
            f"guidance: {place} labels at {scale}, and the student is trained at {own}: a mixture, "
            f"which {taught}. Leave its guidance out for one scale.",
        )
    if own != config.rollout.guidance:
        yield Finding(
            "note",
            f"guidance: the student is trained at {own} on states that are sampled at "
            f"rollout.guidance = {config.rollout.guidance}, which are not its own.",
        )
    if config.evaluation is None:
        return
    evaluated = config.evaluation.guidance
    evaluated = config.rollout.guidance if evaluated is None else evaluated
    if evaluated != own:
        yield Finding(
            "fault",
            f"guidance: trained at {own}, evaluated at {evaluated}: the headline, and the adapter "
            f"that is kept, are those of another sampler. Set evaluation.guidance = {own}.",
        )


def steps(plan: Plan) -> Iterator[Finding]:
    """Evaluations on a coarser schedule than the rollouts'."""
    config = plan.config
    found = config.evaluation.steps if config.evaluation else None
    if found is not None and found < config.rollout.steps:
        yield Finding(
            "fault",
            f"schedule: evaluated with {found} steps, fewer than the {config.rollout.steps} of the "
            "rollouts: its images are worse than those that are trained on. Use as many or more.",
        )
    elif found is not None and found > 8 * config.rollout.steps:
        yield Finding(
            "note",
            f"schedule: evaluated with {found} steps, the rollouts have {config.rollout.steps}; "
            "what is learnt on so coarse a grid may not carry over.",
        )


def noise(plan: Plan) -> Iterator[Finding]:
    """Trained steps without noise, and a loss that is all in one step."""
    config, rollout = plan.config, plan.config.rollout
    if rollout.kind == "ode" or isinstance(config, SftStage):
        return
    try:
        found = find(config.model.id, config.model.revision)
        sigmas = _sigmas(config, found)
    except LookupError:
        return
    except ModelError as error:
        yield Finding("fault", f"schedule: {error}")
        return
    window = list(range(*rollout.trained))
    zero = torch.zeros(len(window), 1, 1, 1)
    gaussian = sde.transition(
        zero,
        zero,
        sigmas[window],
        sigmas[[step + 1 for step in window]],
        noise_level=rollout.noise_level,
        kind=rollout.kind,
        sigma_max=float(sigmas[1]),
    )
    std = gaussian.std.flatten()
    quiet = [step for step, s in zip(window, std.tolist(), strict=True) if s < 1e-3]
    if quiet:
        yield Finding(
            "fault",
            f"noise: steps {quiet} of the trained window have a standard deviation of "
            f"{float(std.min()):.2g}, so that log-probs and KL explode. "
            "Let rollout.window stop before them, or raise rollout.noise_level.",
        )
    if isinstance(config, OpdStage) and config.student.weighting in ("kl", "published"):
        weight = step_weights(
            sigmas,
            weighting=config.student.weighting,
            kind=rollout.kind,
            noise_level=rollout.noise_level,
        )[window]
        share, place = (weight / weight.sum()).max(0)
        if len(window) > 2 and share > 0.5:
            yield Finding(
                "note",
                f"weighting: {config.student.weighting!r} puts {float(share):.0%} of the loss on "
                f"step {window[int(place)]} of {len(window)}; 'velocity' weighs all alike.",
            )


def _sigmas(config: TrainingStage, found: Architecture) -> Tensor:
    """The schedule [T+1] of the rollouts."""
    side = 2 ** (len(found.vae["block_out_channels"]) - 1) * found.transformer["patch_size"]
    tokens = (config.model.height // side) * (config.model.width // side)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(found.scheduler))
    return scheduler_sigmas(scheduler, config.rollout.steps, tokens)


def clip(plan: Plan) -> Iterator[Finding]:
    """A clip range that cuts every ratio, or none."""
    if not plan.ratio:
        return
    config = plan.config
    ranges = {"grpo.clip_range": config.grpo.clip_range}  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(config, OpdStage):
        if config.student.reward_weight == 0:
            ranges.clear()
        if config.student.gradient != "pathwise":
            ranges["student.clip_range"] = config.student.clip_range
    for key, value in ranges.items():
        if value < 1e-6:
            yield Finding(
                "fault",
                f"clip: {key} = {value:g} is about float32's own rounding of a ratio (1e-7): "
                "everything is clipped. 1e-5 to 1e-3 is usual.",
            )
        elif value > 1e-2:
            yield Finding(
                "fault",
                f"clip: {key} = {value:g}: log-probs are means over pixels, and ratios stay "
                "within some 1e-4 of 1, so nothing is ever clipped. 1e-5 to 1e-3 is usual.",
            )


def average(plan: Plan) -> Iterator[Finding]:
    """A moving average that lags behind by half of the run."""
    config = plan.config
    if config.ema is None:
        return
    total = config.train.updates * config.optimizer.updates_per_rollout
    old = _first_half(config.ema, total)
    if old > 0.1:
        yield Finding(
            "fault" if old > 0.5 else "note",
            f"ema: {old:.0%} of the average that is evaluated and kept at the end stems from the "
            f"first half of the run (decay {config.ema.decay}, every {config.ema.every}, {total} "
            "optimizer steps). Lower ema.decay or ema.every, train longer, or write `ema: null`.",
        )


def _first_half(settings: EmaConfig, total: int) -> float:
    """The share of the start and the first half of a run of `total` optimizer steps in what it
    returns."""
    probe = [torch.ones(1)]
    ema = MovingAverage(probe, decay=settings.decay, every=settings.every)
    for step in range(settings.every, total + 1, settings.every)[-20_000:]:  # older ones are gone
        probe[0].fill_(float(step <= total // 2))
        ema.step(probe, step)
    probe[0].fill_(0.0)
    with ema.of(probe, total):
        return float(probe[0])


# Prompts ---------------------------------------------------------------------------------------


def held_out(plan: Plan) -> Iterator[Finding]:
    """Validation prompts that are trained on, by any task."""
    config = plan.config
    if config.evaluation is None:
        return
    trained = {p for task in config.tasks for p in load_prompts(task.prompts, task.name).prompts}
    for task in config.tasks:
        if task.validation is None:
            continue
        whole = load_prompts(task.validation, task.name)
        prompts = subset(whole, config.evaluation.prompts).prompts
        shared = [prompt for prompt in prompts if prompt in trained]
        if shared:
            yield Finding(
                "fault" if len(shared) > len(prompts) / 4 else "note",
                f"validation: {len(shared)} of {len(prompts)} prompts of {task.validation} "
                f"(task {task.name!r}) are trained on, such as {shared[0]!r}. Part the two.",
            )


def lengths(plan: Plan) -> Iterator[Finding]:
    """Prompts of which the text encoders see only the start."""
    limit = plan.config.model.max_sequence_length
    count, about = _counter(plan.config)
    for task in plan.config.tasks:
        prompts = load_prompts(task.prompts, task.name).prompts
        prompts = prompts[:: max(1, len(prompts) // SAMPLE)]
        long = [prompt for prompt in prompts if count(prompt) > limit]
        if long:
            share = len(long) / len(prompts)
            yield Finding(
                "fault" if share > 0.05 else "note",
                f"length: {about}{share:.0%} of the prompts of task {task.name!r} have more than "
                f"model.max_sequence_length = {limit} tokens and are cut, such as "
                f"{long[0][:60]!r}. Raise it (up to 512 for Stable Diffusion 3.5).",
            )


def _counter(config: TrainingStage) -> tuple[Callable[[str], int], str]:
    """Tokens of a prompt by the T5 tokenizer; where it is not here, some 4 tokens for 3 words."""
    folder = local_folder(config.model.id, config.model.revision)
    if folder is None or not (folder / "tokenizer_3").is_dir():
        return lambda prompt: len(prompt.split()) * 4 // 3 + 1, "about "
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer_3", local_files_only=True)
    return lambda prompt: len(tokenizer.encode(prompt)), ""


# Adapters --------------------------------------------------------------------------------------


def fitting(plan: Plan) -> Iterator[Finding]:
    """Adapters of another base, whatever their metadata say."""
    if plan.transformer is None:
        return
    layers = {
        name: module.weight.shape
        for name, module in plan.transformer.named_modules()
        if isinstance(module, nn.Linear)
    }
    for place, lora in plan.loras.items():
        for key, weight in lora.weights.items():
            layer, _, half = key.partition(".lora_")
            base = layers.get(layer)
            mine, theirs = _side(weight, half), None if base is None else _side_of(base, half)
            if base is None or mine != theirs:
                seen = "is not in the base" if base is None else (
                    f"is {mine} wide there, and {theirs} in the base"
                )  # fmt: skip
                yield Finding(
                    "fault",
                    f"{place}: an adapter of another base: its layer {layer} {seen} "
                    f"{plan.config.model.id!r}. Name an adapter that was trained on this base.",
                )
                break


def _side(weight: Tensor, half: str) -> int:
    """The width that must be the layer's own: A reads it, B writes it."""
    return weight.shape[1] if half.startswith("A") else weight.shape[0]


def _side_of(base: torch.Size, half: str) -> int:
    return base[1] if half.startswith("A") else base[0]


def working(plan: Plan) -> Iterator[Finding]:
    """Adapters that change nothing, or are not finite."""
    for place, lora in plan.loras.items():
        weights = lora.weights
        second = [w for key, w in weights.items() if ".lora_B" in key]
        if not all(bool(w.isfinite().all()) for w in weights.values()):
            yield Finding("fault", f"{place}: its weights are not finite. Train it anew.")
        elif second and not any(bool(w.any()) for w in second):
            yield Finding(
                "fault",
                f"{place}: equals the base: all its B are 0, as those of a LoRA that was never "
                "trained. Name the adapter of a finished run, or null for the base itself.",
            )


def apart(plan: Plan) -> Iterator[Finding]:
    """Teachers that are the student's start, or each other."""
    config = plan.config
    if not isinstance(config, OpdStage | SftStage):
        return
    origin = plan.loras.get("lora.init")
    taught = {place: lora for place, lora in plan.loras.items() if place.startswith("teachers.")}
    for place, lora in taught.items():
        if origin and _same(lora.weights, origin.weights):
            level = "fault" if len(config.teachers) == 1 else "note"
            text = f"{place}: it is the student's start (lora.init): its task has nothing to learn."
            yield Finding(level, text)
    for (one, a), (other, b) in itertools.combinations(taught.items(), 2):
        if _same(a.weights, b.weights):
            yield Finding("note", f"{one} and {other} have the same weights.")


def overruled(plan: Plan) -> Iterator[Finding]:
    """Keys of `lora` that were set, beside an adapter to start from that has others."""
    with suppress(AdapterError, OSError):  # an earlier stage will write it
        if found := start(plan.config.lora):
            yield from (Finding("note", f"{text}. Leave it out.") for text in found.ignored)


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def output(plan: Plan) -> Iterator[Finding]:
    """A folder that holds a run already."""
    folder = Path(plan.config.output)
    if any((folder / "checkpoints").glob("update_*")):
        yield Finding("note", f"output: {folder} holds a run; `train` wants --resume to go on.")


CHECKS: tuple[Callable[[Plan], Iterator[Finding]], ...] = (
    dtypes, attention, guidance, steps, noise, clip, average, held_out, lengths,
    fitting, working, apart, overruled, output,
)  # fmt: skip
