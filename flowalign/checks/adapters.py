"""Are the adapters here, of this base, changed by training, and used as they were trained?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowalign.backbone import adapters
from flowalign.backbone.adapters import AdapterError, HubError
from flowalign.backbone.lora import other_base
from flowalign.backbone.structure import known
from flowalign.checks.launch import Launch
from flowalign.config import ConfigError, Stage, load
from flowalign.system.folder import RunFolder
from flowalign.training.inputs import Inputs
from flowalign.types import Problem


def readable(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Adapters that are not there, cannot be read, hold NaN, or belong to another base: by what
    they say, or by their layers and sizes. Adapters on the Hub are downloaded."""
    for key, source in config.inputs.items():
        if source in launch.pending:
            continue
        try:
            lora = inputs.adapter(source)
        except (AdapterError, HubError) as error:
            yield Problem(key, str(error))
            continue
        place = key.removesuffix(".adapter")
        model = config.bases.get(place, config.model)
        name = f"{place}.base" if place in config.bases else "model.id"
        spec = known(model)
        if reason := other_base(lora, model.id, spec and spec.family.core):
            yield Problem(
                key,
                f"{source!r} is an adapter of another base: it {reason}, and {name} is "
                f"{model.id!r}. Name an adapter of this base, or that base as {name}.",
            )


def trained(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Adapters that change nothing. Reading refuses weights that are not finite."""
    for key, source in config.inputs.items():
        with suppress(AdapterError, OSError):  # an earlier stage will write it
            lora = inputs.adapter(source)
            if not any(bool(lora.weights[f"{layer}.lora_B.weight"].any()) for layer in lora.ranks):
                yield Problem(
                    key,
                    "equals the base: all B are 0, as in a LoRA that was never trained. Use the "
                    "adapter of a finished run, or null for the base itself.",
                    "fault",
                )


# As they were trained ----------------------------------------------------------------------------


def misused(config: Any, launch: Launch, inputs: Inputs) -> Iterator[Problem]:
    """Adapters that are used at a guidance scale more than a factor of two from that of their
    training, because guidance counts once (docs/log). An adapter is skipped if its training is not
    known from an earlier stage or from the folder of its run."""
    for key, source in config.inputs.items():
        used = config.guidance_at(key)
        if used is None:  # of a merge: as the first of its adapters
            parts = (s for i in config.inputs.values() for s in _scales(i, launch.pending))
            used = next(parts, 1.0)
        absorbs = key == "lora.init" and bool(config.labellers)  # what its start lacks
        for scale in _scales(source, launch.pending):
            if used > 2 * scale or 2 * used < scale and not absorbs:
                yield Problem(
                    key,
                    f"{source} was trained at guidance {scale:g}, and is used at {used:g}. Use it "
                    f"at {scale:g} (labels: up to {2 * scale:g}): CFG counts once.",
                    "fault",
                )
                break


def _scales(source: str, pending: Mapping[str, Stage | None]) -> list[float]:
    """The guidance scales at which an adapter was trained, or all that it was merged from; [] = not
    known. pending: as in a Launch."""
    if source.startswith("tiny/"):
        return [1.0]
    stage: Any = pending.get(str(Path(source)))
    if not stage and not adapters.is_hub_id(source):
        with suppress(ConfigError):
            run = RunFolder(adapters.adapter_folder(source).parent)
            stage = load(run.config, stage=Stage)
    if not stage:
        return []
    if not stage.trains:
        return [s for part in stage.inputs.values() for s in _scales(part, pending)]
    return [stage.guidance]
