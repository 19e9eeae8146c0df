"""What a config needs that lies outside of it: prompt sets, rewards, adapters, packages, processes.

Everything here happens before a model is loaded: each of CHECKS is asked. What they open is handed
on as `Inputs`, so that no file is read twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flowalign import rewards
from flowalign.backbone import adapters
from flowalign.backbone.adapters import AdapterError, HubError, Lora, read_lora
from flowalign.backbone.attention import unavailable
from flowalign.backbone.lora import other_base
from flowalign.backbone.structure import cut_prompts, known, mismatches, read_family
from flowalign.backbone.tiny.scenes import rendered
from flowalign.config import ConfigError, Judged, ModelConfig, Stage, TrainingStage, load
from flowalign.config.learning import ADVANTAGES, RewardConfig
from flowalign.config.loading import card_of
from flowalign.rewards import RewardSpec
from flowalign.system import packages
from flowalign.system.folder import RunFolder
from flowalign.system.images import IMAGES, image_files
from flowalign.training.algorithm import advantage_function, algorithm_class
from flowalign.training.data import PromptError, load_prompts
from flowalign.training.run import lock
from flowalign.training.run import resume as resuming
from flowalign.types import PromptBatch

BAD_ROWS = 5  # of a prompt set that are named, at most
FEW = 8  # steps, at most, of a model that was distilled to few
# torch's own attention obeys train.deterministic; the kernels of other packages do not know of it
REPEATABLE = (None, "native", "_native_math", "_native_flash", "_native_efficient")


@dataclass(frozen=True)
class Inputs:
    """The files of a stage, each read when it is first asked for, and once."""

    model: ModelConfig | None = None  # whose adapters they are
    adapters: dict[str, Lora] = field(default_factory=dict)  # by source: a folder or a Hub id
    prompt_sets: dict[tuple[str, str], PromptBatch] = field(default_factory=dict)

    def adapter(self, source: str) -> Lora:
        """The adapter of a source; the Hub's newest. Raises AdapterError and HubError."""
        if source not in self.adapters:
            family = partial(read_family, self.model) if self.model else None
            self.adapters[source] = read_lora(source, newest=True, family=family)
        return self.adapters[source]

    def prompts(self, source: str, task: str) -> PromptBatch:
        """The prompts of a source, for a task. Raises PromptError and OSError."""
        if (source, task) not in self.prompt_sets:
            self.prompt_sets[source, task] = load_prompts(source, task)
        return self.prompt_sets[source, task]


@dataclass(frozen=True)
class Launch:
    """How a run is started.

    processes: how many; any_world: its checkpoints may be of another number. resume: whether it is
    to continue what its folder holds; None = the folder is not looked at. trust: whether to run the
    code that the config names (`own_code`); without it, what needs that code is not checked.
    elsewhere: it is planned for another machine, so no GPU is looked for. pending: adapters that
    are not there yet, because an earlier stage of a recipe will write them.
    """

    processes: int = 1
    resume: bool | None = None
    any_world: bool = False
    trust: bool = True
    elsewhere: bool = False
    pending: Collection[str] = ()


def check_world(config: Stage, launch: Launch) -> Inputs:
    """Refuse what `world_problems` finds, as one ConfigError; else what was opened for it. Called
    before any model is loaded."""
    inputs = Inputs(config.model)
    if problems := world_problems(config, launch, inputs):
        raise ConfigError(once(problems))
    return inputs


def world_problems(config: Stage, launch: Launch, inputs: Inputs | None = None) -> list[str]:
    """What keeps a stage from starting here: missing packages, adapters, rewards and prompt sets,
    images that the processes cannot share, and a folder that holds another run. `train`, `eval` and
    `doctor` all ask this. inputs: keeps what is opened."""
    inputs = Inputs(config.model) if inputs is None else inputs
    return [text for check in CHECKS for text in check(config, launch, inputs)]


def once(problems: Iterable[str]) -> list[str]:
    """Problems that say the same of several keys, each once, behind the first of them."""
    keys = defaultdict[str, list[str]](list)
    for key, colon, text in (problem.partition(": ") for problem in problems):
        keys[colon + text].append(key)
    more = (f" and {len(of) - 1} more" if len(of) > 1 else "" for of in keys.values())
    return [of[0] + others + text for (text, of), others in zip(keys.items(), more, strict=True)]


def _packages(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """What asks for a package or a device that is not here."""
    models = {"model": config.model, **config.bases}
    bits = [f"{key}.quantization" for key, m in models.items() if m.quantization == "nf4"]
    needed = dict.fromkeys(bits, "bitsandbytes")
    if config.trains and "wandb" in config.train.trackers:
        needed["train.trackers"] = "wandb"
    for key, package in needed.items():
        if not packages.installed(package):
            yield f"{key}: needs {package}, which is not installed. {packages.hint(package)}"
    if not (launch.elsewhere or torch.cuda.is_available()):
        for key in bits:
            yield f"{key}: 'nf4' needs a GPU, and torch sees none. Use 'fp8', or null."
    kernels = config.model.attention
    if kernels and (reason := unavailable(kernels)):
        yield f"model.attention: {kernels!r}: {reason} Or use null: SDPA."


def adapter_problems(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """Adapters that are not there, cannot be read, hold NaN, or belong to another base: by what
    they say, or by their layers and sizes. Those on the Hub are downloaded."""
    for key, source in config.inputs.items():
        if source in launch.pending:
            continue
        try:
            lora = inputs.adapter(source)
        except (AdapterError, HubError) as error:
            yield f"{key}: {error}"
            continue
        place = key.removesuffix(".adapter")
        model = config.bases.get(place, config.model)
        name = f"{place}.base" if place in config.bases else "model.id"
        spec = known(model)
        if reason := other_base(lora, model.id, spec and spec.family.core):
            yield (
                f"{key}: {source!r} is an adapter of another base: it {reason}, and {name} is "
                f"{model.id!r}. Name an adapter of this base, or that base as {name}."
            )


def _model(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """Settings that the model does not have: sizes, lengths of prompts, guidance."""
    spec = known(config.model) if config.judged and config.samples else None
    if spec is None:
        return
    yield from spec.problems()
    if cut_prompts(spec.config, ["red"]):  # a template may take as many tokens of every prompt
        text = f"{spec.length} tokens leave no room for a word. Leave it out, or raise it to"
        yield f"model.max_sequence_length: {text} {spec.family.longest}."
    for key, scale in config.scales.items():
        spec = known(config.bases.get(key.removesuffix(".guidance"), config.model))
        if spec and spec.family.guidance == "none" and scale != 1:
            text = f"{spec.config.id} has no guidance (it was distilled without). Set it to 1."
            yield f"{key}: {scale:g}, and {text}"


# Rewards and prompts -----------------------------------------------------------------------------


def _scoring(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """Rewards that cannot be built, or cannot judge the prompts, or do not fit the number of
    processes or the advantage; prompt sets that are not there."""
    said: dict[str, tuple[bool, bool]] = {}  # of themselves, by task
    for judged in config.judged:
        sound = []
        for key, reward in judged.rewards.items():
            spec = RewardSpec(reward.name, reward.options)
            if not launch.trust and spec.own_code:
                continue
            where = f"{judged.place}.{key}"
            try:
                spec.check()
                missing = spec.missing_packages
            except (ValueError, KeyError, TypeError, ImportError) as error:
                yield f"{where}: {_text(error)}"
                continue
            for name in missing:
                yield f"{where}: needs {name}, which is not installed. {packages.hint(name)}"
            graded = judged.place.startswith("tasks.") and config.trains
            if graded and algorithm_class(config).needs_gradients:
                if not spec.differentiable:
                    have = ", ".join(n for n in rewards.REWARDS if RewardSpec(n).differentiable)
                    text = f"{reward.name!r} has no gradient, which {config.stage} learns from."
                    yield f"{where}: {text} Use one of {have}, or stage nft."
            sound.append(reward)
            said[judged.name] = spec.groupwise, spec.may_be_sum
        yield from prompt_problems(judged, sound, inputs)
    if config.trains:
        yield from reward_problems(config, said, launch.processes)


def prompt_problems(
    judged: Judged, given: Iterable[RewardConfig], inputs: Inputs, without: Collection[str] = ()
) -> Iterator[str]:
    """Prompt sets that cannot be read, or that one of the given rewards cannot judge. without: sets
    that are not looked at."""
    for key, source in judged.prompts.items():
        if source.partition("#")[0] in without:
            continue
        try:
            batch = inputs.prompts(source, judged.name)
            for reward in given:
                spec = RewardSpec(reward.name, reward.options)
                spec.check_prompts(batch.prompts, batch.metadata)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            where = "" if isinstance(error, PromptError | OSError) else f"{source}, "
            yield f"{judged.place}.{key}: {where}{_text(error)}"


def _advantage(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """An advantage of the user's that cannot be imported, or gives none to two prompts' images."""
    if not config.credited or config.credited.advantage in ADVANTAGES or not launch.trust:
        return
    value = torch.tensor([0.0, 1.0, 0.5, 0.5])
    valid = torch.ones(4, dtype=torch.bool)
    try:
        function = advantage_function(config.credited.advantage)
        function(value, torch.tensor([0, 0, 1, 1]), valid=valid, task=torch.zeros(4))
    except Exception as error:  # whatever the user's code raises
        yield f"{config.stage}.advantage: {_text(error)}"


def _fidelity(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """Features that cannot be imported; a folder of reference images that holds none; prompts that
    are none of the tiny world, where its scenes are the reference."""
    fidelity = getattr(config, "fidelity", None)
    if not fidelity:
        return
    if launch.trust and ":" in fidelity.features:
        try:
            rewards.load(fidelity.features, "features")
        except (ValueError, ImportError) as error:
            yield f"fidelity.features: {_text(error)}"
    folder = Path(fidelity.reference)
    if fidelity.reference != "tiny" and not image_files(folder):
        seen = f"the folder holds no {', '.join(IMAGES)}" if folder.is_dir() else "no such folder"
        yield f"fidelity.reference: {str(folder)!r}: {seen}. Name a folder of images, or 'tiny'."
    if fidelity.reference != "tiny":
        return
    for benchmark in config.benchmarks:
        with suppress(ValueError, KeyError, TypeError, AttributeError, OSError):  # said before
            rows = inputs.prompts(benchmark.prompts, benchmark.name).metadata
            try:
                rendered(rows[:: max(1, len(rows) // 16)], seed=0)
            except ValueError:
                text = f"'tiny' needs prompts of the tiny world, and {benchmark.prompts} has others"
                yield f"fidelity.reference: {text}. Name a folder of images, or fidelity=null."


def _text(error: Exception) -> str:
    """Its message; str() of a KeyError would put it in quotes."""
    return str(error.args[0] if error.args else error)


# Training ----------------------------------------------------------------------------------------


def _bases(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """Teachers' bases that cannot label the student's states, and devices that are not there."""
    for key, model in config.bases.items():
        try:
            reasons = list(mismatches(config.model, model))
        except (LookupError, OSError, ValueError) as error:
            reasons = [_text(error)]
        if reasons:
            text = f"{model.id!r} cannot label states of {config.model.id!r}: "
            text += f"{'; '.join(reasons)}. Use a model with the same VAE, text encoders"
            yield f"{key}.base: {text} and scheduler."
        kind, _, index = (config.labellers[key].device or "cpu").partition(":")
        here = torch.accelerator.current_accelerator()
        there = torch.accelerator.device_count() if here and here.type == kind else 0
        if kind != "cpu" and int(index or 0) >= there:
            yield f"{key}.device: {kind!r} has {there} devices here. Use another, 'cpu' or null."


def _training(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """Settings against determinism, layers that the model does not have, prompts that nothing can
    be learnt from, and a folder that holds another run."""
    if not config.trains:
        return
    if config.train.deterministic and config.model.attention not in REPEATABLE:
        text = f"{config.model.attention!r} is not deterministic in its backward pass. Use null"
        yield f"model.attention: {text}, or train.deterministic=false."
    fresh = config.lora.targets if config.lora.init is None else None
    if fresh and (spec := known(config.model)):
        for target in fresh:
            if not spec.adapted([target]):
                text = f"By default (null) they are {', '.join(spec.family.targets)}."
                yield f"lora.targets: no layer of {config.model.id} ends with {target!r}. {text}"
    for index, task in enumerate(config.tasks):
        with suppress(PromptError, OSError):  # said before
            prompts = inputs.prompts(task.prompts, task.name)
            texts = list(algorithm_class(config).row_problems(config, task.prompts, prompts))
            yield from (f"tasks.{index}.prompts: {text}" for text in texts[:BAD_ROWS])
            if len(texts) > BAD_ROWS:
                yield f"tasks.{index}.prompts: {len(texts)} problems; {BAD_ROWS} are named."
    if launch.resume is not None:
        given = {"resume": launch.resume, "any_world": launch.any_world, "pending": launch.pending}
        yield from resuming.problems(config, launch.processes, **given)


def _output(config: Any, launch: Launch, inputs: Inputs) -> Iterator[str]:
    """A folder of another user, or one that is read-only."""
    if launch.resume is not None and (path := lock.unwritable(config.output)):
        yield f"output: {path} cannot be written by this user. Choose another `output`."


CHECKS = (_packages, adapter_problems, _model, _scoring, _advantage, _fidelity, _bases, _training,
          _output)  # fmt: skip


def reward_problems(
    config: TrainingStage, said: Mapping[str, tuple[bool, bool]], processes: int
) -> Iterator[str]:
    """Images of an optimizer step that the processes cannot share evenly; rewards without parts,
    where the advantage normalises parts. said: {task: (whether its reward compares all images of
    a prompt, which no two processes may share, as an algorithm may; whether it has weights)}."""
    rollout = config.rollout
    updates = config.optimizer.updates_per_rollout
    prompts = rollout.prompts // updates  # of a step
    tasks = [task.name for task in config.tasks if said.get(task.name, (False, True))[0]]
    text = unit = ""
    if prompts * rollout.group_size % processes:
        text = f"{prompts * rollout.group_size} images an optimizer step"
        unit = processes // math.gcd(rollout.group_size, processes) * updates
    elif prompts % processes and (tasks or algorithm_class(config).needs_groups):
        who = f"task {min(tasks)!r}" if tasks else f"stage {config.stage!r}"
        text = f"{prompts} groups an optimizer step, which {who} needs complete"
        unit = processes * updates
    if unit:
        text = f"{processes} processes cannot share evenly {text}. Use a multiple of {unit}"
        yield f"rollout.prompts: {text}: rollout.prompts={-(-rollout.prompts // unit) * unit}."
    gdpo = config.credited and config.credited.advantage == "gdpo"
    for index, task in enumerate(config.tasks if gdpo else ()):
        if task.reward and not said.get(task.name, (False, True))[1]:
            text = f"'gdpo' normalises parts of a reward, and {task.reward.name!r} is no weighted"
            yield f"tasks.{index}.reward: {text} sum. Use 'weighted', or advantage 'group_std'."


# What can be run, and is worth a word ------------------------------------------------------------


def own_code(config: Stage) -> dict[str, list[str]]:
    """{key of the config: the dotted paths there}: modules whose code runs where the stage is
    checked or run. Nothing is imported here."""
    paths = {
        f"{judged.place}.{key}": RewardSpec(reward.name, reward.options).own_code
        for judged in config.judged
        for key, reward in judged.rewards.items()
    }
    fidelity = getattr(config, "fidelity", None)
    if fidelity and ":" in fidelity.features:
        paths["fidelity.features"] = [fidelity.features]
    if config.credited and ":" in config.credited.advantage:
        paths[f"{config.stage}.advantage"] = [config.credited.advantage]
    return {key: listed for key, listed in paths.items() if listed}


def unexamined(stages: Mapping[str, Stage]) -> list[str]:
    """What is said of `own_code` that is not run, one text each."""
    return [
        f"not examined: {key} of {name} names {', '.join(listed)}, which runs code. Read that "
        "code, then say --trust."
        for name, stage in stages.items()
        for key, listed in own_code(stage).items()
    ]


class Training(NamedTuple):
    """How an adapter was trained. steps: those of a rollout of `of` steps whose states it was
    trained at; none where it learnt at noise levels of its own, or that is not known."""

    guidance: float
    steps: Collection[int] = ()
    of: int = 0


def misused_adapters(stages: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """("fault" or "note", text): adapters that are used otherwise than they were trained. A fault:
    at a guidance scale more than a factor of two away, as guidance counts once (docs/log). A note:
    as teachers of a student that leaves out steps which they were trained at. stages: by name, as
    they run. Nothing is said of an adapter whose training is not known from them, or from the
    folder of its run."""
    made: dict[Path, Any] = {}
    for name, stage in stages.items():
        for key, source in stage.inputs.items():
            trainings = _trainings(source, made)
            used = stage.guidance_at(key)
            if used is None:  # of a merge: as the first of its adapters
                parts = (t for i in stage.inputs.values() for t in _trainings(i, made))
                used = next((t.guidance for t in parts), 1.0)
            absorbs = key == "lora.init" and bool(stage.labellers)  # what its start lacks
            for scale in (training.guidance for training in trainings):
                too_high = used > 2 * scale
                too_low = 2 * used < scale and not absorbs
                if not (too_high or too_low):
                    continue
                yield (
                    "fault",
                    f"{name}: {key}: {source} was trained at guidance {scale:g}, and is used at "
                    f"{used:g}. Use it at {scale:g} (labels: up to {2 * scale:g}): CFG counts "
                    "once.",
                )
                break
            if stage.stage == "opd" and key.startswith("teachers."):
                for text in _left_out(stage, trainings):
                    yield "note", f"{name}: {key}: {source} {text}"
        made[stage.folder.adapter] = stage


def _left_out(student: Any, trainings: Iterable[Training]) -> Iterator[str]:
    """The steps that a teacher was trained at, and its student, of as many steps, never is."""
    reached = range(*student.rollout.trained)
    for training in trainings:
        missing = sorted({*training.steps} - {*reached})
        if missing and training.of == student.rollout.steps:
            yield (
                f"was trained at steps {sorted(training.steps)} of {training.of}, and the student "
                f"leaves out {missing}. Set rollout.kind=ode, which trains all steps."
            )


def _trainings(source: str, made: Mapping[Path, Any]) -> list[Training]:
    """How an adapter was trained, or all that it was merged from; [] = not known. made: {adapter:
    the stage that writes it}."""
    if source.startswith("tiny/"):
        return [Training(1.0)]
    stage: Any = made.get(Path(source))
    if not stage and not adapters.is_hub_id(source):
        with suppress(ConfigError):
            run = RunFolder(adapters.adapter_folder(source).parent)
            stage = load(run.config, stage=Stage)
    if not stage:
        return []
    if not stage.trains:
        return [t for part in stage.inputs.values() for t in _trainings(part, made)]
    algorithm = algorithm_class(stage)
    if not stage.learns_from_rewards or algorithm.keeps(stage).noise_levels:
        return [Training(stage.guidance)]
    steps = set[int]()
    for update in range(stage.updates):
        steps.update(algorithm.trained_steps(stage, update))
    return [Training(stage.guidance, steps, stage.rollout.steps)]


def against_card(config: TrainingStage) -> Iterator[tuple[str, str]]:
    """("fault" or "note", text): steps and scales far from the model's card; for a model that was
    distilled to few steps, losses of straight paths and states off its grid. Such a run can be
    trained."""
    name = config.model.id
    if not (card := card_of(name)):
        return
    steps, guidance = card
    distilled = steps <= FEW
    level = "fault" if distilled else "note"
    if distilled and config.stage in ("nft", "awm", "sft", "dpo"):
        text = f"was distilled to {steps} steps, and {config.stage} trains it back to straight"
        text += " paths, which take many. Use the model that it was distilled from, or grpo at"
        yield level, f"card: {name} {text} {steps} steps."
    student: Any = getattr(config, "student", None)
    own = config.rollout.kind == "ode" and config.rollout.steps == steps
    if distilled and config.stage == "opd" and not (own and student.substeps == 1):
        text = f"was distilled to {steps} steps, so teachers are right at these noise levels alone."
        text += f" Set rollout.kind=ode rollout.steps={steps} student.substeps=1."
        yield level, f"card: {name} {text}"
    sampled = {"rollout.steps": config.rollout.steps}
    if config.evaluation and config.evaluation.steps:
        sampled["evaluation.steps"] = config.evaluation.steps
    bases = {f"{key}.guidance" for key in config.bases}
    far = {key: value for key, value in sampled.items() if distilled and value > 2 * steps}
    far |= {
        key: scale
        for key, scale in config.scales.items()
        if key not in bases and not guidance / 2 <= scale <= 2 * guidance
    }
    for key, value in far.items():
        yield level, f"card: {key} = {value:g}; {name} has {steps} steps at guidance {guidance:g}."


def span(values: Mapping[str, float]) -> str:
    low, high = min(values.values()), max(values.values())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
