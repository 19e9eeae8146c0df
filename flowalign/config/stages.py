"""One class per stage: its sections, and what follows from its keys. Nothing is read from disk."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from flowalign.config import learning, run
from flowalign.config.model import LoraConfig, ModelConfig
from flowalign.config.rollout import RolloutConfig, steps_within
from flowalign.config.section import (
    ConfigError,
    FileName,
    Location,
    Positive,
    Seconds,
    Section,
    Seed,
    Share,
    as_tuple,
    did_you_mean,
    null_is_empty,
)
from flowalign.system.packages import entry_points

# {layer: rank} of an adapter that a stage reads, or of a fresh one
RanksOf = Callable[[str | None, LoraConfig], Mapping[str, int]]


@dataclass(frozen=True)
class Judged:
    """Prompts whose images are scored: a task or a benchmark."""

    place: str  # in the config
    name: str
    rewards: Mapping[str, learning.RewardConfig]  # by their key below the place
    prompts: Mapping[str, str]  # prompt sets by their key below the place; the last is held out
    evaluated: int  # images of a held-out prompt in one evaluation, of all its models
    limit: int | None  # held-out prompts, at most


class Stage(Section):
    """The keys that all configs have; `load(..., stage=Stage)` accepts any of them."""

    stage: str
    """What is done: a key of STAGES."""
    output: Location = Field(min_length=1, examples=["runs/teacher_ocr"])
    """Folder of the run."""
    model: ModelConfig
    command: ClassVar[str] = "flowalign train"
    """What runs it."""
    trains: ClassVar[bool] = False
    """Whether it is a training run."""
    makes_adapter: ClassVar[bool] = False
    """Whether it leaves an adapter in its folder."""

    @property
    def samples(self) -> bool:
        """Whether it draws images."""
        return self.trains

    @property
    def inputs(self) -> dict[str, str]:
        """{config key: folder or Hub id} of every adapter that the stage reads."""
        return {}

    @property
    def bases(self) -> dict[str, ModelConfig]:
        """{config key of a teacher: its base}, of those that are not on the student's."""
        return {}

    @property
    def packages(self) -> dict[str, str]:
        """{config key: the optional package that its value needs}."""
        models = {"model": self.model, **self.bases}
        nf4 = (key for key, model in models.items() if model.quantization == "nf4")
        return {f"{key}.quantization": "bitsandbytes" for key in nf4}

    @property
    def recipe(self) -> RecipeStage | None:
        """The recipe that it is, or is run as; None for one that is run itself."""
        return None

    @property
    def scales(self) -> dict[str, float]:
        """{config key: guidance scale} of all that are given there."""
        return {}

    @property
    def credited(self) -> learning.AdvantageConfig | None:
        """How its rewards become advantages; None where it does not learn from rewards."""
        return None

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the loss needs scores, and so decoded images, of every rollout."""
        return self.credited is not None

    @property
    def judged(self) -> list[Judged]:
        """Every task and benchmark; empty for a stage that samples no images."""
        return []

    @property
    def rewarded(self) -> dict[str, float]:
        """{task: images of a rollout whose reward it learns from}."""
        return {}

    @property
    def updates(self) -> int:
        """Rollouts of a training run."""
        return 0

    @property
    def evaluations(self) -> int:
        """How often held-out images are sampled and scored."""
        return 0

    @property
    def evaluation_sampling(self) -> run.SamplingConfig:
        """How evaluations sample."""
        return run.SamplingConfig()

    @property
    def batch_sizes(self) -> dict[str, int]:
        """{config key: rows of a forward pass}: what a run that lacks memory lowers."""
        return {}

    def output_ranks(self, ranks_of: RanksOf) -> Mapping[str, int]:
        """{layer: rank} of the adapter that the stage writes; {} where it writes none."""
        return {}


class Job(Stage):
    """What `flowalign train` runs."""


class TrainingStage(Job):
    """A training run. What it learns from depends on the stage."""

    trains = makes_adapter = True
    algorithm: ClassVar[str]
    """module:Class of what is learnt (`flowalign.training.algorithm.Algorithm`)."""
    seed: Seed = 0
    """Seed of prompts, noise and initial weights."""
    lora: LoraConfig = LoraConfig()
    tasks: list[learning.TaskConfig] = Field(min_length=1)
    rollout: RolloutConfig = RolloutConfig()
    optimizer: learning.OptimizerConfig = learning.OptimizerConfig()
    ema: learning.EmaConfig | None = learning.EmaConfig()
    train: run.TrainConfig = run.TrainConfig()
    evaluation: run.EvaluationConfig | None = run.EvaluationConfig()
    alarm: run.TrainingAlarmConfig | None = run.TrainingAlarmConfig()
    """null = no alarm at drift."""

    @property
    def guidance(self) -> float:
        """The CFG scale at which the adapter is trained."""
        return self.rollout.guidance

    def guidance_of(self, teacher: learning.LabellerConfig) -> float:
        """The CFG scale of a teacher or anchor."""
        return self.guidance if teacher.guidance is None else teacher.guidance

    @property
    def evaluates(self) -> bool:
        """Whether held-out scores are taken while training; they choose the adapter that is
        kept."""
        scored = self.unrewarded or any(task.evaluated for task in self.tasks)
        return self.evaluation is not None and scored

    @property
    def evaluations(self) -> int:
        """Before the first update, at intervals, and after the last."""
        if self.evaluation is None or not self.evaluates:
            return 0
        return len(range(0, self.updates, self.evaluation.every)) + 1

    @property
    def updates(self) -> int:
        return self.train.updates

    @property
    def rewarded(self) -> dict[str, float]:
        if not self.learns_from_rewards:
            return {}
        images = self.rollout.images / sum(task.weight for task in self.tasks)
        return {task.name: images * task.weight for task in self.tasks if task.reward}

    def output_ranks(self, ranks_of: RanksOf) -> Mapping[str, int]:
        return ranks_of(self.lora.init, self.lora)

    @property
    def needs_actions(self) -> bool:
        """Whether the loss needs the sampled successors of the states and their log-probs."""
        return self.learns_from_rewards

    @property
    def needs_means(self) -> bool:
        """Whether the loss needs the means that those successors were sampled around."""
        return isinstance(self.credited, learning.GrpoConfig) and self.credited.ratio == "guard"

    @property
    def needs_noise(self) -> bool:
        """Whether it learns nothing from rollouts without noise."""
        return self.needs_actions

    @property
    def evaluation_sampling(self) -> run.SamplingConfig:
        """How evaluations sample: as the rollouts, where `evaluation` says nothing else."""
        evaluation, rollout = self.evaluation or run.EvaluationConfig(), self.rollout
        guidance = rollout.guidance if evaluation.guidance is None else evaluation.guidance
        return run.SamplingConfig(
            steps=evaluation.steps or rollout.steps,
            guidance=guidance,
            seed=evaluation.seed,
            batch_size=evaluation.batch_size or rollout.batch_size,
        )

    @property
    def batch_sizes(self) -> dict[str, int]:
        return {
            "rollout.batch_size": self.rollout.batch_size,
            "optimizer.micro_batch": self.optimizer.micro_batch,
        }

    @property
    def clip_ranges(self) -> dict[str, float]:
        """{config key: clip range} of ratios of transitions."""
        grpo = self.credited if isinstance(self.credited, learning.GrpoConfig) else None
        return {"grpo.clip_range": grpo.clip_range} if grpo else {}

    @property
    def watched(self) -> list[run.BenchmarkConfig]:
        """The benchmarks of evaluation.watch."""
        return self.evaluation.watch if self.evaluation else []

    @property
    def judged(self) -> list[Judged]:
        judged = _judged("evaluation.watch", self.watched)
        for index, task in enumerate(self.tasks):
            rewards = {"reward": task.reward} if task.reward else {}
            prompts = _given({"prompts": task.prompts, "validation": task.validation})
            evaluated = int(self.evaluation is not None and task.evaluated)
            limit = self.evaluation.prompts if self.evaluation else None
            judged.append(Judged(f"tasks.{index}", task.name, rewards, prompts, evaluated, limit))
        return judged

    @property
    def packages(self) -> dict[str, str]:
        packages = super().packages
        if self.optimizer.name == "adamw8bit":
            packages["optimizer.name"] = "bitsandbytes"
        if "wandb" in self.train.trackers:
            packages["train.trackers"] = "wandb"
        return packages

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.train.updates * self.optimizer.updates_per_rollout

    @property
    def labellers(self) -> dict[str, learning.LabellerConfig]:
        """{config key: teacher}, with the anchor; empty for a stage without teachers."""
        return {}

    @property
    def bases(self) -> dict[str, ModelConfig]:
        bases = {}
        for key, teacher in self.labellers.items():
            if teacher.base is not None:
                own = teacher.model_dump(include={"revision", "quantization"})
                own |= {"id": teacher.base, "dtype": teacher.dtype or self.model.dtype}
                bases[key] = self.model.model_copy(update=own)
        return bases

    @property
    def scales(self) -> dict[str, float]:
        sections: dict[str, Any] = {"rollout": self.rollout, **self.labellers}
        if self.evaluation:
            sections["evaluation"] = self.evaluation
        scales = {f"{key}.guidance": section.guidance for key, section in sections.items()}
        return {key: scale for key, scale in scales.items() if scale is not None}

    @property
    def patience(self) -> int | None:
        """Evaluations without progress after which a run ends; None = it does not."""
        return None

    @property
    def unrewarded(self) -> bool:
        """Whether evaluations have no reward: they measure the distance to the targets."""
        return False

    @property
    def labelling(self) -> tuple[str, int]:
        """(dtype of the stored labels, (image, step) pairs per forward pass of the teachers)."""
        student = learning.StudentConfig()
        return student.label_dtype, student.label_batch

    @property
    def routing(self) -> dict[str, str]:
        """Task -> name of its teacher; empty for a stage without teachers."""
        return {}

    @property
    def mixtures(self) -> dict[str, float]:
        """{config key: CFG scale} of the labellers whose scale is not the one that the
        student is trained at."""
        scales = {key: self.guidance_of(teacher) for key, teacher in self.labellers.items()}
        return {key: scale for key, scale in scales.items() if scale != self.guidance}

    @property
    def extrapolated(self) -> dict[str, learning.TeacherConfig]:
        """{config key: teacher} of the teachers whose targets are not their own velocities."""
        return {
            key: teacher
            for key, teacher in self.labellers.items()
            if isinstance(teacher, learning.TeacherConfig) and teacher.extrapolate != 1
        }

    @property
    def inputs(self) -> dict[str, str]:
        adapters = {key: teacher.adapter for key, teacher in self.labellers.items()}
        if "anchor" in adapters:  # the other places name a teacher, whose one file this is
            adapters["anchor.adapter"] = adapters.pop("anchor")
        return _given({"lora.init": self.lora.init} | adapters)

    def problems(self) -> Iterator[str]:
        """Noise, group size, prompts, rewards and names that do not fit what is learnt."""
        rollout, updates = self.rollout, self.optimizer.updates_per_rollout
        if self.needs_noise and (rollout.kind == "ode" or rollout.noise_level == 0):
            key = "kind: 'ode'" if rollout.kind == "ode" else "noise_level: 0"
            yield f"rollout.{key} adds no noise, which this loss needs. Use kind 'sde', level 0.7."
        if self.needs_actions and self.model.compile and self.model.dtype != "float32":
            # measured by Inductor in bfloat16: 9e-5 to 4e-4 off 1, as much as clip ranges allow
            yield (
                "model.compile: torch compiles a rollout (no gradient) and an update otherwise, so "
                f"that in {self.model.dtype} the ratio of new and old policy does not begin at 1. "
                "Use false, or a stage without a ratio (nft, awm, sft, opd with 'pathwise')."
            )
        if self.learns_from_rewards and rollout.copies < 2:
            yield (
                f"rollout.copies: got {rollout.copies}; an advantage is relative to the other "
                "images of a prompt. Use 2 or more."
            )
        if rollout.prompts % updates:  # advantages need all images of a prompt in one step
            yield (
                f"rollout.prompts: {rollout.prompts} prompts cannot be shared evenly among "
                f"optimizer.updates_per_rollout = {updates}. Use a multiple of {updates}."
            )
        for index, task in enumerate(self.tasks):
            evaluated = self.evaluation and task.validation and not self.unrewarded
            if task.reward is None and (self.learns_from_rewards or evaluated):
                why, leave = "it is evaluated", ", or leave out its `validation`"
                if self.learns_from_rewards:
                    why, leave = "this run learns from it", ""
                text = f"missing, and {why}. Add the keys name, options{leave}."
                yield f"tasks.{index}.reward: {text}"
            elif task.reward and self.evaluation and not task.validation:
                yield (
                    f"tasks.{index}.validation: missing, though `evaluation` is on. Name a prompt "
                    "set that is not trained on, or write `evaluation: null`."
                )
        for index, benchmark in enumerate(self.watched):
            if benchmark.layout:
                yield (
                    f"evaluation.watch.{index}.layout: {benchmark.layout!r}, but a run keeps no "
                    "images. Use it under `benchmarks` of an evaluation (`stage: eval`)."
                )
        if self.alarm and self.alarm.reference == "start" and not self.lora.init:
            yield (
                "alarm.reference: 'start', but the run starts from the base. Use 'base', or give "
                "lora.init."
            )
        if self.watched and not self.evaluates:
            yield "evaluation.watch: no task has `validation` and `reward`: nothing is evaluated."
        yield from _same_names(
            [("tasks", task.name) for task in self.tasks]
            + [("evaluation.watch", n) for b in self.watched for n in b.judges]
        )
        sizes = {f"tasks.{index}": task.size for index, task in enumerate(self.tasks)}
        sizes |= {f"evaluation.watch.{i}": b.size for i, b in enumerate(self.watched)}
        yield from self.model.size_problems(sizes)


class RewardStage(TrainingStage):
    """A teacher that learns from the rewards of one or more tasks. The section of the stage's own
    name says how they become advantages."""

    @property
    def credited(self) -> learning.AdvantageConfig:
        return getattr(self, self.stage)

    def problems(self) -> Iterator[str]:
        """Tasks that are routed to a teacher."""
        yield from super().problems()
        for index, task in enumerate(self.tasks):
            if task.teacher:
                yield (
                    f"tasks.{index}.teacher: {task.teacher!r}, but stage {self.stage!r} has no "
                    "teachers. Leave it out, or use stage 'opd' or 'sft'."
                )


class GrpoStage(RewardStage):
    """Group-relative policy optimisation (GRPO) on the rewards of one or more tasks."""

    algorithm = "flowalign.teachers.grpo:Grpo"
    stage: Literal["grpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards."""
    grpo: learning.GrpoConfig = learning.GrpoConfig()


class ForwardStage(RewardStage):
    """Rewards, learnt from clean images with noise added: no trajectory is kept."""

    @property
    def forward(self) -> learning.ForwardConfig:
        """The section of the stage's own name."""
        return getattr(self, self.stage)

    @property
    def policies(self) -> dict[str, learning.PolicyConfig]:
        """{adapter beside the trained one: how it follows that}; the one named "old" samples."""
        raise NotImplementedError

    @property
    def guidance(self) -> float:
        guidance = self.forward.guidance
        return self.rollout.guidance if guidance is None else guidance

    @property
    def needs_actions(self) -> bool:
        return False  # there is no ratio of transitions

    def problems(self) -> Iterator[str]:
        """Noise in rollouts, groups that are all alike, and more noise levels than there are."""
        yield from super().problems()
        rollout, forward, name = self.rollout, self.forward, self.stage
        if rollout.kind != "ode":
            yield (
                f"rollout.kind: {rollout.kind!r}, but {name} learns from clean images, and noise "
                "during sampling only makes them worse. Use 'ode'."
            )
        if rollout.window is not None:
            yield f"rollout.window: {name} trains no states of a rollout. Leave it out."
        if rollout.shared_noise:
            yield "rollout.shared_noise: an ode gives all images of a prompt alike. Use false."
        start, stop = steps_within(rollout.steps, forward.within)
        if forward.levels != "stratified" and forward.states > stop - start:
            yield (
                f"{name}.states: {forward.states}, but {name}.within holds {max(stop - start, 0)} "
                "steps of the sampler. Use at most as many, or levels 'stratified'."
            )


class NftStage(ForwardStage):
    """DiffusionNFT on the rewards of one or more tasks."""

    algorithm = "flowalign.teachers.nft:Nft"
    stage: Literal["nft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards, on clean images."""
    nft: learning.NftConfig = learning.NftConfig()

    @property
    def policies(self) -> dict[str, learning.PolicyConfig]:
        """The old policy, where it can differ from the student during an update: where it is an
        average, or a rollout has several optimizer steps."""
        needed = self.nft.old.decay > 0 or self.optimizer.updates_per_rollout > 1
        return {"old": self.nft.old} if needed else {}


class AwmStage(ForwardStage):
    """Advantage weighted matching on the rewards of one or more tasks."""

    algorithm = "flowalign.teachers.awm:Awm"
    stage: Literal["awm"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from rewards, on clean images."""
    awm: learning.AwmConfig = learning.AwmConfig()

    @property
    def policies(self) -> dict[str, learning.PolicyConfig]:
        """The student's weights at the rollout, where that has several optimizer steps; and their
        average, where ema_kl_weight asks for it."""
        old = {"old": learning.PolicyConfig()} if self.optimizer.updates_per_rollout > 1 else {}
        return old | ({"average": self.awm.average} if self.awm.ema_kl_weight > 0 else {})


class DistillationStage(TrainingStage):
    """A student that learns from teachers: each task is routed to one of them."""

    teachers: dict[FileName, learning.TeacherConfig] = Field(
        min_length=1, examples=[{"ocr": {"adapter": "runs/ocr"}}]
    )
    """Teachers by name."""

    @property
    def routing(self) -> dict[str, str]:
        return {task.name: task.teacher or task.name for task in self.tasks}

    @property
    def labellers(self) -> dict[str, learning.LabellerConfig]:
        return {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}

    def problems(self) -> Iterator[str]:
        """Tasks without a teacher, teachers without a task."""
        yield from super().problems()
        names, routing = sorted(self.teachers), self.routing
        for index, task in enumerate(self.tasks):
            if routing[task.name] not in names:
                yield (
                    f"tasks.{index}.teacher: no teacher {routing[task.name]!r}; there are {names}. "
                    "Name one of these, or add it under `teachers`."
                )
        for name in sorted(self.teachers.keys() - set(routing.values())):
            yield f"teachers.{name}: no task is routed to it. Give one `teacher: {name}`."


class OpdStage(DistillationStage):
    """A student by on-policy distillation from routed teachers."""

    algorithm = "flowalign.training.student.opd:Opd"
    stage: Literal["opd"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers, on the student's own trajectories."""
    student: learning.StudentConfig = learning.StudentConfig()
    anchor: learning.AnchorConfig | None = None
    """The anchor of MAR; null = none."""

    @property
    def guidance(self) -> float:
        guidance = self.student.guidance
        return self.rollout.guidance if guidance is None else guidance

    @property
    def needs_actions(self) -> bool:
        """Whether the loss has a ratio of new and old policy."""
        return self.student.gradient != "pathwise"

    @property
    def patience(self) -> int | None:
        return self.student.patience

    @property
    def unrewarded(self) -> bool:
        held_out = all(task.validation and not task.reward for task in self.tasks)
        return held_out and self.student.fixed_prompts > 0

    @property
    def labelling(self) -> tuple[str, int]:
        return self.student.label_dtype, self.student.label_batch

    @property
    def batch_sizes(self) -> dict[str, int]:
        return super().batch_sizes | {"student.label_batch": self.student.label_batch}

    @property
    def clip_ranges(self) -> dict[str, float]:
        ranges = super().clip_ranges
        if self.student.gradient != "pathwise":
            ranges["student.clip_range"] = self.student.clip_range
        return ranges

    @property
    def labellers(self) -> dict[str, learning.LabellerConfig]:
        return super().labellers | ({"anchor": self.anchor} if self.anchor else {})

    @property
    def needs_noise(self) -> bool:
        return self.needs_actions or self.student.weighting in ("kl", "published")

    def problems(self) -> Iterator[str]:
        """A policy of two CFG scales, and more states than there are."""
        yield from super().problems()
        # PPO's ratio compares the new policy with the one that sampled, at its CFG scale.
        if self.needs_actions and self.guidance != self.rollout.guidance:
            yield (
                f"student.guidance: {self.guidance}, but the rollout has {self.rollout.guidance}: "
                "the ratio of new and old policy needs one policy. Use the same, or gradient "
                "'pathwise'."
            )
        for name, teacher in self.teachers.items():
            if teacher.reference == "start" and not self.lora.init:
                yield (
                    f"teachers.{name}.reference: 'start', but the student starts from the base. "
                    "Use 'base', or give lora.init."
                )
        if self.student.patience is not None and self.evaluation is None:
            yield "student.patience: it counts evaluations, and evaluation is null."
        states, width = self.student.states, self.rollout.width
        if states.select != "all" and states.count > width:
            yield (
                f"student.states.count: {states.count}, and rollout.window has only {width} steps. "
                f"Use at most {width}."
            )


class SftStage(DistillationStage):
    """A cold start from routed teachers' images."""

    algorithm = "flowalign.training.student.sft:Sft"
    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers' images."""
    sft: learning.SftConfig = learning.SftConfig()

    def problems(self) -> Iterator[str]:
        """A target beyond a teacher, which cannot sample images."""
        yield from super().problems()
        for key, teacher in self.extrapolated.items():
            yield (
                f"{key}.extrapolate: {teacher.extrapolate}, but `sft` learns from images, which "
                "the teacher itself samples. Leave it out, or use stage opd."
            )


class MergeStage(Job):
    """A merge of adapters of one base; see flowalign.teachers.merge."""

    makes_adapter = True
    stage: Literal["merge"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Add weight updates."""
    adapters: list[Location] = Field(min_length=2, examples=[["runs/a/adapter", "runs/b/adapter"]])
    """Adapter folders or Hub ids."""
    weights: list[float] | None = Field(default=None, examples=[[0.5, 0.5]])
    """One per adapter; null = 1 each, the sum. 1/n each is the average."""
    method: Literal["concat", "svd", "ties", "dare"] = "concat"
    """concat is exact, and the ranks add. A student that starts from it has the summed rank."""
    rank: Annotated[int, Field(ge=1, le=8192)] | None = Field(default=None, examples=[32])
    """Rank of the result (not for concat); null = the largest rank given. svd: at most their
    sum."""
    density: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the entries that ties and dare keep."""
    seed: Seed = 0
    """Seed of the entries that dare drops."""
    lines: Annotated[tuple[float, float], as_tuple] | None = Field(
        default=None, examples=[[0.5, 1]]
    )
    """LiNeS: scales of the first and the last block."""

    @property
    def inputs(self) -> dict[str, str]:
        return {f"adapters.{index}": source for index, source in enumerate(self.adapters)}

    def output_ranks(self, ranks_of: RanksOf) -> Mapping[str, int]:
        """The exact sum has the sum of the ranks, and svd never more."""
        each = [Counter(ranks_of(source, LoraConfig())) for source in self.adapters]
        total, largest = reduce(operator.add, each), reduce(operator.or_, each)
        if self.method == "concat":
            return dict(total)
        ranks = {layer: self.rank or rank for layer, rank in largest.items()}
        return dict(Counter(ranks) & total) if self.method == "svd" else ranks

    @property
    def recipe(self) -> RecipeStage:
        """A recipe of this one stage."""
        folder = Path(self.output)
        stages = {folder.name: self.model_dump(mode="json", exclude={"output", "model"})}
        return RecipeStage.model_construct(  # unchecked: its folder may have any name
            stage="recipe", output=str(folder.parent), model=self.model, stages=stages
        )

    def problems(self) -> Iterator[str]:
        """Weights that are not one an adapter; a rank that `concat` does not have."""
        if self.weights is not None and len(self.weights) != len(self.adapters):
            count = len(self.adapters)
            yield f"weights: {len(self.weights)} for {count} adapters. Give one each, or null."
        if self.rank is not None and self.method == "concat":
            yield f"rank: {self.rank}, but 'concat' adds the ranks. Use 'svd', or leave it out."


def variant_problems(variant: Any) -> Iterator[str]:
    """What is wrong with {kind of stage: keys laid over all stages of that kind}."""
    possible = [name for name in stage_names() if name != "recipe"]
    for kind, keys in variant.items() if isinstance(variant, Mapping) else [("config", None)]:
        if kind not in possible or not isinstance(keys, Mapping):
            yield f"{kind}: want keys of a stage's config under one of {', '.join(possible)}."


class RecipeStage(Job):
    """Stages that run one after the other, each in a folder of its name under `output`."""

    stage: Literal["recipe"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Run other stages."""
    seed: Seed = 0
    """Seed of every stage that sets none."""
    stages: dict[FileName, dict[str, Any]] = Field(
        min_length=1, examples=[{"ocr": {"use": "teacher_ocr.yaml"}}]
    )
    """{name: keys of a stage's config}. They are laid over the file that `use` names (relative to
    this one); `set` lists changes as on the command line. A value `stage:NAME` is the adapter of an
    earlier stage."""
    max_minutes: Positive | None = Field(default=None, examples=[1430.0])
    """As `train.max_minutes`, in place of its stages' keys."""
    variant: dict[str, dict[str, Any]] = Field(
        default={}, examples=[{"grpo": {"rollout": {"batch_size": 4}}}]
    )
    """{kind of stage: keys laid over all stages of that kind}: the same recipe for other hardware.
    `--variant FILE` on the command line sets it."""

    @property
    def recipe(self) -> RecipeStage:
        return self

    def problems(self) -> Iterator[str]:
        """Variants of no stage; stages that would share a folder on some disks."""
        yield from (f"variant.{text}" for text in variant_problems(self.variant))
        yield from _same_names([("stages", name) for name in self.stages])


class EvalStage(Stage):
    """An evaluation of the base model and of adapters on it."""

    command = "flowalign eval"
    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Evaluate models."""
    models: dict[FileName, run.Evaluated | None] = Field(
        default={"base": None}, min_length=1, examples=[{"base": None, "ocr": "runs/ocr/adapter"}]
    )
    """{name: adapter folder, or null for the base model; or images: FOLDER}. All are compared with
    the first. If all are images, no model is loaded."""
    compare: Annotated[dict[str, list[str]], null_is_empty] = Field(
        default={}, examples=[{"student": ["ocr", "merged"]}]
    )
    """{name: other models that it is compared with}, besides the first; null = none."""
    guidance: Annotated[dict[str, run.NotNegative], null_is_empty] = Field(
        default={}, examples=[{"base_cfg": 4.5}]
    )
    """{name of a model: its CFG scale}, where it is not `sampling.guidance`; null = none."""
    benchmarks: list[run.BenchmarkConfig] = Field(min_length=1)
    sampling: run.SamplingConfig = run.SamplingConfig()
    fidelity: run.FidelityConfig | None = None
    diversity: run.DiversityConfig | None = None
    report: run.ReportConfig = run.ReportConfig()
    alarm: run.AlarmConfig | None = run.AlarmConfig()
    """Of the images that the report shows; null = none."""
    score_seconds: Seconds | None = 1800.0
    """A batch of images is invalid if its reward takes longer; null = wait for ever."""
    timeout_seconds: Seconds | None = Field(default=None, examples=[7200.0])
    """As train.timeout_seconds of a training run."""
    max_invalid_share: Share = 0.05
    """The evaluation stops without a table if a larger share of a benchmark's images could not be
    scored."""
    keep_images: bool = False
    """Keep every image in <output>/images, so that another reward can score it later; false = keep
    those that the report shows."""

    @property
    def samples(self) -> bool:
        return bool(self.adapters)

    @property
    def adapters(self) -> dict[str, str | None]:
        """{name: adapter, None for the base} of the models that sample."""
        models = self.models.items()
        return {name: a for name, a in models if not isinstance(a, run.GivenImages)}

    @property
    def given(self) -> dict[str, run.GivenImages]:
        """{name: images that another program made}."""
        return {name: g for name, g in self.models.items() if isinstance(g, run.GivenImages)}

    @property
    def inputs(self) -> dict[str, str]:
        return _given({f"models.{name}": folder for name, folder in self.adapters.items()})

    @property
    def evaluation_sampling(self) -> run.SamplingConfig:
        """Of a model that costs most: one with an unconditional pass, if there is any."""
        return max(map(self.sampling_of, self.models), key=lambda sampling: sampling.guidance != 1)

    def settings_of(self, model: str) -> dict[str, Any]:
        """What its images depend on, as results.json says it; None = not known."""
        if given := self.given.get(model):
            size = {"height": self.model.height, "width": self.model.width}
            return given.model_dump(exclude={"images"}) | size
        return self.sampling_of(model).model_dump() | self.model.model_dump(mode="json")

    @property
    def judged(self) -> list[Judged]:
        return _judged("benchmarks", self.scored, models=len(self.models))

    @property
    def scored(self) -> list[run.BenchmarkConfig]:
        """The benchmarks, with the judge that `diversity` adds to those of several images."""
        if self.diversity is None:
            return self.benchmarks
        options = {"model": self.diversity.features}
        judge = {"diversity": learning.RewardConfig(name="diversity", options=options)}
        return [
            b.model_copy(update={"rewards": judge | b.rewards}) if b.images > 1 else b
            for b in self.benchmarks
        ]

    @property
    def evaluations(self) -> int:
        return 1

    @property
    def scales(self) -> dict[str, float]:
        own = {f"guidance.{model}": scale for model, scale in self.guidance.items()}
        return {"sampling.guidance": self.sampling.guidance, **own}

    def sampling_of(self, model: str) -> run.SamplingConfig:
        """How the images of one of the models are sampled."""
        scale = self.guidance.get(model, self.sampling.guidance)
        return self.sampling.model_copy(update={"guidance": scale})

    def problems(self) -> Iterator[str]:
        """Names that tables and files cannot hold or tell apart; models that are not there."""
        sizes = {f"benchmarks.{i}": benchmark.size for i, benchmark in enumerate(self.benchmarks)}
        yield from self.model.size_problems(sizes)
        yield from _same_names([("models", name) for name in self.models])
        columns = [{b.name, *b.judges} for b in self.scored]
        columns += [{"average"}, {"fidelity"}]  # of every table
        yield from _same_names([("benchmarks", name) for names in columns for name in names])
        named = {f"compare.{name}": [name, *others] for name, others in self.compare.items()}
        named["guidance"] = list(self.guidance)
        for key, models in named.items():
            for model in (m for m in models if m not in self.models):
                hint = did_you_mean(model, self.models)
                possible = ", ".join(self.models)
                yield f"{key}: no model is named {model!r}.{hint} Possible: {possible}."
        if self.diversity and all(benchmark.images == 1 for benchmark in self.benchmarks):
            yield (
                "diversity: no benchmark has several images of a prompt. Set `images` of one, such "
                "as benchmarks.0.images=4, or leave it out."
            )


def _given(sources: Mapping[str, str | None]) -> dict[str, str]:
    """Without what is null."""
    return {key: source for key, source in sources.items() if source is not None}


def _judged(place: str, benchmarks: Sequence[run.BenchmarkConfig], models: int = 1) -> list[Judged]:
    """Benchmarks, which are listed at a place."""
    judged = []
    for i, b in enumerate(benchmarks):
        prompts, images = {"prompts": b.prompts}, models * b.images
        judged.append(Judged(f"{place}.{i}", b.name, b.reward_keys, prompts, images, b.limit))
    return judged


def _same_names(names: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Names in tables, logs and folders that are given twice. names: (key in the config, name)."""
    counts = Counter(name.casefold() for _, name in names)  # a disk may ignore the case
    for key, name in dict.fromkeys(names):
        if counts.pop(name.casefold(), 1) > 1:
            yield f"{key}: the name {name!r} is taken in tables, logs or folders. Use another."


STAGES: dict[str, type[Stage]] = {  # by the value of `stage`
    "grpo": GrpoStage,
    "nft": NftStage,
    "awm": AwmStage,
    "opd": OpdStage,
    "sft": SftStage,
    "merge": MergeStage,
    "recipe": RecipeStage,
    "eval": EvalStage,
}
PLUGINS = "flowalign.algorithms"  # entry points: name of a stage -> its config class


def stage_names() -> list[str]:
    """The names of all stages: of STAGES, then of plugins."""
    return list(dict.fromkeys([*STAGES, *sorted(p.name for p in entry_points(PLUGINS))]))


def stage_class(name: str) -> type[Stage]:
    """The config class of a stage. A plugin is imported now; ConfigError if it cannot be."""
    if name in STAGES:
        return STAGES[name]
    (point, *_) = entry_points(PLUGINS).select(name=name)
    try:
        kind = point.load()
        if not issubclass(kind, TrainingStage):
            raise TypeError(f"{kind.__name__} is no TrainingStage")
    except Exception as error:
        text = f"stage: the plugin {name!r} ({point.value}) cannot be loaded: {error}"
        raise ConfigError([text]) from error
    return kind
