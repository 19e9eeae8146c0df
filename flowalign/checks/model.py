"""Is what the model needs here, and does it have what the config asks for?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flowalign.backbone.attention import unavailable
from flowalign.backbone.structure import cut_prompts, known, mismatches
from flowalign.checks.launch import Launch, message
from flowalign.system import packages
from flowalign.training.inputs import Inputs
from flowalign.types import Problem

# torch's own attention obeys train.deterministic; the kernels of other packages do not know of it
REPEATABLE = (None, "native", "_native_math", "_native_flash", "_native_efficient")


def installation(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Packages and devices that the config needs and this machine lacks."""
    models = {"model": config.model, **config.bases}
    bits = [f"{key}.quantization" for key, m in models.items() if m.quantization == "nf4"]
    needed = dict.fromkeys(bits, "bitsandbytes")
    if config.trains and "wandb" in config.train.trackers:
        needed["train.trackers"] = "wandb"
    for key, package in needed.items():
        if not packages.installed(package):
            yield missing(key, package)
    if not (launch.elsewhere or torch.cuda.is_available()):
        for key in bits:
            yield Problem(key, "'nf4' needs a GPU, and torch sees none. Use 'fp8', or null.")
    kernels = config.model.attention
    if kernels and (reason := unavailable(kernels)):
        yield Problem("model.attention", f"{kernels!r}: {reason} Or use null: SDPA.")


def missing(key: str, package: str) -> Problem:
    return Problem(key, f"needs {package}, which is not installed. {packages.hint(package)}")


def settings(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Settings that the model does not have: sizes, lengths of prompts, guidance."""
    spec = known(config.model) if config.judged and config.samples else None
    if spec is None:
        return
    yield from spec.problems()
    if cut_prompts(spec.config, ["red"]):  # a template may take as many tokens of every prompt
        yield Problem(
            "model.max_sequence_length",
            f"{spec.length} tokens leave no room for a word. Leave it out, or raise it to "
            f"{spec.family.longest}.",
        )
    for key, scale in config.scales.items():
        spec = known(config.bases.get(key.removesuffix(".guidance"), config.model))
        if spec and spec.family.guidance == "none" and scale != 1:
            yield Problem(
                key,
                f"{scale:g}, and {spec.config.id} has no guidance (it was distilled without). Set "
                "it to 1.",
            )


def bases(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Teachers' bases that cannot label the student's states, and devices that are not there."""
    for key, model in config.bases.items():
        try:
            reasons = list(mismatches(config.model, model))
        except (LookupError, OSError, ValueError) as error:
            reasons = [message(error)]
        if reasons:
            yield Problem(
                f"{key}.base",
                f"{model.id!r} cannot label states of {config.model.id!r}: {'; '.join(reasons)}. "
                "Use a model with the same VAE, text encoders and scheduler.",
            )
        kind, _, index = (config.labellers[key].device or "cpu").partition(":")
        here = torch.accelerator.current_accelerator()
        there = torch.accelerator.device_count() if here and here.type == kind else 0
        if kind != "cpu" and int(index or 0) >= there:
            yield Problem(
                f"{key}.device",
                f"{kind!r} has {there} devices here. Use another, 'cpu' or null.",
            )


def training(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Attention that is not deterministic where it has to be; layers that are not the model's."""
    if not config.trains:
        return
    if config.train.deterministic and config.model.attention not in REPEATABLE:
        yield Problem(
            "model.attention",
            f"{config.model.attention!r} is not deterministic in its backward pass. Use null, or "
            "train.deterministic=false.",
        )
    fresh = config.lora.targets if config.lora.init is None else None
    if fresh and (spec := known(config.model)):
        for target in fresh:
            if not spec.adapted([target]):
                yield Problem(
                    "lora.targets",
                    f"no layer of {config.model.id} ends with {target!r}. By default (null) they "
                    f"are {', '.join(spec.family.targets)}.",
                )
