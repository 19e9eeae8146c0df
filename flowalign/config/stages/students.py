"""Stages that learn from teachers, to which tasks are routed: on-policy distillation and SFT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from flowalign.config.learning import LabellerConfig, TeacherConfig
from flowalign.config.section import Count, FileName, Many, NotNegative, Positive, Section, Steps
from flowalign.config.stages.base import either
from flowalign.config.stages.training import TrainingStage
from flowalign.types import Problem


class DistillationStage(TrainingStage):
    """A student that learns from teachers: each task is routed to one of them."""

    teachers: dict[FileName, TeacherConfig] = Field(
        min_length=1, examples=[{"ocr": {"adapter": "runs/ocr"}}]
    )
    """Teachers by name."""

    @property
    def routing(self) -> dict[str, str]:
        return {task.name: task.teacher or task.name for task in self.tasks}

    @property
    def labellers(self) -> Mapping[str, LabellerConfig]:
        return {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}

    @property
    def extrapolated(self) -> dict[str, TeacherConfig]:
        return {f"teachers.{n}": t for n, t in self.teachers.items() if t.extrapolate != 1}

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        names = sorted(self.teachers)
        routing = self.routing
        for index, task in enumerate(self.tasks):
            if routing[task.name] not in names:
                text = f"no teacher {routing[task.name]!r}; there are {names}. Name one of these"
                yield Problem(f"tasks.{index}.teacher", f"{text}, or add it under `teachers`.")
        for name in sorted(self.teachers.keys() - set(routing.values())):
            yield Problem(
                f"teachers.{name}", f"no task is routed to it. Give one `teacher: {name}`."
            )


class AnchorConfig(LabellerConfig):
    """Manifold-anchor regularisation (MAR): a second teacher for the images of every task."""

    weight: NotNegative = 0.04
    """Lambda, relative to the distillation loss."""


class StatesConfig(Section):
    """Which noise levels of a rollout are trained, of rollout.window."""

    select: Literal["all", "random", "low_noise", "high_noise"] = "all"
    """all, or `count` steps that are drawn again for every update. random: any steps. low_noise,
    high_noise: by Beta(5, 2), Beta(2, 5) over the place in the window."""
    count: Count = 1
    """Number of steps (unused with all). The rollout stops at the last one."""


class StudentConfig(Section):
    """On-policy distillation: the loss between the student and its teachers."""

    gradient: Literal["pathwise", "policy", "published"] = "pathwise"
    """pathwise: through the weighted velocity distance. policy: a clipped policy gradient on the
    teacher's log-ratio. published: the official arithmetic."""
    weighting: Literal["kl", "published", "mean", "velocity"] = "velocity"
    """w(sigma) of the distance w |v - v_teacher|^2; see flowalign.training.losses.step_weights. The
    paper has kl and all noise levels."""
    noise_levels: StatesConfig = StatesConfig(select="high_noise")
    guidance: NotNegative | None = Field(default=None, examples=[1.0])
    """CFG scale of the student in the loss; null = rollout.guidance."""
    clip_range: Positive = 1e-4
    """PPO's epsilon (policy, published)."""
    advantage_clip: Positive = 5.0
    """Advantages are clipped to +- this (policy, published)."""
    label_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the stored labels."""
    label_batch: Many = 64
    """(image, step) pairs per forward pass of the teachers."""
    substeps: Count = 1
    """Euler steps of a teacher for one of the student. Above 1, labels are the mean velocity over
    them: the student learns to sample in few steps, from teachers that take many. It is right at
    the steps of its rollouts alone, by Euler steps."""
    fixed_prompts: Annotated[int, Field(ge=0, le=10_000)] = 8
    """Prompts a task whose teachers' states stay the same through the run. Every evaluation
    measures the distance to the target there; on the student's own path the states move with the
    student. 0 = not measured."""
    patience: Many | None = Field(default=None, examples=[3])
    """The run ends if the mean of these distances on the teachers' paths has not fallen for so
    many evaluations; null = at train.updates."""

    def problems(self) -> Iterator[Problem]:
        if self.patience is not None and not self.fixed_prompts:
            yield Problem("patience", "it needs fixed_prompts, which are 0.")
        if self.gradient == "published" and self.weighting != "published":
            yield Problem("weighting", f"gradient {self.gradient!r} has 'published' only. Use it.")


class OpdStage(DistillationStage):
    """A student by on-policy distillation from routed teachers.

    *Choose it when* you have three LoRAs or more, or rewards that disagree. *Otherwise* merge two,
    or train on all rewards that agree (docs/choosing.md).

    Start it from the average of the teachers: after 20 rollouts on the tiny world it has .855 from
    there, and .826 from nothing (docs/log). Guidance counts once: labels at a CFG scale above
    1 are for a student that is sampled at 1. One noise level costs a third of three, and
    is .016 ± .009 below them. A prompt has one teacher: where an image needs two, merge these.
    """

    algorithm = "flowalign.training.student.opd:Opd"
    stage: Literal["opd"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers, on the student's own trajectories."""
    student: StudentConfig = StudentConfig()
    anchor: AnchorConfig | None = None
    """The anchor of MAR; null = none."""

    @property
    def guidance(self) -> float:
        return either(self.student.guidance, self.rollout.guidance)

    @property
    def needs_actions(self) -> bool:
        return self.student.gradient != "pathwise"

    @property
    def needs_noise(self) -> bool:
        return self.needs_actions or self.student.weighting in ("kl", "published")

    @property
    def clip_ranges(self) -> dict[str, float]:
        return {"student.clip_range": self.student.clip_range} if self.needs_actions else {}

    @property
    def patience(self) -> int | None:
        return self.student.patience

    @property
    def unrewarded(self) -> bool:
        held_out = all(task.validation and not task.reward for task in self.tasks)
        return held_out and self.student.fixed_prompts > 0

    @property
    def labellers(self) -> Mapping[str, LabellerConfig]:
        return {**super().labellers, **({"anchor": self.anchor} if self.anchor else {})}

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        # PPO's ratio compares the new policy with the one that sampled, at its CFG scale.
        if self.needs_actions and self.guidance != self.rollout.guidance:
            text = f"{self.guidance}, but the rollout has {self.rollout.guidance}: a ratio of two"
            yield Problem(
                "student.guidance", f"{text} policies. Use the same, or gradient 'pathwise'."
            )
        for name, teacher in self.teachers.items():
            if teacher.reference == "start" and not self.lora.init:
                yield Problem(
                    f"teachers.{name}.reference", "'start' is the base. Use it, or give lora.init."
                )
        if self.student.substeps > 1 and self.rollout.kind != "ode":
            text = f"{self.student.substeps}, but a step with noise has no path of its own"
            yield Problem("student.substeps", f"{text}. Use rollout.kind 'ode'.")
        if self.student.substeps > 1:
            yield from self._jump_problems()
        if self.student.patience is not None and self.evaluation is None:
            yield Problem("student.patience", "it counts evaluations, and evaluation is null.")
        states, width = self.student.noise_levels, self.rollout.width
        if states.select != "all" and states.count > width:
            text = f"{states.count}, and rollout.window has only {width} steps"
            yield Problem("student.noise_levels.count", f"{text}. Use at most {width}.")

    def _jump_problems(self) -> Iterator[Problem]:
        """Problems of substeps. With them a velocity is a mean over a step of the rollout, which is
        right for Euler steps of that size alone."""
        steps = self.rollout.steps
        jumps = f"the student learns the jumps of {steps} Euler steps (student.substeps)"
        if self.rollout.solver != "euler":
            yield Problem("rollout.solver", f"{self.rollout.solver!r}, but {jumps}. Use 'euler'.")
        if self.evaluation and self.evaluation.steps not in (None, steps):
            yield Problem(
                "evaluation.steps", f"{self.evaluation.steps}, but {jumps}. Use null, or {steps}."
            )


class SftConfig(Section):
    """Cold start: flow matching on images that the routed teachers sample."""

    noise_levels: Steps = 4
    """Noise levels at which each image is trained."""


class SftStage(DistillationStage):
    """A cold start from routed teachers' images.

    *Choose it when* you compare with the paper, which has it. *Otherwise* start a student from the
    merge, which is free: a student forgets its start in a few rollouts (docs/log).
    """

    algorithm = "flowalign.training.student.sft:Sft"
    stage: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Learn from teachers' images."""
    sft: SftConfig = SftConfig()

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for key, teacher in self.extrapolated.items():
            text = f"{teacher.extrapolate}, but `sft` learns from images of the teacher itself"
            yield Problem(f"{key}.extrapolate", f"{text}. Leave it out, or use stage opd.")
