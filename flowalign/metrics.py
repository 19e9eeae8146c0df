"""The names of what a run measures: the keys of metrics.jsonl, of the trackers and of the plots.

A line of metrics.jsonl is either an update or an evaluation, and holds UPDATE and numbers by name.
Scripts and notebooks read them, so a name stays as it is. "kl/ocr" is the metric "kl" of task ocr.
"""

from __future__ import annotations

from collections.abc import Iterable

UPDATE = "update"
"""Rollouts done when the line was written."""

# Every update
LOSS = "loss"
LEARNING_RATE = "lr"
GRADIENT_NORM = "grad_norm"
"""Before clipping."""
SECONDS_ROLLOUT = "seconds/rollout"
SECONDS_SCORE = "seconds/score"
"""Rewards or labels, as far as they do not overlap with the rollout."""
SECONDS_UPDATE = "seconds/update"
IMAGES_PER_SECOND = "images_per_second"

# Learning from rewards
REWARD = "reward"
REWARD_STD = "reward_std"
INVALID_SHARE = "invalid_share"
KEPT_SHARE = "kept_share"
"""The share of images whose advantage is not 0."""
CLIP_FRACTION = "clip_fraction"
RATIO_ERROR = "ratio_error"
"""The largest |ratio - 1| of a micro-batch."""
KL = "kl"
"""To the base model, exact."""

# Learning from teachers
DISTILL = "distill"
ANCHOR = "anchor"
VELOCITY_ERROR = "velocity_error"
"""In place of "kl/..." where the rollout has no noise."""

# Evaluations
EVAL = "eval/"
HEADLINE = "eval/headline"
"""The mean over the benchmarks that are aimed at; it chooses the adapter that is kept."""
LOST = "eval/lost"
"""How many benchmarks lost too many images; such a line has no headline."""
ALARMS = "alarms"


def reward_part(name: str) -> str:
    """The mean of one part of the reward."""
    return f"{REWARD}/{name}"


def task_reward(task: str) -> str:
    """The mean reward of one task of a mixed batch."""
    return f"task_reward/{task}"


def task_reward_std(task: str) -> str:
    """The standard deviation of the rewards of one task."""
    return f"task_reward_std/{task}"


def task_advantage(task: str) -> str:
    """The mean |advantage| of one task."""
    return f"task_advantage/{task}"


def weight(step: int) -> str:
    """The weight of a trained step in the distillation loss."""
    return f"weight/{step_label(step)}"


def step_label(step: int) -> str:
    """How a step of the schedule is called after the slash; tasks are called by their names."""
    return f"step_{step}"


def teacher_error(label: str, *, noisy: bool = True) -> str:
    """The distance to the teacher on one task or step: a KL, or without noise a velocity error."""
    return f"{KL if noisy else VELOCITY_ERROR}/{label}"


def gradient_cosine(one: str, other: str) -> str:
    """The cosine of the gradients of two tasks."""
    return f"gradient_cosine/{one}~{other}"


def is_evaluation(names: Iterable[str]) -> bool:
    """Whether a line of the log is an evaluation."""
    return any(name.startswith(EVAL) for name in names)
