"""What a config needs that lies outside of it: prompt sets, rewards, adapters, packages, processes.

Everything here happens before a model is loaded. What is opened here is handed on as `Inputs`, so
that no file is read twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flowalign.backbone.adapters import hub
from flowalign.backbone.adapters.files import AdapterError, Lora, read_lora
from flowalign.config import ConfigError, EvalStage, Stage, TrainingStage
from flowalign.config.learning import RewardConfig
from flowalign.config.model import LoraConfig
from flowalign.config.section import close_to
from flowalign.system import packages
from flowalign.training.data import PromptError, load_prompts
from flowalign.training.report.pictures import IMAGES, image_files
from flowalign.training.run import determinism
from flowalign.training.run import resume as resuming
from flowalign.types import PromptBatch


@dataclass(frozen=True)
class Inputs:
    """The files of a stage, each read when it is first asked for, and once."""

    adapters: dict[str, Lora] = field(default_factory=dict)  # by source: a folder or a Hub id
    prompt_sets: dict[tuple[str, str], PromptBatch] = field(default_factory=dict)

    def adapter(self, source: str) -> Lora:
        """The adapter of a source; the Hub's newest. Raises AdapterError and HubError."""
        if source not in self.adapters:
            self.adapters[source] = read_lora(source, newest=True)
        return self.adapters[source]

    def prompts(self, source: str, task: str) -> PromptBatch:
        """The prompts of a source, as those of a task. Raises PromptError and OSError."""
        if (source, task) not in self.prompt_sets:
            self.prompt_sets[source, task] = load_prompts(source, task)
        return self.prompt_sets[source, task]


def check_world(
    config: Stage,
    num_processes: int,
    pending: Collection[str] = (),
    resume: bool | None = None,
    any_world: bool = False,
) -> Inputs:
    """Refuse what `world_problems` finds, as one ConfigError; else what was opened for it. Called
    before any model is loaded."""
    inputs = Inputs()
    if problems := world_problems(config, num_processes, pending, resume, any_world, inputs=inputs):
        raise ConfigError(problems)
    return inputs


def world_problems(
    config: Stage,
    num_processes: int,
    pending: Collection[str] = (),
    resume: bool | None = None,
    any_world: bool = False,
    trust: bool = True,
    inputs: Inputs | None = None,
) -> list[str]:
    """What keeps a stage from starting here: missing packages, adapters, rewards and prompt sets,
    images that the processes cannot share, and a folder that holds another run.

    `train`, `eval` and `doctor` all ask this. pending: adapters that are not there yet, because an
    earlier stage of a recipe will write them. resume: whether the run is to continue what its
    folder holds; None = the folder is not looked at. any_world: also with another number of
    processes. trust: whether to run the code that the config names (`own_code`); without it, what
    needs that code is not checked. inputs: keeps what is opened.
    """
    inputs = Inputs() if inputs is None else inputs
    problems = [*_package_problems(config), *_adapter_problems(config, pending, inputs)]
    if config.judged:
        problems += _model_problems(config)
    problems += _scoring_problems(config, num_processes, trust, inputs)
    if isinstance(config, EvalStage):
        problems += _fidelity_problems(config, trust)
    if isinstance(config, TrainingStage):
        problems += _training_problems(config, num_processes)
        if resume is not None:
            problems += resuming.problems(
                config, num_processes, resume=resume, any_world=any_world, pending=pending
            )
    return problems


def own_code(config: Stage) -> dict[str, list[str]]:
    """{place in the config: the dotted paths there}: modules whose code runs where the stage is
    checked or run. Nothing is imported here."""
    import flowalign.rewards as rewards

    paths = {
        f"{judged.place}.{key}": rewards.own_code(reward.name, reward.options)
        for judged in config.judged
        for key, reward in judged.rewards.items()
    }
    if isinstance(config, EvalStage) and config.fidelity and ":" in config.fidelity.features:
        paths["fidelity.features"] = [config.fidelity.features]
    return {place: listed for place, listed in paths.items() if listed}


def unexamined(stages: Mapping[str, Stage]) -> list[str]:
    """What is said of `own_code` that is not run, one text each."""
    return [
        f"not examined: {place} of {name} names {', '.join(listed)}, which runs code. Read that "
        "code, then say --trust."
        for name, stage in stages.items()
        for place, listed in own_code(stage).items()
    ]


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


def _scoring_problems(
    config: Stage, num_processes: int, trust: bool, inputs: Inputs
) -> Iterator[str]:
    """Rewards that cannot be built, or cannot judge the prompts; prompt sets that are not there."""
    import flowalign.rewards as rewards  # only here: importing a config needs no rewards

    whole: list[str] = []  # tasks whose reward compares all images of a prompt
    single: list[str] = []  # tasks whose reward is no sum of parts, where that matters
    by_part = config.credited is not None and config.credited.advantage == "gdpo"
    for judged in config.judged:
        place, name, sound = judged.place, judged.name, list[RewardConfig]()
        for key, reward in judged.rewards.items():
            if not trust and rewards.own_code(reward.name, reward.options):
                continue
            try:
                rewards.check(reward.name, reward.options)
                missing = rewards.missing_packages(reward.name, reward.options)
            except (ValueError, KeyError, TypeError, ImportError) as error:
                yield f"{place}.{key}: {_text(error)}"
                continue
            for package in missing:
                yield (
                    f"{place}.{key}: reward {reward.name!r} needs {package}, which is not "
                    f"installed. {packages.hint(package)}"
                )
            sound.append(reward)
            if place.startswith("tasks.") and rewards.is_groupwise(reward.name, reward.options):
                whole.append(name)
            if place.startswith("tasks.") and by_part and rewards.has_no_weights(reward.name):
                single.append(name)
        for key, source in judged.prompts.items():
            try:
                batch = inputs.prompts(source, name)
                for reward in sound:
                    options = reward.options
                    rewards.check_prompts(reward.name, options, batch.prompts, batch.metadata)
            except (PromptError, OSError) as error:
                yield f"{place}.{key}: {error}"
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                yield f"{place}.{key}: {source}, {_text(error)}"
    if isinstance(config, TrainingStage):
        yield from group_problems(config, whole, num_processes)
        yield from parts_problems(config, single)


def parts_problems(config: TrainingStage, tasks: Collection[str]) -> Iterator[str]:
    """Rewards without parts, where the advantage normalises parts. tasks: those whose reward has no
    `weights`."""
    if config.credited is None or config.credited.advantage != "gdpo":
        return
    for index, task in enumerate(config.tasks):
        if task.reward and task.name in tasks:
            yield (
                f"tasks.{index}.reward: the advantage 'gdpo' normalises the parts of a reward one "
                f"by one, and {task.reward.name!r} is no weighted sum of parts. Use the reward "
                "'weighted', or the advantage 'group_std'."
            )


def group_problems(config: TrainingStage, tasks: Sequence[str], processes: int) -> Iterator[str]:
    """Processes that would share a prompt's images. tasks: those whose reward must see whole
    groups."""
    rollout, updates = config.rollout, config.optimizer.updates_per_rollout
    if tasks and rollout.prompts // updates % processes:
        unit = updates * processes
        yield (
            f"rollout.prompts: the reward of task {min(tasks)!r} compares all images of a prompt, "
            f"and {rollout.prompts} prompts over optimizer.updates_per_rollout = {updates} cannot "
            f"be shared whole by {processes} processes. Use a multiple of {unit}, for example "
            f"rollout.prompts={-(-rollout.prompts // unit) * unit}."  # the next larger multiple
        )


def _package_problems(config: Stage) -> Iterator[str]:
    """What asks for a package or a device that is not here."""
    missing = not packages.installed("bitsandbytes")
    command = packages.install_command("bitsandbytes")
    install = f"bitsandbytes, which is not installed. Run `{command}`"
    if config.model.quantization == "nf4" and (missing or not torch.cuda.is_available()):
        need = install if missing else "a GPU, and torch sees none. Run it on one"
        yield f"model.quantization: 'nf4' needs {need}, or use 'fp8', or null."
    if config.model.attention:
        from flowalign.backbone.attention import unavailable  # imports diffusers

        if reason := unavailable(config.model.attention):
            yield f"model.attention: {config.model.attention!r}: {reason} Or use null: SDPA."


def _training_problems(config: TrainingStage, num_processes: int) -> Iterator[str]:
    """Packages that only training needs, settings against determinism, and images of an optimizer
    step that the processes cannot share evenly."""
    if config.optimizer.name == "adamw8bit" and not packages.installed("bitsandbytes"):
        yield (
            "optimizer.name: 'adamw8bit' needs bitsandbytes, which is not installed. Run "
            f"`{packages.install_command('bitsandbytes')}`, or use 'adamw'."
        )
    if "wandb" in config.train.trackers and not packages.installed("wandb"):
        yield (
            "train.trackers: 'wandb' needs wandb, which is not installed. "
            f"{packages.hint('wandb')} Or leave it out."
        )
    yield from determinism.problems(config)
    updates, rollout = config.optimizer.updates_per_rollout, config.rollout
    images = rollout.prompts // updates * rollout.copies
    if images % num_processes:
        unit = num_processes // math.gcd(rollout.copies, num_processes) * updates
        yield (
            f"rollout.prompts: {rollout.prompts} prompts x rollout.copies = {rollout.copies} over "
            f"optimizer.updates_per_rollout = {updates} are {images} images an optimizer step, "
            f"which {num_processes} processes cannot share evenly. Use a multiple of {unit}, for "
            f"example rollout.prompts={-(-rollout.prompts // unit) * unit}."
        )


def _adapter_problems(config: Stage, pending: Collection[str], inputs: Inputs) -> Iterator[str]:
    """Adapters that are not there, cannot be read, hold NaN, or say that they belong to another
    base. Those on the Hub are downloaded."""
    for place, source in config.inputs.items():
        if source in pending:
            continue
        try:
            lora = inputs.adapter(source)
        except (AdapterError, hub.HubError) as error:
            yield f"{place}: {error}"
        else:
            if lora.base not in (None, config.model.id):
                yield (
                    f"{place}: {source!r} was trained on {lora.base!r}, and model.id is "
                    f"{config.model.id!r}. Name an adapter of this base, or that base as model.id."
                )


def _model_problems(config: Stage) -> Iterator[str]:
    """Settings that the model does not have, where its shapes are known here: sizes, lengths of
    prompts, guidance, layers."""
    from flowalign.backbone import ModelError
    from flowalign.backbone.structure import family_without_text

    model = config.model
    try:
        family = family_without_text(model.id, model.revision, model.family)
    except (LookupError, ModelError, OSError, ValueError):  # said where the model is loaded
        return
    for size in model.image_sizes:
        yield from family.size_problems(*size)
    if model.max_sequence_length > family.longest:
        yield (
            f"model.max_sequence_length: {model.max_sequence_length}; this model takes "
            f"{family.longest} tokens at most. Use fewer."
        )
    if family.guidance == "none":
        for place, scale in config.scales.items():
            if scale != 1:
                yield (
                    f"{place}: {scale:g}, and {model.id} has no guidance (it was distilled "
                    "without). Set it to 1."
                )
    if isinstance(config, TrainingStage) and config.lora.targets and not config.lora.init:
        modules = family.core.named_modules()
        layers = [f".{name}" for name, module in modules if isinstance(module, torch.nn.Linear)]
        for target in config.lora.targets:
            if not any(layer.endswith(f".{target}") for layer in layers):
                ends = {layer.rpartition(".")[2] for layer in layers} | set(family.targets)
                close = close_to(target, ends)
                hint = f" Did you mean {close!r}?" if close else ""
                yield (
                    f"lora.targets: no layer of {model.id} ends with {target!r}.{hint} By default "
                    f"(null) they are {', '.join(family.targets)}."
                )


def _fidelity_problems(config: EvalStage, trust: bool) -> Iterator[str]:
    """Features that cannot be imported; a folder of reference images that holds none."""
    import flowalign.rewards as rewards

    if trust and config.fidelity and ":" in config.fidelity.features:
        try:
            rewards.load(config.fidelity.features, "features")
        except (ValueError, ImportError) as error:
            yield f"fidelity.features: {_text(error)}"
    source = config.fidelity.reference if config.fidelity else "tiny"
    folder = Path(source).expanduser()
    if source != "tiny" and not image_files(folder):
        seen = f"the folder holds no {', '.join(IMAGES)}" if folder.is_dir() else "no such folder"
        yield (
            f"fidelity.reference: {source!r}: {seen}. Name a folder of images, or 'tiny' for "
            "scenes drawn from the benchmarks' own metadata."
        )


def _text(error: Exception) -> str:
    """Its message; str() of a KeyError would put it in quotes."""
    return str(error.args[0] if error.args else error)


@dataclass(frozen=True)
class Start:
    """How a student starts from an adapter. ignored: one text for each key of `lora` that was set
    and has no effect, since that adapter decides it."""

    text: str
    ignored: list[str]


def start(lora: LoraConfig, inputs: Inputs) -> Start | None:
    """Of `lora.init`; None for a fresh adapter."""
    if lora.init is None:
        return None
    adapter = inputs.adapter(lora.init)
    ranks, ignored = adapter.ranks, []
    for key, has in (("rank", ranks), ("alpha", adapter.alphas)):
        wanted = getattr(lora, key)
        if key in lora.model_fields_set and set(has.values()) != {wanted}:
            ignored.append(f"lora.{key}: {wanted:g} is ignored, lora.init has {span(has)}")
    ends = {  # as peft matches a layer's name: the whole, or its end after a dot
        target: {layer for layer in ranks if f".{layer}".endswith(f".{target}")}
        for target in lora.targets or ()
    }
    unused = [target for target, layers in ends.items() if not layers]
    others = len(ranks.keys() - set().union(*ends.values()))
    if lora.targets and (unused or others):
        seen = [f"{others} layers that they do not name"] if others else []
        seen += [f"none for {', '.join(unused)}"] if unused else []
        ignored.append(f"lora.targets: ignored, lora.init has {' and '.join(seen)}")
    text = (
        f"lora.init: the student starts from {lora.init}, rank {span(ranks)}, scale "
        f"{span(adapter.scales)} (alpha / r), {len(ranks)} layers"
    )
    return Start(text, ignored)


def span(values: Mapping[str, float]) -> str:
    """The value of all layers, or the range."""
    low, high = min(values.values()), max(values.values())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
