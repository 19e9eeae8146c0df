"""What a config needs of the world: prompt sets, rewards, adapters, processes, packages.

Everything here happens before a model is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from flowalign.data import PromptError, load_prompts
from flowalign.pictures import IMAGES, image_files
from flowalign.schema import (
    ADAPTER,
    Config,
    ConfigError,
    EvalConfig,
    Fidelity,
    MergeConfig,
    OpdConfig,
    RewardSpec,
    Root,
    SftConfig,
)
from flowalign.tiny import TEACHERS


def check_world(config: Root, num_processes: int, pending: Collection[str] = ()) -> None:
    """Refuse what cannot run here: shares of the processes, prompt sets, rewards, adapters.

    Called before any model is loaded; raises one ConfigError with every problem. pending: adapters
    that are not there yet, because an earlier stage of a recipe will write them.
    """
    import flowalign.rewards as rewards  # only here: importing a config needs no rewards

    problems = [*_package_problems(config), *_adapter_problems(config, pending)]
    if isinstance(config, Config):
        problems += _training_problems(config, num_processes)
    if isinstance(config, EvalConfig):
        problems += _reference_problems(config.fidelity)
    for place, name, reward, sources in _judged(config):
        known = reward is not None
        try:
            if reward is not None:
                rewards.check(reward.name, reward.options)
        except (ValueError, KeyError, TypeError, ImportError) as error:
            problems.append(f"{place}.reward: {_text(error)}")
            known = False
        for key, source in sources.items():
            try:
                batch = load_prompts(source, name)
                if known and reward is not None:
                    options = reward.options
                    rewards.check_prompts(reward.name, options, batch.prompts, batch.metadata)
            except (PromptError, OSError) as error:
                problems.append(f"{place}.{key}: {error}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{place}.{key}: {source}, {_text(error)}")
    if problems:
        raise ConfigError(problems)


def _judged(
    config: Root,
) -> Iterator[tuple[str, str, RewardSpec | None, dict[str, str]]]:
    """(place in the config, name, its reward, {key: prompt set}) of every task or benchmark."""
    if isinstance(config, EvalConfig):
        for index, mark in enumerate(config.benchmarks):
            yield f"benchmarks.{index}", mark.name, mark.reward, {"prompts": mark.prompts}
        return
    if not isinstance(config, Config):
        return
    for index, mark in enumerate(config.evaluation.watch if config.evaluation else ()):
        yield f"evaluation.watch.{index}", mark.name, mark.reward, {"prompts": mark.prompts}
    for index, task in enumerate(config.tasks):
        sources = {"prompts": task.prompts}
        if task.validation is not None:
            sources["validation"] = task.validation
        yield f"tasks.{index}", task.name, task.reward, sources


def _package_problems(config: Root) -> Iterator[str]:
    """What asks for a package or a device that is not here."""
    missing = not importlib.util.find_spec("bitsandbytes")
    install = "bitsandbytes, which is not installed. Run `pip install 'flowalign[gpu]'`"
    if config.model.quantization == "nf4" and (missing or not torch.cuda.is_available()):
        need = install if missing else "a GPU, and torch sees none. Run it on one"
        yield f"model.quantization: 'nf4' needs {need}, or use 'fp8', or null."
    if isinstance(config, Config) and config.optimizer.name == "adamw8bit" and missing:
        yield f"optimizer.name: 'adamw8bit' needs {install}, or use 'adamw'."


def _training_problems(config: Config, num_processes: int) -> Iterator[str]:
    updates, prompts = config.optimizer.updates_per_rollout, config.rollout.prompts
    share = num_processes * updates
    if prompts % share:
        yield (
            f"rollout.prompts: {prompts} prompts cannot be shared by {num_processes} processes x "
            f"optimizer.updates_per_rollout = {updates}; a group stays whole. "
            f"Use a multiple of {share}, for example {-(-prompts // share) * share}."
        )


def adapters(config: Root) -> dict[str, str]:
    """{place in the config: folder or Hub id} of every adapter that a stage reads."""
    found: dict[str, str | None] = {}
    if isinstance(config, Config):
        found["lora.init"] = config.lora.init
    if isinstance(config, OpdConfig | SftConfig):
        found |= {f"teachers.{name}": t.adapter for name, t in config.teachers.items()}
    if isinstance(config, OpdConfig) and config.anchor:
        found["anchor.adapter"] = config.anchor.adapter
    if isinstance(config, MergeConfig):
        found |= {f"adapters.{i}": source for i, source in enumerate(config.adapters)}
    if isinstance(config, EvalConfig):
        found |= {f"models.{name}": folder for name, folder in config.models.items()}
    return {place: folder for place, folder in found.items() if folder is not None}


def adapter_folder(source: str | Path) -> Path:
    """Where an adapter lies: a folder, or tiny/NAME for one that ships with the package. A Hub id
    comes back as it is."""
    shipped = TEACHERS / str(source).removeprefix("tiny/")
    return shipped if str(source).startswith("tiny/") else Path(source).expanduser()


def _adapter_problems(config: Root, pending: Collection[str] = ()) -> Iterator[str]:
    """Adapters that are not there, or that say of themselves that they are another base's.
    pending: those that an earlier stage of a recipe will write."""
    for place, source in adapters(config).items():
        folder = adapter_folder(source)
        if source in pending:
            continue
        if (folder / ADAPTER).is_file():
            try:
                base = adapter_base(folder)
            except SafetensorError as error:
                yield f"{place}: {folder / ADAPTER} is not a safetensors file ({error})."
                continue
            if base not in (None, config.model.id):
                yield (
                    f"{place}: {source!r} was trained on {base!r}, and model.id is "
                    f"{config.model.id!r}. Name an adapter of this base, or that base as model.id."
                )
            continue
        if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not folder.parent.exists():
            continue  # a Hub id: found out when it is loaded
        inner = folder / "adapter"
        hint = f"did you mean {Path(source) / 'adapter'}?" if (inner / ADAPTER).is_file() else (
            "training writes one to <output>/adapter; null is the base model."
        )  # fmt: skip
        seen = "the folder holds" if folder.is_dir() else "no such folder, so"
        yield f"{place}: {source!r}: {seen} no {ADAPTER}; {hint}"


def adapter_base(folder: Path) -> str | None:
    """The base that a saved adapter names as its own, read from the head of its file."""
    with safe_open(folder / ADAPTER, framework="numpy") as file:
        text = (file.metadata() or {}).get("lora_adapter_metadata", "{}")
    return json.loads(text).get("transformer.base_model_name_or_path")


def _reference_problems(fidelity: Fidelity | None) -> Iterator[str]:
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


def adapter_shapes(folder: Path) -> dict[str, list[int]]:
    """{layer: shape} of the A and B of a saved LoRA, from the head of its file; {} where there is
    none, as for an adapter on the Hub."""
    if not (folder / ADAPTER).is_file():
        return {}
    with safe_open(folder / ADAPTER, framework="numpy") as file:
        return {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
