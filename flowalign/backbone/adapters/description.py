"""peft's description of a LoRA (LoraConfig as JSON): checked, then asked for ranks and alphas.

It may come from a stranger. So its types are checked, its length has a limit, and its patterns,
which are regular expressions, are matched with a limit of time: some need years for a name of
twenty letters.
"""

from __future__ import annotations

import json
import re
import reprlib
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import regex
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowalign.system.escape import shown

DEFAULT = 8  # of r and lora_alpha in peft's LoraConfig
LONGEST = 1 << 22  # characters of a description; three patterns for each of 300 layers are 1 << 17
LONGEST_PATTERN = 1000  # characters
SECONDS = 1.0  # of the processor, for all patterns; 300 for 300 layers need 0.1

# Entries of peft's LoraConfig that do not change a trained update: which layers were adapted (the
# weights name them), how it was trained, sizes that only matter with a switch that is checked.
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
SCALING = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
# Other initializations (pissa, olora, corda, loftq ...) change the base's weights, too.
INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")

Rank = Annotated[int, Field(ge=1, le=1 << 20)]
Alpha = Annotated[int | float, Field(gt=0, le=1e100)]  # NaN is neither


class AdapterError(ValueError):
    """A folder that holds no adapter that can be read: what was seen, what is possible."""


class _Types(BaseModel):
    """The types of the entries that are read."""

    model_config = ConfigDict(strict=True)

    r: Rank = DEFAULT
    lora_alpha: Alpha = DEFAULT
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    use_rslora: bool | None = None
    target_modules: list[str] | str | None = None
    base_model_name_or_path: str | None = None


def parse(text: str, where: object) -> dict[str, Any]:
    """The mapping that a JSON text holds; AdapterError for any other text."""
    if len(text) > LONGEST:
        raise AdapterError(
            f"the description of {where} has {len(text)} characters; at most {LONGEST} are read"
        )
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"the description of {where} is not JSON ({error})") from error
    if not isinstance(description, dict):
        kind = type(description).__name__
        raise AdapterError(f"the description of {where} is {kind}, not a mapping")
    return description


def check(config: Mapping[str, Any], where: object) -> None:
    """AdapterError for an entry of a wrong type, or one that would change the update and is not
    read here."""
    try:
        _Types.model_validate(dict(config))
    except (ValidationError, OverflowError) as error:  # OverflowError: of whole numbers over 1e308
        first = error.errors()[0] if isinstance(error, ValidationError) else {}
        place = ".".join(map(str, first.get("loc", ())))
        seen = f"{shown(place)} = {reprlib.repr(first.get('input'))}" if place else "a number"
        raise AdapterError(
            f"the description of {where} has {seen}: {first.get('msg', error)}. It is damaged, or "
            "was edited; download the adapter again."
        ) from None
    plain = WITHOUT_EFFECT | SCALING | {"bias", "init_lora_weights"}
    others = [name for name, value in config.items() if name not in plain and value]
    if str(config.get("peft_type") or "LORA").rsplit(".")[-1].upper() != "LORA":
        others.append("peft_type")
    if config.get("bias", "none") != "none":
        others.append("bias")
    if config.get("init_lora_weights") not in INITIALIZATIONS:
        others.append("init_lora_weights")
    if others:
        seen = [f"{shown(name, 80)} = {reprlib.repr(config[name])}" for name in others[:8]]
        raise AdapterError(
            f"{where} is no plain LoRA: its description has {', '.join(seen)}. What that does is "
            "not read here; train without it, or let peft convert the adapter to a plain LoRA."
        )
    base = config.get("base_model_name_or_path")
    if base and not (base.isprintable() and len(base) <= LONGEST_PATTERN):
        raise AdapterError(f"the description of {where} names the base {shown(repr(base))}")


def scaling(
    config: Mapping[str, Any], layers: Collection[str], where: object
) -> tuple[dict[str, int], dict[str, float]]:
    """({layer: rank}, {layer: alpha}) of a checked description, as peft resolves its patterns.

    Raises AdapterError for a pattern that is no regular expression or takes too long.
    """
    end = time.thread_time() + SECONDS
    found: list[dict[str, Any]] = []
    for usual, name in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        special = config.get(name) or {}
        patterns = _compiled(list(special), f"{name} of {where}")
        values = {}
        for layer in layers:
            first = _first(patterns, layer, end, f"{name} of {where}")
            values[layer] = special.get(first, config.get(usual, DEFAULT))
        found.append(values)
    return found[0], found[1]


def _compiled(patterns: Sequence[str], where: str) -> dict[str, regex.Pattern[str]]:
    """{pattern: it as peft matches it, at the end of a name, after the start or a dot}."""
    compiled = {}
    for pattern in patterns:
        try:
            if len(pattern) > LONGEST_PATTERN:
                raise ValueError(f"has {len(pattern)} characters; at most {LONGEST_PATTERN}")
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of what `re` will read differently one day
                re.compile(pattern)  # peft's own: `regex` has recursion and more besides
            if re.search(r"\{(?!\d*,?\d*\})", pattern):
                raise ValueError("has a brace that repeats nothing, which `regex` reads otherwise")
            compiled[pattern] = regex.compile(rf"(.*\.)?({pattern})$")
        except (re.error, regex.error, ValueError, OverflowError, RecursionError, Warning) as error:
            raise AdapterError(
                f"the {where} has the pattern {shown(pattern)!r}, which is no name of a layer "
                f"nor a regular expression for one ({error})"
            ) from None
    return compiled


def _first(
    patterns: Mapping[str, regex.Pattern[str]], layer: str, end: float, where: str
) -> str | None:
    """The first pattern that matches a layer."""
    for pattern, compiled in patterns.items():
        try:
            left = end - time.thread_time()
            if left > 0 and not compiled.match(layer, timeout=left):
                continue
            if left > 0:
                return pattern
        except (TimeoutError, MemoryError):
            pass
        raise AdapterError(
            f"the {where} cannot be resolved: the pattern {shown(pattern)!r} takes longer than "
            f"{SECONDS:g} s for {shown(layer)}. Name the layers instead."
        )
    return None
