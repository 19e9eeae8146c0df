"""The base of all training stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from flowalign.config import learning, run
from flowalign.config.learning import LabellerConfig, TeacherConfig
from flowalign.config.model import LoraConfig, ModelConfig
from flowalign.config.rollout import RolloutConfig
from flowalign.config.section import Seed
from flowalign.config.stages.base import Job, Judged, either, judged_at, same_names
from flowalign.types import Problem


class TrainingStage(Job):
    """A training run. What it learns from depends on the stage."""

    trains = True
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
    """An alarm at drift; null = none."""

    @property
    def guidance(self) -> float:
        """The CFG scale for which the adapter is trained."""
        return self.rollout.guidance

    @property
    def loss_guidance(self) -> float:
        """The CFG scale of the velocities in the loss."""
        return self.guidance

    @property
    def needs_actions(self) -> bool:
        """Whether the loss needs the sampled successors of the states and their log-probs."""
        return self.learns_from_rewards

    @property
    def needs_noise(self) -> bool:
        """Whether rollouts without noise teach it nothing."""
        return self.needs_actions

    @property
    def clip_ranges(self) -> dict[str, float]:
        """{config key: clip range} of ratios of transitions."""
        return {}

    @property
    def images(self) -> int:
        return self.train.updates * self.rollout.images

    @property
    def optimizer_steps(self) -> int:
        return self.train.updates * self.optimizer.updates_per_rollout

    @property
    def patience(self) -> int | None:
        """The number of evaluations without progress after which a run ends; None = it does not."""
        return None

    @property
    def unrewarded(self) -> bool:
        """Whether evaluations have no reward: they measure the distance to the targets."""
        return False

    @property
    def evaluates(self) -> bool:
        """Whether held-out scores are taken while training, and choose the adapter to keep."""
        scored = self.unrewarded or any(task.evaluated for task in self.tasks)
        return self.evaluation is not None and scored

    @property
    def evaluation_sampling(self) -> run.SamplingConfig:
        """The sampling of evaluations: like the rollouts, unless `evaluation` says otherwise."""
        evaluation = self.evaluation or run.EvaluationConfig()
        rollout = self.rollout
        return run.SamplingConfig(
            steps=evaluation.steps or rollout.steps,
            guidance=either(evaluation.guidance, rollout.guidance),
            seed=evaluation.seed,
            batch_size=evaluation.batch_size or rollout.batch_size,
        )

    @property
    def watched(self) -> list[run.BenchmarkConfig]:
        return self.evaluation.watch if self.evaluation else []

    @property
    def judged(self) -> list[Judged]:
        judged = judged_at("evaluation.watch", self.watched)
        for index, task in enumerate(self.tasks):
            rewards = {"reward": task.reward} if task.reward else {}
            prompts = {"prompts": task.prompts}
            if task.validation is not None:
                prompts["validation"] = task.validation
            evaluated = int(self.evaluation is not None and task.evaluated)
            limit = self.evaluation.prompts if self.evaluation else None
            judged.append(Judged(f"tasks.{index}", task.name, rewards, prompts, evaluated, limit))
        return judged

    # Its teachers, where it has any ------------------------------------------------------------

    @property
    def labellers(self) -> Mapping[str, LabellerConfig]:
        """{config key: teacher}, with the anchor; empty for a stage without teachers."""
        return {}

    @property
    def routing(self) -> dict[str, str]:
        """Task -> name of its teacher; empty for a stage without teachers."""
        return {}

    @property
    def extrapolated(self) -> dict[str, TeacherConfig]:
        """{config key: teacher} of the teachers whose targets are not their own velocities."""
        return {}

    def guidance_of(self, teacher: LabellerConfig) -> float:
        return either(teacher.guidance, self.guidance)

    @property
    def mixtures(self) -> dict[str, float]:
        """{config key: CFG scale} of the labellers whose scale is not the student's."""
        scales = {key: self.guidance_of(teacher) for key, teacher in self.labellers.items()}
        return {key: scale for key, scale in scales.items() if scale != self.guidance}

    @property
    def bases(self) -> dict[str, ModelConfig]:
        bases = {}
        for key, teacher in self.labellers.items():
            if teacher.base is not None:
                changes = teacher.model_dump(include={"revision", "quantization"})
                changes |= {"id": teacher.base, "dtype": teacher.dtype or self.model.dtype}
                bases[key] = self.model.model_copy(update=changes)
        return bases

    @property
    def scales(self) -> dict[str, float]:
        sections: dict[str, Any] = {"rollout": self.rollout, **self.labellers}
        if self.evaluation:
            sections["evaluation"] = self.evaluation
        scales = {f"{key}.guidance": section.guidance for key, section in sections.items()}
        return {key: scale for key, scale in scales.items() if scale is not None}

    @property
    def inputs(self) -> dict[str, str]:
        adapters = {key: teacher.adapter for key, teacher in self.labellers.items()}
        if "anchor" in adapters:  # the other places name a teacher, whose one file this is
            adapters["anchor.adapter"] = adapters.pop("anchor")
        sources = {"lora.init": self.lora.init} | adapters
        return {key: source for key, source in sources.items() if source is not None}

    def guidance_at(self, key: str) -> float:
        label = self.labellers.get(key.removesuffix(".adapter"))
        return self.guidance_of(label) if label else self.rollout.guidance

    def problems(self) -> Iterator[Problem]:
        rollout = self.rollout
        updates = self.optimizer.updates_per_rollout
        if self.needs_noise and (rollout.kind == "ode" or rollout.noise_level == 0):
            text = "adds no noise, which this loss needs. Use kind 'sde', level 0.7."
            if rollout.kind == "ode":
                yield Problem("rollout.kind", f"'ode' {text}")
            else:
                yield Problem("rollout.noise_level", f"0 {text}")
        if self.learns_from_rewards and rollout.group_size < 2:
            text = "an advantage compares the images of a prompt. Use 2 or more."
            yield Problem("rollout.group_size", f"got {rollout.group_size}; {text}")
        if rollout.prompts % updates:  # advantages need all images of a prompt in one step
            text = f"{rollout.prompts} prompts cannot be shared evenly among"
            text += f" optimizer.updates_per_rollout = {updates}. Use a multiple of {updates}."
            yield Problem("rollout.prompts", text)
        for index, task in enumerate(self.tasks):
            evaluated = self.evaluation and task.validation and not self.unrewarded
            if task.reward is None and (self.learns_from_rewards or evaluated):
                why = "it is evaluated. Leave out its `validation`, or add"
                if self.learns_from_rewards:
                    why = "this run learns from it. Add"
                yield Problem(
                    f"tasks.{index}.reward", f"missing, and {why} the keys name, options."
                )
            elif task.reward and self.evaluation and not task.validation:
                text = "missing, though `evaluation` is on. Name a prompt set that is not trained"
                yield Problem(
                    f"tasks.{index}.validation", f"{text} on, or write `evaluation: null`."
                )
            if task.teacher and not self.routing:
                text = f"{task.teacher!r}, but {self.stage!r} has no teachers. Leave it out"
                yield Problem(f"tasks.{index}.teacher", f"{text}, or use stage 'opd' or 'sft'.")
        if self.alarm and self.alarm.reference == "start" and not self.lora.init:
            yield Problem("alarm.reference", "'start' is the base. Use 'base', or give lora.init.")
        if self.watched and not self.evaluates:
            yield Problem(
                "evaluation.watch", "no task has `validation` and `reward`: nothing is evaluated."
            )
        names = [("tasks", task.name) for task in self.tasks]
        yield from same_names(
            names + [("evaluation.watch", n) for b in self.watched for n in b.judges]
        )
