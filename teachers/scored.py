"""From the images of a rollout to the advantage of each: what GRPO, NFT and AWM share.

The images are scored while the next are sampled, all processes see all scores, and an advantage is
relative to the group of its prompt (`flowalign.credit`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.config import AdvantageConfig
from flowalign.rewards.scoring import AsyncScorer, TaskRewards
from flowalign.teachers.advantages import Advantages
from flowalign.training import metrics
from flowalign.training.algorithm import Parts, Prepared, TrainingError
from flowalign.training.report.samples import note
from flowalign.training.rollout import OnImages
from flowalign.training.run.processes import Means
from flowalign.types import PromptBatch, Rollout, Scores


@dataclass(frozen=True, kw_only=True)
class Credit(Prepared):
    """A rollout with the advantages of its images."""

    advantage: Tensor  # [B]; 0 where the reward failed


class Scored:
    """Scores the rollouts of a run. settings: how its rewards become advantages."""

    def __init__(self, parts: Parts, settings: AdvantageConfig) -> None:
        config, rewards = parts.config, parts.rewards
        self.accelerator = parts.accelerator
        self.advantages = Advantages(settings, parts.accelerator, rewards, parts.prompts)
        self.max_invalid_share = config.train.max_invalid_share
        score = TaskRewards(rewards)
        self.scoring = AsyncScorer(score, config.train.score_seconds)
        # a batch of images is scored while the next is sampled, unless a reward must see a group
        ahead = config.train.score_while_sampling and not score.groupwise
        self.on_images: OnImages | None = self._submit if ahead else None

    def tensors(self) -> dict[str, list[Tensor]]:
        """What the advantages remember of earlier rollouts."""
        return self.advantages.tensors()

    def credit(self, rollout: Rollout, update: int) -> Credit:
        """Score the images. The advantage of an image is relative to its group and, in some
        variants, to the images of its task in the batch of all processes. Kept are the images whose
        advantage is not 0. Raises TrainingError if the reward failed on too many images."""
        assert rollout.images is not None
        if self.scoring.waiting != len(rollout):  # not all were submitted while sampling
            self.scoring.discard()
            self.scoring.submit(rollout.images, rollout.batch)
        scores = self.scoring.collect()
        device = self.accelerator.device
        # the same numbers on every process, though one may lack a task
        names = sorted(set(gather_object(sorted(set(rollout.batch.tasks)))))
        task = torch.tensor([names.index(task) for task in rollout.batch.tasks])
        value, valid, group, task = (
            self.accelerator.gather(t.to(device)).cpu()  # type: ignore[union-attr]
            for t in (scores.value, scores.valid, rollout.group, task)
        )
        self._check(valid, scores)
        # of all processes, on the CPU: every process computes the same and takes its part
        whole = self.advantages(
            scores, rollout.batch, update, value=value, valid=valid, group=group, task=task,
            names=names,
        )  # fmt: skip
        first = self.accelerator.process_index * len(rollout)
        advantage = whole[first : first + len(rollout)]
        measured = {
            metrics.REWARD: float(value[valid].mean()),
            metrics.REWARD_STD: float(value[valid].std(correction=0)),
            metrics.INVALID_SHARE: 1 - float(valid.float().mean()),
            metrics.KEPT_SHARE: float((whole != 0).float().mean()),
        }
        measured |= {**by_task(names, task, value, valid, whole), **_parts(scores)}
        return Credit(
            rollout=rollout,
            keep=advantage != 0,
            metrics=measured,
            notes=list(map(note, scores.value.tolist())),
            advantage=advantage.to(device),
        )

    def _submit(self, start: int, images: Tensor, batch: PromptBatch) -> None:
        if start == 0:  # an interrupted rollout may have left scores
            self.scoring.discard()
        self.scoring.submit(images, batch)

    def _check(self, valid: Tensor, scores: Scores) -> None:
        share = 1 - float(valid.float().mean())
        if share > self.max_invalid_share or not valid.any():
            reasons = sorted(set(gather_object(list(set(scores.failures.values())))))[:3]
            raise TrainingError(
                f"the reward failed on {share:.0%} of the images, more than "
                f"train.max_invalid_share = {self.max_invalid_share:.0%}: {'; '.join(reasons)}. "
                "Fix the reward and run again with --resume."
            )


def _parts(scores: Scores) -> dict[str, float]:
    """The mean of every part over the images (of all processes) that have it."""
    means = Means()
    for name, part in scores.parts.items():
        known = part[torch.isfinite(part)]
        means.add_sum(metrics.REWARD_PART + name, float(known.sum()), len(known))
    return dict(sorted(means.over_processes().items()))


def by_task(
    names: list[str], task: Tensor, value: Tensor, valid: Tensor, advantage: Tensor
) -> dict[str, float]:
    """Reward, its std and mean |advantage| of each task, from [B] each; {} for a single task."""
    measured = {}
    for number, name in enumerate(names if len(names) > 1 else []):
        rows = valid & (task == number)
        if rows.any():
            measured[metrics.TASK_REWARD + name] = float(value[rows].mean())
            measured[metrics.TASK_REWARD_STD + name] = float(value[rows].std(correction=0))
            measured[metrics.TASK_ADVANTAGE + name] = float(advantage[rows].abs().mean())
    return measured
