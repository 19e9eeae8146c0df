"""Sections on learning: tasks, rewards, advantages, teachers, the optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from flowalign.config.model import Pipeline
from flowalign.config.section import (
    Count,
    Decay,
    FileName,
    Location,
    Many,
    NotNegative,
    Positive,
    Section,
    as_tuple,
    did_you_mean,
)
from flowalign.system.files import expanded
from flowalign.system.packages import entry_points
from flowalign.types import Problem


def _expanded(option: Any) -> Any:
    """An option in which all texts that begin like a path are `expanded`."""
    if isinstance(option, dict):
        return {key: _expanded(value) for key, value in option.items()}
    if isinstance(option, list):
        return list(map(_expanded, option))
    path = isinstance(option, str) and re.match(r"(~[\w.-]*|\$\w+|\$\{\w+\})/", option)
    return expanded(option) if path else option


class RewardConfig(Section):
    """A reward by its registered name."""

    name: str = Field(examples=["ocr"])
    """Name in flowalign.rewards, built in or plugged in."""
    options: Annotated[dict[str, Any], AfterValidator(_expanded)] = {}
    """Keyword arguments of the reward."""


class TaskConfig(Section):
    """A named group of prompts with its own reward or teacher."""

    name: FileName = Field(examples=["ocr"])
    """Its name in logs, and of its teacher if `teacher` is null."""
    prompts: Location = Field(examples=["tiny/ocr_train", "prompts/train.jsonl"])
    """Training prompts: a .txt, a .jsonl, or tiny/NAME."""
    validation: Location | None = Field(default=None, examples=["tiny/ocr_test", "my_test.jsonl"])
    """Held-out prompts, in the same formats."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of every batch, relative to the other tasks."""
    reward: RewardConfig | None = None
    """Scores its images. opd and sft use it, with `validation`, only to evaluate: a task without
    both is trained and not evaluated. An opd run in which every task has `validation` and none a
    reward keeps the adapter of the least distance to its targets (student.fixed_prompts)."""
    teacher: str | None = Field(default=None, examples=["ocr"])
    """The teacher that labels its images (opd, sft); null = the teacher with the task's name."""

    @property
    def evaluated(self) -> bool:
        """Whether there are held-out prompts, and a reward that scores them."""
        return self.validation is not None and self.reward is not None


ADVANTAGES = ("group_std", "batch_std", "gaussian", "gdpo")
ADVANTAGE_PLUGINS = "flowalign.advantages"  # entry points: name -> module:function


def _known_advantage(name: str) -> str:
    known = [*ADVANTAGES, *(point.name for point in entry_points(ADVANTAGE_PLUGINS))]
    if ":" not in name and name not in known:
        listed = ", ".join(map(repr, known))
        hint = did_you_mean(name, known)
        raise ValueError(f"got the text {name!r}; want {listed} or module:function.{hint}")
    return name


AdvantageName = Annotated[str, AfterValidator(_known_advantage)]


class AdvantageConfig(Section):
    """How rewards become advantages."""

    advantage: AdvantageName = "group_std"
    """group_std, batch_std, gaussian or gdpo (flowalign.credit), or yours: an entry point of
    flowalign.advantages, or module:function. Statistics over a batch are per task. gdpo needs a
    reward with several parts (`weighted`)."""
    advantage_clip: Positive = 5.0
    """Advantages are clipped to +- this."""


class LabellerConfig(Section):
    """A frozen velocity field: a base, and perhaps an adapter of it."""

    adapter: Location | None = Field(examples=["runs/teacher_ocr/adapter"])
    """Adapter folder or Hub id; null = the base itself."""
    base: Pipeline | None = Field(default=None, examples=["stabilityai/stable-diffusion-3.5-large"])
    """Another base (a folder or Hub id), such as a larger one, with the VAE, text encoders and
    scheduler of model.id: only its transformer is loaded. null = the student's base."""
    revision: str | None = Field(default=None, examples=["main"])
    """Branch, tag or commit of that base on the Hub."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of its transformer and of the adapter on it; null = model.dtype."""
    quantization: Literal["nf4", "fp8"] | None = None
    """Its transformer is stored in fewer bits, as with model.quantization."""
    device: str | None = Field(default=None, pattern=r"^[a-z]+(:\d+)?$", examples=["cuda:1", "cpu"])
    """Its device, with a copy for each process; null = the device of the process."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """Its CFG scale; null = the student's. A larger scale is distilled into the student; with
    a smaller one the student unlearns its own."""

    def problems(self) -> Iterator[Problem]:
        for key in ("revision", "dtype", "quantization", "device"):
            if self.base is None and getattr(self, key) is not None:
                yield Problem(key, "it is of `base`, which is null. Name a base, or leave it out.")


class TeacherConfig(LabellerConfig):
    """A teacher of the tasks that are routed to it."""

    extrapolate: Annotated[float, Field(ge=0, le=10)] = 1.0
    """lambda of the target v_ref + lambda (v_teacher - v_ref): 1 is the teacher itself, above 1 the
    target lies beyond it (ExOPD, 2602.12125). Other than 1, a label takes one more forward pass."""
    reference: Literal["base", "start"] = "base"
    """v_ref: the base, or what the student starts from (lora.init)."""


class OptimizerConfig(Section):
    """AdamW, its schedule and the size of its steps."""

    lr: Positive = 1e-4
    """Learning rate after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay at lr, or fall to 0 at the end of train.updates."""
    weight_decay: NotNegative = 1e-4
    """Decoupled weight decay."""
    betas: Annotated[tuple[Decay, Decay], as_tuple] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Positive = 1.0
    """The gradient's norm is clipped to this."""
    warmup: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Optimizer steps of linear warm-up. The first of them has a learning rate of 0."""
    updates_per_rollout: Count = 1
    """Optimizer steps per rollout, each on an equal share of its prompts."""
    micro_batch: Many = 16
    """(image, step) pairs per forward and backward pass."""


class EmaConfig(Section):
    """An exponential moving average of the adapter: it is what is evaluated and saved."""

    decay: Decay = 0.9
    """Share of the old average that is kept. After n optimizer steps it is at most n / (9 + n), so
    0.9 is reached after 80."""
    every: Many = 8
    """Optimizer steps between two averagings. Before the first one, the adapter itself is evaluated
    and saved. Steps since the last one count in proportion."""
