"""peft's description of a LoRA (LoraConfig as JSON): checked, then asked for ranks and alphas.

It may come from a stranger. So its types are checked, its length has a limit, and a pattern (a
regular expression) is refused if Python could need years to match it.
"""

from __future__ import annotations

import json
import re
import reprlib
import warnings
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flowalign.system.escape import shown

DEFAULT = 8  # of r and lora_alpha in peft's LoraConfig
LONGEST = 1 << 22  # characters of a description; three patterns for each of 300 layers are 1 << 17
LONGEST_PATTERN = 500  # characters
MOST_REPEATS, MOST_GROUPS = 3, 3  # in a pattern: the time grows with each as a power

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


PREFIXES = ("base_model.model.", "transformer.")  # of names: peft's, then diffusers'


class AdapterError(ValueError):
    """A folder that holds no adapter that can be read: what was seen, what is possible."""


def inner_name(key: str) -> str:
    """The name of a weight, or of an entry, inside the transformer."""
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    return key


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


def parse_description(text: str, where: object) -> dict[str, Any]:
    """The mapping that a JSON text holds; AdapterError for any other text, and for an entry of a
    wrong type or one that would change the update and is not read here."""
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
    description = {inner_name(key): value for key, value in description.items()}
    _check_types(description, where)
    _check_plain(description, where)
    return description


def _check_types(config: Mapping[str, Any], where: object) -> None:
    try:
        _Types.model_validate(dict(config))
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in config.get(name) or ():
                _check_pattern(pattern, f"{name} of {where}")
    except (ValidationError, OverflowError) as error:  # OverflowError: of whole numbers over 1e308
        first = error.errors()[0] if isinstance(error, ValidationError) else {}
        key = ".".join(map(str, first.get("loc", ())))
        seen = f"{shown(key)} = {reprlib.repr(first.get('input'))}" if key else "a number"
        raise AdapterError(
            f"the description of {where} has {seen}: {first.get('msg', error)}. It is damaged, or "
            "was edited; download the adapter again."
        ) from None
    base = config.get("base_model_name_or_path")
    if base and not (base.isprintable() and len(base) <= LONGEST_PATTERN):
        raise AdapterError(f"the description of {where} names the base {shown(repr(base))}")


def _check_pattern(pattern: str, where: str) -> None:
    """Refuse a pattern that is no regular expression, or one that could take years: with a repeated
    group, or many repeats or groups."""
    repeats = len(re.findall(r"[*+?{]", pattern.replace("(?:", "(")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of what `re` will read differently one day
            re.compile(rf"(.*\.)?({pattern})$")  # as peft does
        if len(pattern) > LONGEST_PATTERN or re.search(r"\)[*+?{]", pattern):
            raise ValueError("it repeats a group, or is long")
        if repeats > MOST_REPEATS or pattern.count("(") > MOST_GROUPS:
            raise ValueError(f"{repeats} repeats, {pattern.count('(')} groups")
    except (re.error, ValueError, OverflowError, RecursionError, Warning) as error:
        raise AdapterError(
            f"the {where} has the pattern {shown(pattern)!r}, which is no name of a layer nor a "
            f"simple regular expression for one ({error}). Name the layers instead."
        ) from None


def _check_plain(config: Mapping[str, Any], where: object) -> None:
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


def scaling(
    config: Mapping[str, Any], layers: Collection[str]
) -> tuple[dict[str, int], dict[str, float]]:
    """({layer: rank}, {layer: alpha}) of a description, as peft resolves its patterns."""

    def resolve(usual: str, name: str) -> dict[str, Any]:
        special = config.get(name) or {}
        values = {}
        for layer in layers:
            matches = (p for p in special if re.match(rf"(.*\.)?({p})$", layer))
            values[layer] = special.get(next(matches, None), config.get(usual, DEFAULT))
        return values

    return resolve("r", "rank_pattern"), resolve("lora_alpha", "alpha_pattern")
