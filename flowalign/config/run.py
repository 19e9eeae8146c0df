"""Length, evaluation and alarm of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from flowalign.config.learning import RewardConfig
from flowalign.config.section import (
    Count,
    FileName,
    Location,
    Many,
    NotNegative,
    Positive,
    Seconds,
    Section,
    Seed,
    Share,
    Steps,
)
from flowalign.types import Problem


class TrainConfig(Section):
    """Length and housekeeping of the run."""

    updates: Many = 100
    """Number of rollouts."""
    checkpoint_every: Many = 20
    """Rollouts between two checkpoints."""
    keep: Many = 3
    """Number of newest checkpoints that are kept."""
    sample_every: Many = 20
    """Rollouts between two sample grids; the last rollout has one, too."""
    deterministic: bool = False
    """The same run gives the same bits on a GPU as well, also after a resume. Backward passes are
    slower, and an operation without a deterministic form raises, in rewards as well."""
    max_invalid_share: Share = 0.5
    """The run stops when a larger share of a rollout could not be scored."""
    max_skipped: Count = 5
    """An optimizer step is skipped if its loss or gradient is NaN or infinite. The run stops after
    so many updates in a row without a step."""
    score_while_sampling: bool = True
    """Score a batch of images while the next is sampled (not groupwise rewards)."""
    score_seconds: Seconds | None = 1800.0
    """A batch of images is invalid if its reward takes longer; null = no limit."""
    allow_changed_rewards: bool = Field(default=False, exclude=True)
    """A resumed run, or a recipe, continues even if the code of its rewards has changed. The search
    for the best held-out score then starts again. It is not recorded: set it again if needed."""
    timeout_seconds: Seconds | None = Field(default=None, examples=[7200.0])
    """With several processes, the run ends when one has waited this long for another; null = two
    hours. Each batch of a reward that hangs takes score_seconds."""
    max_minutes: Positive | None = Field(default=None, examples=[1430.0])
    """For a queue: the run ends with a checkpoint and exit status 75 before an update that would
    probably end later than this many minutes after the command's start. One update is always
    done. A recipe has the key `max_minutes` for all its stages together."""
    trackers: list[Literal["tensorboard", "wandb"]] = ["tensorboard"]
    """Where accelerate logs metrics, the config, sample grids and the tables of evaluations.
    TensorBoard's files are in <output>/tensorboard. A W&B run has the name of the output folder; a
    run that is resumed goes on in the same W&B run."""
    project: str = Field(default="flowalign", pattern=r"^\w[\w .-]{0,99}$")
    """Name of the project in the trackers; TensorBoard makes a folder of it."""


class BenchmarkConfig(Section):
    """Held-out prompts and the rewards that score their images."""

    name: FileName = Field(examples=["ocr"])
    """Its name in tables and files."""
    prompts: Location = Field(examples=["tiny/ocr_test", "prompts/test.jsonl"])
    """A .txt, a .jsonl, or tiny/NAME."""
    limit: Many | None = Field(default=None, examples=[128])
    """Only the first prompts of the file; null = all. A file that is sorted by tag starts with its
    first tags. A larger limit later reuses the images that are there."""
    images: Count = 1
    """Images per prompt, each with its own noise. The official GenEval has 4."""
    reward: RewardConfig | None = None
    """Scores its images. The score has the name of the benchmark."""
    rewards: dict[FileName, RewardConfig] = Field(
        default={}, examples=[{"pick": {"name": "pickscore"}}]
    )
    """More rewards, or several in place of `reward`. Images are sampled once, and each reward gives
    a score with the name NAME_JUDGE."""

    @property
    def judges(self) -> dict[str, RewardConfig]:
        """{name of a score in tables and files: its reward}."""
        single = {self.name: self.reward} if self.reward else {}
        return single | {f"{self.name}_{judge}": spec for judge, spec in self.rewards.items()}

    @property
    def reward_keys(self) -> dict[str, RewardConfig]:
        """{key below the benchmark: reward}, in the order of `judges`."""
        single = {"reward": self.reward} if self.reward else {}
        return single | {f"rewards.{judge}": spec for judge, spec in self.rewards.items()}

    def problems(self) -> Iterator[Problem]:
        if not self.judges:
            yield Problem("reward", "missing. Add `reward:` or `rewards:`.")


class SamplingConfig(Section):
    """How images are sampled for an evaluation."""

    steps: Steps = 10
    """Denoising steps, without noise (Euler); null = as `rollout.steps` of a run."""
    guidance: NotNegative = 4.5
    """CFG scale; 1 = no unconditional pass. null = that of the model's card, else 4.5."""
    seed: Seed = 1234
    """Seed of the initial noise, the same for every model."""
    batch_size: Many = 32
    """Images per forward pass of a process."""


class EvaluationConfig(Section):
    """Evaluation on the validation prompts while training."""

    every: Many = 20
    """Rollouts between two evaluations."""
    prompts: Many = 128
    """At most this many prompts per task: a fixed subset of the file with every metadata `tag` in
    its proportion. A larger subset contains a smaller one."""
    steps: Steps | None = Field(default=None, examples=[40])
    """Denoising steps; null = rollout.steps."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """CFG scale; null = rollout.guidance."""
    batch_size: Many | None = Field(default=None, examples=[16])
    """Images per forward pass; null = rollout.batch_size."""
    seed: Seed = 1234
    """Seed of the initial noise, the same at every evaluation."""
    max_invalid_share: Share = 0.05
    """An evaluation does not count if a larger share of a task's images could not be scored: it
    never selects the best adapter. The run stops if its last evaluation does not count."""
    watch: list[BenchmarkConfig] = Field(default=[])
    """Benchmarks with judges that the run does not learn from, such as those of other tasks. A
    warning is logged when one falls since the start, by more than three paired standard errors:
    docs/alarm.md."""
    on_fall: Literal["warn", "keep", "stop"] = "warn"
    """What follows where one of `watch` has fallen. keep: that adapter is not kept, however good
    its score is. stop: the run ends, too."""


class AlarmConfig(Section):
    """An alarm at images that drift from the base model's: see docs/alarm.md."""

    warn: Positive = 3.0
    """Sigmas of a statistic's drift beyond which it is warned of. One sigma is half of what honest
    training moved it; see flowalign.report.drift.compare."""
    stop: Positive | None = Field(default=None, examples=[6.0])
    """Sigmas beyond which the run ends; null = never."""


class TrainingAlarmConfig(AlarmConfig):
    """An alarm while training, which samples the base for it."""

    every: Many = 4
    """Rollouts between two checks. 4 cost about 3 % of a run."""
    images: Annotated[int, Field(ge=2, le=100_000)] = 32
    """Images that the base samples for a check, two of a prompt, and at most a quarter of the
    rollout's."""
    reference: Literal["base", "start"] = "base"
    """The reference images: from the base, or from the LoRA that the run starts from (lora.init),
    such as a LoRA of a style, which is meant to be far from the base."""
