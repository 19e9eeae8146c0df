"""What a config needs of the world: prompt sets, rewards, adapters, processes, packages.

Everything here happens before a model is loaded.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from flowalign import determinism
from flowalign.adapters import hub
from flowalign.adapters.files import AdapterError, adapter_folder, read_lora
from flowalign.config.schema import (
    ADAPTER,
    BenchmarkConfig,
    ConfigError,
    EvalStage,
    FidelityConfig,
    LoraConfig,
    RewardConfig,
    Stage,
    TrainingStage,
)
from flowalign.data import PromptError, load_prompts
from flowalign.pictures import IMAGES, image_files


def check_world(config: Stage, num_processes: int, pending: Collection[str] = ()) -> None:
    """Refuse what cannot run here: shares of the processes, prompt sets, rewards, adapters.

    Called before any model is loaded; raises one ConfigError with every problem. pending: adapters
    that are not there yet, because an earlier stage of a recipe will write them.
    """
    import flowalign.rewards as rewards  # only here: importing a config needs no rewards

    problems = [*_package_problems(config), *_adapter_problems(config, pending)]
    if isinstance(config, TrainingStage):
        problems += [*_training_problems(config, num_processes), *determinism.problems(config)]
    if isinstance(config, EvalStage):
        problems += _reference_problems(config.fidelity)
    for place, name, judges, sources in _judged(config):
        known: list[RewardConfig] = []
        for where, reward in judges.items():
            try:
                rewards.check(reward.name, reward.options)
                known.append(reward)
            except (ValueError, KeyError, TypeError, ImportError) as error:
                problems.append(f"{where}: {_text(error)}")
        for key, source in sources.items():
            try:
                batch = load_prompts(source, name)
                for reward in known:
                    options = reward.options
                    rewards.check_prompts(reward.name, options, batch.prompts, batch.metadata)
            except (PromptError, OSError) as error:
                problems.append(f"{place}.{key}: {error}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{place}.{key}: {source}, {_text(error)}")
    if problems:
        raise ConfigError(problems)


def check_launch(num_processes: int) -> None:
    """ConfigError where a launcher started several processes that do not know of each other: each
    would do the whole work, in one folder."""
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if num_processes == 1 and started > 1:
        raise ConfigError(
            [
                f"{started} processes were started, and this one sees no other. Without GPUs, say "
                "`accelerate launch --config_file configs/accelerate/ddp_2cpu.yaml ...`, or start "
                "one process."
            ],
            "launcher",
        )


Judged = tuple[str, str, dict[str, RewardConfig], dict[str, str]]
"""(place in the config, name, {place: reward}, {key: prompt set}) of a task or benchmark."""


def _judged(config: Stage) -> Iterator[Judged]:
    """What is scored by rewards."""
    if isinstance(config, EvalStage):
        for index, mark in enumerate(config.benchmarks):
            yield _judges(f"benchmarks.{index}", mark)
        return
    if not isinstance(config, TrainingStage):
        return
    for index, mark in enumerate(config.evaluation.watch if config.evaluation else ()):
        yield _judges(f"evaluation.watch.{index}", mark)
    for index, task in enumerate(config.tasks):
        sources = {"prompts": task.prompts}
        if task.validation is not None:
            sources["validation"] = task.validation
        reward = {f"tasks.{index}.reward": task.reward} if task.reward else {}
        yield f"tasks.{index}", task.name, reward, sources


def _judges(place: str, mark: BenchmarkConfig) -> Judged:
    rewards = {f"{place}.reward": mark.reward} if mark.reward else {}
    rewards |= {f"{place}.rewards.{judge}": spec for judge, spec in mark.rewards.items()}
    return place, mark.name, rewards, {"prompts": mark.prompts}


def _package_problems(config: Stage) -> Iterator[str]:
    """What asks for a package or a device that is not here."""
    missing = not importlib.util.find_spec("bitsandbytes")
    install = "bitsandbytes, which is not installed. Run `pip install 'flowalign[gpu]'`"
    if config.model.quantization == "nf4" and (missing or not torch.cuda.is_available()):
        need = install if missing else "a GPU, and torch sees none. Run it on one"
        yield f"model.quantization: 'nf4' needs {need}, or use 'fp8', or null."
    if isinstance(config, TrainingStage) and config.optimizer.name == "adamw8bit" and missing:
        yield f"optimizer.name: 'adamw8bit' needs {install}, or use 'adamw'."


def _training_problems(config: TrainingStage, num_processes: int) -> Iterator[str]:
    updates, rollout = config.optimizer.updates_per_rollout, config.rollout
    images = rollout.prompts // updates * rollout.copies  # of one optimizer step
    if images % num_processes:
        unit = num_processes // math.gcd(rollout.copies, num_processes) * updates
        yield (
            f"rollout.prompts: {rollout.prompts} prompts x rollout.copies = {rollout.copies} over "
            f"optimizer.updates_per_rollout = {updates} are {images} images an optimizer step, "
            f"which {num_processes} processes cannot share evenly. Use a multiple of {unit}, for "
            f"example rollout.prompts={-(-rollout.prompts // unit) * unit}."
        )


def adapters(config: Stage) -> dict[str, str]:
    """config.inputs, which replaces this."""
    return config.inputs


def _adapter_problems(config: Stage, pending: Collection[str] = ()) -> Iterator[str]:
    """Adapters that are not there, cannot be read, or say of themselves that they are another
    base's. Those on the Hub are downloaded. pending: those that an earlier stage of a recipe will
    write."""
    for place, source in adapters(config).items():
        if source in pending:
            continue
        try:
            base = read_lora(source, newest=True).base
        except hub.HubError as error:
            yield f"{place}: {error}"
            continue
        except AdapterError as error:
            yield f"{place}: {_missing(source, error)}"
            continue
        if base not in (None, config.model.id):
            yield (
                f"{place}: {source!r} was trained on {base!r}, and model.id is "
                f"{config.model.id!r}. Name an adapter of this base, or that base as model.id."
            )


@dataclass(frozen=True)
class Start:
    """What a student that starts from an adapter has, and the keys of `lora` that were set and are
    ignored, since that adapter decides them: one text each."""

    text: str
    ignored: list[str]


def start(lora: LoraConfig) -> Start | None:
    """Of `lora.init`; None for a fresh adapter."""
    if lora.init is None:
        return None
    adapter = read_lora(lora.init)
    ranks, ignored = adapter.ranks, []
    for key, has in (("rank", ranks), ("alpha", adapter.alphas)):
        wanted = getattr(lora, key)
        if key in lora.model_fields_set and set(has.values()) != {wanted}:
            ignored.append(f"lora.{key}: {wanted:g} is ignored, lora.init has {_span(has)}")
    ends = {target: [layer for layer in ranks if _ends(layer, target)] for target in lora.targets}
    lost = [target for target, layers in ends.items() if not layers]
    more = len(ranks.keys() - {layer for layers in ends.values() for layer in layers})
    if "targets" in lora.model_fields_set and (lost or more):
        seen = [f"{more} layers that they do not name"] if more else []
        seen += [f"none for {', '.join(lost)}"] if lost else []
        ignored.append(f"lora.targets: ignored, lora.init has {' and '.join(seen)}")
    text = (
        f"lora.init: the student starts from {lora.init}, rank {_span(ranks)}, scale "
        f"{_span(adapter.scales)} (alpha / r), {len(ranks)} layers"
    )
    return Start(text, ignored)


def _span(values: Mapping[str, float]) -> str:
    """The value of all layers, or the range."""
    low, high = min(values.values()), max(values.values())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _ends(layer: str, target: str) -> bool:
    """Whether peft adapts a layer for a target."""
    return layer == target or layer.endswith(f".{target}")


def _missing(source: str, error: AdapterError) -> str:
    """What is wrong with a folder, and what it might have been."""
    folder = adapter_folder(source)
    if (folder / "adapter" / ADAPTER).is_file():
        return f"{source!r}: {error}; did you mean {Path(source) / 'adapter'}?"
    if folder.exists() or hub.is_id(source):
        return f"{source!r}: {error}"
    return (
        f"{source!r}: no such folder, so no {ADAPTER}; training writes one to <output>/adapter; "
        "null is the base model."
    )


def _reference_problems(fidelity: FidelityConfig | None) -> Iterator[str]:
    if fidelity is None or fidelity.reference == "tiny":
        return
    folder = Path(fidelity.reference).expanduser()
    if image_files(folder):
        return
    seen = f"the folder holds no {', '.join(IMAGES)}" if folder.is_dir() else "no such folder"
    yield (
        f"fidelity.reference: {fidelity.reference!r}: {seen}. Name a folder of images, or 'tiny' "
        "for scenes drawn from the benchmarks' own metadata."
    )


def _text(error: Exception) -> str:
    return str(error.args[0] if error.args else error)
