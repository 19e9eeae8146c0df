"""From the images of a rollout to the advantage of each: what GRPO, NFT and AWM share. The limit of
invalid images and the log of rewards serve every algorithm that learns from rewards.

The images are scored while the next are sampled, all processes see all scores, and an advantage is
relative to the group of its prompt. The variants are functions (`flowalign.credit`); the parts of
a reward that they need are collected here, the same on every process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.config import AdvantageConfig
from flowalign.config.learning import ADVANTAGES
from flowalign.report.pictures import score_text
from flowalign.rewards.scoring import AsyncScorer, TaskRewards
from flowalign.training import metrics
from flowalign.training.algorithm import Parts, Prepared, TrainingError, advantage_function
from flowalign.training.losses import clip_fraction
from flowalign.training.rollout import OnImages
from flowalign.training.run.processes import Means
from flowalign.types import PromptBatch, Rollout, Scores

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Credit(Prepared):
    """A rollout with the advantages of its images."""

    advantage: Tensor  # [B]; 0 where the reward failed


class Scored:
    """Scores the rollouts of a run. settings: how its rewards become advantages."""

    def __init__(self, parts: Parts, settings: AdvantageConfig) -> None:
        train = parts.config.train
        self.settings = settings
        self.accelerator = parts.accelerator
        rewards = parts.rewards.items()
        self.weights = {name: dict(reward.weights or {}) for name, reward in rewards}
        self.variant = advantage_function(settings.advantage)
        self.clipped = False  # no advantage so far
        self.max_invalid_share = train.max_invalid_share
        score = TaskRewards(parts.rewards)
        self.scoring = AsyncScorer(score, train.score_seconds)
        # a batch of images is scored while the next is sampled, unless a reward must see a group
        ahead = train.score_while_sampling and not score.groupwise
        self.on_images: OnImages | None = self._submit if ahead else None

    def credit(self, rollout: Rollout, update: int) -> Credit:
        """Score the images. The advantage of an image is relative to its group and, in some
        variants, to the images of its task in the batch of all processes. Kept are the images whose
        advantage is not 0. Raises TrainingError if the reward failed on too many images, or does
        not give a part that it weights."""
        assert rollout.images is not None
        if self.scoring.waiting != len(rollout):  # not all were submitted while sampling
            self.scoring.discard()
            self.scoring.submit(rollout.images, rollout.batch)
        scores = self.scoring.collect()
        batch = rollout.batch
        # the same numbers on every process, though one may lack a task
        names = sorted(set(gather_object(sorted(set(batch.tasks)))))
        task = torch.tensor([names.index(task) for task in batch.tasks])
        # of all processes, on the CPU: every process computes the same and takes its part
        value, valid, group, task = (
            gathered(self.accelerator, t) for t in (scores.value, scores.valid, rollout.group, task)
        )
        reasons = scores.failures.values()
        of_rewards = reward_metrics(names, task, value, valid, reasons, self.max_invalid_share)
        more: dict[str, Tensor] = {}
        if self.settings.advantage == "gdpo":
            more = self._parts(scores, valid, task, names)
        unclipped = self.variant(value, group, valid=valid, task=task, **more)
        limit = self.settings.advantage_clip
        advantages = unclipped.clamp(-limit, limit)
        clipped = float((unclipped.abs() > limit).float().mean())
        if clipped and self.settings.advantage not in ADVANTAGES and not self.clipped:
            self.clipped = True
            text = "update %d: %.0f %% of the advantages of %s are clipped: advantage_clip = %g"
            log.warning(text, update, 100 * clipped, self.settings.advantage, limit)
        first = self.accelerator.process_index * len(rollout)
        advantage = advantages[first : first + len(rollout)]
        measured = {
            metrics.KEPT_SHARE: float((advantages != 0).float().mean()),
            metrics.CLIPPED_ADVANTAGES: clipped,
            **of_rewards,
            **_part_means(scores),
        }
        for name, rows in rows_by_task(names, task, valid):
            measured[metrics.TASK_ADVANTAGE + name] = float(advantages[rows].abs().mean())
        return Credit(
            rollout=rollout,
            keep=advantage != 0,
            metrics=measured,
            notes=list(map(score_text, scores.value.tolist())),
            advantage=advantage.to(self.accelerator.device),
        )

    def _submit(self, start: int, images: Tensor, batch: PromptBatch) -> None:
        if start == 0:  # an interrupted rollout may have left scores
            self.scoring.discard()
        self.scoring.submit(images, batch)

    def _parts(
        self, scores: Scores, valid: Tensor, task: Tensor, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Parts and weights [K,N] of all processes; a process may lack some."""
        labels = sorted({label for name in names for label in self.weights[name]})
        lacking = torch.full((len(scores.value),), torch.nan)
        columns = torch.stack([scores.parts.get(label, lacking) for label in labels], 1)
        parts = gathered(self.accelerator, columns).T
        table = [[self.weights[name].get(label, 0.0) for name in names] for label in labels]
        weights = torch.tensor(table)[:, task]
        for number, name in enumerate(names):
            for label in self.weights[name]:
                given = parts[labels.index(label)][valid & (task == number)]
                if len(given) and given.isnan().all():
                    raise TrainingError(
                        f"the reward of task {name!r} has a weight for the part {label!r}, and its "
                        f"scores have no such part. Let `parts` of its Scores hold every key of "
                        "its `weights`, or use another `advantage`."
                    )
        return {"parts": parts, "weights": weights}


def gathered(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The values of all processes, on the CPU."""
    return accelerator.gather(values.to(accelerator.device)).cpu()  # type: ignore[union-attr]


def _part_means(scores: Scores) -> dict[str, float]:
    """The mean of every part over the images (of all processes) that have it."""
    means = Means()
    for name, part in scores.parts.items():
        finite = part[torch.isfinite(part)]
        means.add_sum(metrics.REWARD_PART + name, float(finite.sum()), len(finite))
    return dict(sorted(means.over_processes().items()))


def ratio_metrics(ratio: Tensor, clip_range: float) -> dict[str, float]:
    """What is logged of the ratios [b] of a micro-batch."""
    return {
        metrics.CLIP_FRACTION: float(clip_fraction(ratio, clip_range)),
        metrics.RATIO_ERROR: float((ratio.detach() - 1).abs().max()),
    }


def reward_metrics(
    names: Sequence[str],
    task: Tensor,
    value: Tensor,
    valid: Tensor,
    reasons: Iterable[str],
    limit: float,
) -> dict[str, float]:
    """What is logged of the rewards [B] of all processes. task [B]: positions in names. Raises
    TrainingError where the reward failed on more than a share `limit` of the images, or on all.
    reasons: why images of this process are invalid. All processes call it."""
    invalid = 1 - float(valid.float().mean())
    if invalid > limit or not valid.any():
        first = sorted(set(gather_object(list(set(reasons)))))[:3]
        raise TrainingError(
            f"the reward failed on {invalid:.0%} of the images, more than train.max_invalid_share "
            f"= {limit:.0%}: {'; '.join(first)}. Fix the reward and run again with --resume."
        )
    measured = {
        metrics.REWARD: float(value[valid].mean()),
        metrics.REWARD_STD: float(value[valid].std(correction=0)),
        metrics.INVALID_SHARE: invalid,
    }
    for name, rows in rows_by_task(names, task, valid):
        measured[metrics.TASK_REWARD + name] = float(value[rows].mean())
        measured[metrics.TASK_REWARD_STD + name] = float(value[rows].std(correction=0))
    return measured


def rows_by_task(names: Sequence[str], task: Tensor, valid: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The name of each task that has valid images, and their rows as a mask [B]; nothing where
    there is a single task."""
    for number, name in enumerate(names if len(names) > 1 else []):
        rows = valid & (task == number)
        if rows.any():
            yield name, rows
