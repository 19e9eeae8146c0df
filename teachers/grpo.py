"""Single-reward teachers: the loop with group-relative policy optimisation.

Flow-GRPO (2505.05470): rollouts by an SDE, advantages relative to the K images of a prompt, the
clipped ratio of PPO at every trained step, and optionally a KL to the base model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign import metrics, sde
from flowalign.backbone import Backbone
from flowalign.config import GrpoStage, OpdStage
from flowalign.loop import Pairs, Prepared, TrainingError
from flowalign.losses import (
    clip_fraction,
    guard_log_ratio,
    guard_weights,
    kl_factors,
    policy_loss,
)
from flowalign.parallel import Means
from flowalign.rewards.scoring import Ahead, ByTask
from flowalign.rollout import Schedule, window_of
from flowalign.snapshots import note
from flowalign.teachers.advantages import Advantages
from flowalign.types import PromptBatch, Reward, Rollout, Scores, StepLoss


@dataclass(frozen=True, kw_only=True)
class Credit(Prepared):
    """A rollout with the advantages of its images."""

    advantage: Tensor  # [B]; 0 where the reward failed


class Grpo:
    """The algorithm. rewards: by task name."""

    needs_images = needs_latents = True

    def __init__(
        self,
        config: GrpoStage | OpdStage,
        backbone: Backbone,
        accelerator: Accelerator,
        rewards: Mapping[str, Reward],
    ) -> None:
        self.settings, self.backbone, self.accelerator = config.grpo, backbone, accelerator
        self.guidance = config.rollout.guidance
        self.schedule, self.seed = Schedule.of(config, backbone), config.seed
        self.rollout = config.rollout
        self.kl_factors = kl_factors(self.schedule.sigmas, config.grpo.kl)
        self.guard_weights = guard_weights(self.schedule.sigmas)
        self.max_invalid_share = config.train.max_invalid_share
        self.advantages = Advantages(config.grpo, config.tasks, accelerator, rewards)
        score = ByTask(rewards)
        self.scoring = Ahead(score, config.train.score_seconds)
        # a batch of images is scored while the next is sampled, unless a reward must see a group
        ahead = config.train.score_while_sampling and not score.groupwise
        self.on_images = self._submit if ahead else None

    def plan(self, update: int) -> Schedule:
        """All steps of the update's window, which is a function of (seed, update)."""
        return replace(self.schedule, window=window_of(self.rollout, self.seed, update))

    def tensors(self) -> dict[str, list[Tensor]]:
        """What the advantages remember of earlier rollouts."""
        return self.advantages.tensors()

    def sources(self, tasks: list[str]) -> None:
        """The student samples."""

    def prepare(self, rollout: Rollout, update: int) -> Credit:
        """Score the images. The advantage of an image is relative to its group and, in some
        variants, to the images of its task in the batch of all processes."""
        assert rollout.images is not None
        if self.scoring.waiting != len(rollout):  # not all were submitted while sampling
            self.scoring.forget()
            self.scoring.submit(rollout.images, rollout.batch)
        scores = self.scoring.collect()
        device = self.accelerator.device
        # the same numbers on every process, though one may lack a task
        names = sorted(set(gather_object(sorted(set(rollout.batch.tasks)))))
        own = torch.tensor([names.index(task) for task in rollout.batch.tasks])
        value, valid, group, task = (
            self.accelerator.gather(t.to(device)).cpu()  # type: ignore[union-attr]
            for t in (scores.value, scores.valid, rollout.group, own)
        )
        self._check(valid, scores)
        # of all processes, on the CPU: every process computes the same and takes its part
        whole = self.advantages(
            scores, rollout.batch, update, value=value, valid=valid, group=group, task=task,
            names=names,
        )  # fmt: skip
        first = self.accelerator.process_index * len(rollout)
        advantage = whole[first : first + len(rollout)].to(device)
        # without an advantage only the KL has a gradient
        keep = (advantage.cpu() != 0) | (self.settings.kl_weight > 0)
        measured = {
            metrics.REWARD: float(value[valid].mean()),
            metrics.REWARD_STD: float(value[valid].std(correction=0)),
            metrics.INVALID_SHARE: 1 - float(valid.float().mean()),
            metrics.KEPT_SHARE: float((whole != 0).float().mean()),
        }
        measured |= {**by_task(names, task, value, valid, whole), **_parts(scores)}
        return Credit(
            rollout=rollout,
            keep=keep,
            metrics=measured,
            notes=list(map(note, scores.value.tolist())),
            advantage=advantage,
        )

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Credit) -> StepLoss:
        """The clipped policy loss, plus kl_weight times the KL to the base. With the ratio of
        GRPO-Guard, the policy loss of a step is weighted by `losses.guard_weights`."""
        s, x, sigma, cond = self.settings, pairs.x, pairs.sigma, pairs.conditioning
        new = self.schedule.transition(x, velocity, pairs.steps)
        advantage = prepared.advantage[pairs.rows]
        x_next, old = pairs.action()
        if s.ratio == "guard":
            assert pairs.mean is not None
            log_ratio = guard_log_ratio(new, pairs.mean, x_next)
            elements, ratio = policy_loss(
                log_ratio, torch.zeros_like(log_ratio), advantage, clip_range=s.clip_range
            )
            elements = self.guard_weights.to(elements.device)[pairs.steps] * elements
        else:
            log_prob = sde.log_prob(new, x_next)
            elements, ratio = policy_loss(log_prob, old, advantage, clip_range=s.clip_range)
        policy = total = elements.mean()
        measured = {
            metrics.CLIP_FRACTION: float(clip_fraction(ratio, s.clip_range)),
            metrics.RATIO_ERROR: float((ratio.detach() - 1).abs().max()),
        }
        if s.kl_weight > 0 or pairs.first:  # without a weight one micro-batch is enough for the log
            with torch.no_grad(), self.backbone.base():
                reference = self.backbone.velocity(
                    x, sigma, cond, guidance=self.guidance, rows=pairs.size
                )
            kl = sde.kl(new, self.schedule.transition(x, reference, pairs.steps))
            measured[metrics.KL] = float(kl.detach().mean())  # the exact one, whatever grpo.kl says
            if s.kl_weight > 0:
                factors = self.kl_factors.to(kl.device)[pairs.steps]
                total = total + s.kl_weight * (factors * kl).mean()
        return StepLoss(total=total, policy=policy, metrics=measured)

    def _submit(self, start: int, images: Tensor, batch: PromptBatch) -> None:
        if start == 0:  # an interrupted rollout may have left scores
            self.scoring.forget()
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
