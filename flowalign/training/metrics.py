"""The names of what a run measures: the keys of metrics.jsonl, of the trackers and of the plots.

A line of metrics.jsonl is either an update or an evaluation: UPDATE, and numbers by name. Scripts
and notebooks read them, so names must not change. A constant that ends in "/" is the beginning of
several names, one for each task, step or benchmark: TEACHER_KL + "ocr" is "kl/ocr".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

UPDATE = "update"  # rollouts done when the line was written

# Every update
LOSS = "loss"
LEARNING_RATE = "lr"
GRADIENT_NORM = "grad_norm"  # before clipping
SKIPPED = "skipped_steps"  # optimizer steps skipped because of NaN or infinity
SECONDS_ROLLOUT = "seconds/rollout"
SECONDS_SCORE = "seconds/score"  # rewards or labels, without what ran during the rollout
SECONDS_UPDATE = "seconds/update"
SECONDS_HEARD = "seconds/image_drift"  # of the listeners (the alarm) on the rollout
SECONDS = (SECONDS_ROLLOUT, SECONDS_SCORE, SECONDS_UPDATE)
IMAGES_PER_SECOND = "images_per_second"  # of all processes
# Of all processes: forward passes of the transformer for one image (two with CFG), a backward pass
# counts as two. Not counted: evaluations, the alarm, recomputation by gradient checkpointing
EVALUATIONS = "evaluations"

# Learning from rewards
REWARD = "reward"
REWARD_STD = "reward_std"
REWARD_PART = "reward/"
TASK_REWARD = "task_reward/"
TASK_REWARD_STD = "task_reward_std/"
TASK_ADVANTAGE = "task_advantage/"  # mean of |advantage|
INVALID_SHARE = "invalid_share"
KEPT_SHARE = "kept_share"  # share of images whose advantage is not 0
CLIPPED_ADVANTAGES = "clipped_advantages"
MOVED_SHARE = "moved_share/"  # of a task's images, along their reward's gradient
MOVED_GAIN = "moved_gain/"  # what it gained them, mean
QUARTILE = "quartile/"  # of a prompt's rewards, from which on its images stay; mean
PAIR_ACCURACY = "pair_accuracy"  # share of pairs whose chosen image gained more
MARGIN = "margin"  # what it gained more, mean: of mean |v - (eps - x0)|^2, below the reference's
CHOSEN_GAIN = "chosen_gain"  # gain of the chosen image
TAU = "tau/"  # the price of the distance that they move is 1 / (2 tau)
CLIP_FRACTION = "clip_fraction"
RATIO_ERROR = "ratio_error"  # largest |ratio - 1| of a micro-batch
KL = "kl"  # to the base model, exact
VELOCITY_DRIFT = "velocity_drift"  # mean |v - v_base|^2 at trained states, where there is no KL

# Learning from teachers
DISTILL = "distill"
ANCHOR = "anchor"
STEP_WEIGHT = "weight/"  # of a trained step in the loss
TEACHER_KL = "kl/"
TEACHER_ERROR = "velocity_error/"  # in place of TEACHER_KL if the rollout has no noise
# At evaluations, mean |v - v_target|^2 over the base model's, at states that stay the same through
# the run (those of the teacher's trajectories), by task, and of all
FIXED_PATH, FIXED_MEAN = "fixed_path/", "fixed_path"

# Evaluations
EVAL = "eval/"
HEADLINE = "eval/headline"  # mean over the tasks' benchmarks; the kept adapter has the best
LOST = "eval/lost"  # how many benchmarks lost too many images; such a line has no HEADLINE
ALARMS = "alarms"
WATCHED = "watched/"  # a judge that is not trained: its change since the start

# The alarm: drift of a rollout's images from the base, in sigmas, by statistic
IMAGE_DRIFT = "image_drift/"
DRIFT_ALARMS = "image_drift_alarms"  # statistics beyond alarm.warn

STEP = "step_"  # start of the name of a schedule's step, after a "/"


def step_label(step: int) -> str:
    """The name of a schedule's step after a "/"; tasks have their own names."""
    return f"{STEP}{step}"


def is_scored(names: Iterable[str]) -> bool:
    """Whether an evaluation had rewards. Without them its HEADLINE is minus a distance."""
    return any(name.startswith(EVAL) and name != HEADLINE for name in names)


def headline_number(values: Mapping[str, float]) -> float:
    """The held-out score of an evaluation; without a reward the distance to the teachers."""
    return values[HEADLINE] if is_scored(values) else -values[HEADLINE]


def headline_metrics(values: Mapping[str, float]) -> str:
    """The headline of an evaluation as text."""
    number = f"{headline_number(values):.3f}"
    if is_scored(values):
        return f"held-out {number}"
    return f"held-out distance to the teachers {number} of the base model's"


# What a curve means, in a sentence below it; see `meaning`.
MEANINGS = {
    REWARD: "reward: the mean reward of the training images; should rise.",
    HEADLINE: "headline: the mean of the held-out scores; the adapter of its best value is kept.",
    WATCHED: "Judges that are not trained: their change since the start; none should fall.",
    FIXED_MEAN: "fixed_path: the mean over the tasks. Without rewards the adapter of its lowest "
    "value is kept.",
    DISTILL: "distill: the distance to the teachers; should fall.",
    ANCHOR: "anchor: the distance to the anchor; should stay small.",
    KL: "kl: how far the model has moved from the base; it grows slowly, and a jump is a warning.",
    VELOCITY_DRIFT: "velocity_drift: how far the model is from the base; a jump is a warning.",
    TEACHER_KL: "The distance to the teacher; should fall for every curve.",
    TEACHER_ERROR: "The distance to the teacher; should fall for every curve.",
    FIXED_PATH: "The distance to the target on the teacher's own path, over the base's: 0 is the "
    "teacher, 1 the base.",
    KEPT_SHARE: "kept_share: the share of images that count (advantage not 0); near 1 is good.",
    CLIPPED_ADVANTAGES: "clipped_advantages: the share that advantage_clip clips.",
    PAIR_ACCURACY: "pair_accuracy: the share of pairs that the model ranks as their voters did.",
    MARGIN: "margin: how much more the chosen images gained than the rejected ones; should rise.",
    CHOSEN_GAIN: "chosen_gain: below 0 the model fits the chosen images, too, worse than before.",
    CLIP_FRACTION: "clip_fraction: the share of clipped policy ratios; should be below 0.5.",
    INVALID_SHARE: "invalid_share: the share of images without a reward; should be 0.",
    SKIPPED: "skipped_steps: optimizer steps left out for NaN or infinity; should be 0.",
    LOSS: "loss: what the optimizer lowers; should fall.",
}


def meaning(name: str) -> str:
    """What a metric means, in a sentence; "" for one that needs none."""
    return MEANINGS.get(name) or MEANINGS.get(name[: name.find("/") + 1], "")
