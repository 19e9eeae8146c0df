"""Single-reward teachers: the loop with group-relative policy optimisation.

Flow-GRPO (2505.05470): rollouts by an SDE, advantages relative to the K images of a prompt, the
clipped ratio of PPO at every trained step, and optionally a KL to the base model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign import sde
from flowalign.backbone import Backbone
from flowalign.config import GrpoConfig as Settings
from flowalign.credit import ADVANTAGES, clip_advantage
from flowalign.loop import Pairs, Prepared, TrainingError
from flowalign.loop import velocity as velocity_of
from flowalign.losses import clip_fraction, kl_factors, policy_loss
from flowalign.rewards.scoring import Ahead
from flowalign.rollout import Schedule
from flowalign.types import PromptBatch, Rollout, Scores, StepLoss


class Grpo:
    """The algorithm: `score` judges images, `schedule` and `guidance` are the rollout's.

    while_sampling: a batch of images is scored while the next one is sampled (not for rewards that
    must see a whole group). seconds: images whose score takes longer are masked.
    """

    needs_images = needs_latents = True

    def __init__(
        self,
        settings: Settings,
        score: Callable[[Tensor, PromptBatch], Scores],
        backbone: Backbone,
        schedule: Schedule,
        accelerator: Accelerator,
        *,
        guidance: float,
        max_invalid_share: float,
        while_sampling: bool = False,
        seconds: float | None = None,
    ) -> None:
        self.settings, self.backbone = settings, backbone
        self.schedule, self.accelerator, self.guidance = schedule, accelerator, guidance
        self.kl_factors = kl_factors(schedule.sigmas, settings.kl)
        self.max_invalid_share = max_invalid_share
        self.scoring = Ahead(score, seconds)
        self.see = self._see if while_sampling else None
        self.advantage = torch.empty(0)

    def plan(self, update: int) -> Schedule:
        """The same for every update: all steps of the window."""
        return self.schedule

    def sources(self, tasks: list[str]) -> None:
        """The student samples."""

    def prepare(self, rollout: Rollout, update: int) -> Prepared:
        """Score the images; the advantage of each is relative to its group and, where the
        variant asks, to the images of its task in the batch of all processes."""
        scores = self._scores(rollout)
        device = self.accelerator.device
        names, mine = self._tasks(rollout.batch.tasks)
        value, valid, group, task = (
            self.accelerator.gather(t.to(device)).cpu()  # type: ignore[union-attr]
            for t in (scores.value, scores.valid, rollout.group, mine)
        )
        self._check(valid, scores)
        advantage = ADVANTAGES[self.settings.advantage](value, group, valid, task)
        advantage = clip_advantage(advantage, self.settings.advantage_clip)
        first = self.accelerator.process_index * len(rollout)
        self.advantage = advantage[first : first + len(rollout)].to(device)
        keep = self.advantage.cpu() != 0
        if self.settings.kl_weight > 0:
            keep = torch.ones_like(keep)
        metrics = {
            "reward": float(value[valid].mean()),
            "reward_std": float(value[valid].std(correction=0)),
            "invalid_share": 1 - float(valid.float().mean()),
            "kept_share": float((advantage != 0).float().mean()),
        }
        metrics |= by_task(names, task, value, valid, advantage)
        metrics |= self._parts(scores)
        captions = [
            f"{p}\n{v:.2f}"
            for p, v in zip(rollout.batch.prompts, scores.value.tolist(), strict=True)
        ]
        return Prepared(keep=keep, metrics=metrics, captions=captions)

    def loss(self, pairs: Pairs, velocity: Tensor) -> StepLoss:
        """The clipped policy loss, plus kl_weight times the KL to the base. The log shows the exact
        KL, whichever is weighed."""
        new = self.schedule.transition(pairs.x, velocity, pairs.steps)
        advantage = self.advantage[pairs.rows]
        x_next, old_log_prob = pairs.action()
        log_prob = sde.log_prob(new, x_next)
        elements, ratio = policy_loss(
            log_prob, old_log_prob, advantage, clip_range=self.settings.clip_range
        )
        policy = total = elements.mean()
        metrics = {
            "clip_fraction": float(clip_fraction(ratio, self.settings.clip_range)),
            "ratio_error": float((ratio.detach() - 1).abs().max()),
        }
        if self.settings.kl_weight > 0 or pairs.first:  # on one micro-batch it only shows drift
            with torch.no_grad(), self.backbone.base():
                reference = velocity_of(self.backbone, pairs, self.guidance)
            base = self.schedule.transition(pairs.x, reference, pairs.steps)
            kl = sde.kl(new, base)
            metrics["kl"] = float(kl.detach().mean())
            if self.settings.kl_weight > 0:
                factors = self.kl_factors.to(kl.device)[pairs.steps]
                total = total + self.settings.kl_weight * (factors * kl).mean()
        return StepLoss(total=total, policy=policy, metrics=metrics)

    def _see(self, start: int, images: Tensor, batch: PromptBatch) -> None:
        """Score these images now; the first of a rollout drop what an interrupted one left."""
        if start == 0:
            self.scoring.forget()
        self.scoring.submit(images, batch)

    def _scores(self, rollout: Rollout) -> Scores:
        """Of all images: those that were submitted while sampling, else all of them now."""
        assert rollout.images is not None
        if self.scoring.waiting != len(rollout):
            self.scoring.forget()
            self.scoring.submit(rollout.images, rollout.batch)
        return self.scoring.collect()

    def _tasks(self, mine: list[str]) -> tuple[list[str], Tensor]:
        """The names of the tasks in the batch of all processes, and which of them each image of
        this process has [B]: the same numbers everywhere, though a process may lack a task."""
        names = sorted(set(gather_object(sorted(set(mine)))))
        return names, torch.tensor([names.index(task) for task in mine])

    def _check(self, valid: Tensor, scores: Scores) -> None:
        share = 1 - float(valid.float().mean())
        if share > self.max_invalid_share or not valid.any():
            mine = set(scores.failures.values())
            reasons = sorted(set(gather_object(list(mine))))[:3]
            raise TrainingError(
                f"the reward failed on {share:.0%} of the images, more than "
                f"train.max_invalid_share = {self.max_invalid_share:.0%}: {'; '.join(reasons)}. "
                "Mend the reward and run again with --resume."
            )

    def _parts(self, scores: Scores) -> dict[str, float]:
        """Mean of every part over the images (of all processes) that have it."""
        mine = {}
        for name, part in scores.parts.items():
            known = part[torch.isfinite(part)]
            mine[name] = (float(known.sum()), len(known))
        everyone = gather_object([mine])  # names too: a process whose images all failed has none
        found = {}
        for name in sorted({name for each in everyone for name in each}):
            pairs = [each[name] for each in everyone if name in each]
            count = sum(n for _, n in pairs)
            total = sum(s for s, _ in pairs)
            found[f"reward/{name}"] = total / count if count else float("nan")
        return found


def by_task(
    names: list[str], task: Tensor, value: Tensor, valid: Tensor, advantage: Tensor
) -> dict[str, float]:
    """Reward, its std and the mean |advantage| of each task of a mixed batch, all [B] but the
    names; {} where there is one task."""
    found = {}
    for number, name in enumerate(names if len(names) > 1 else []):
        rows = valid & (task == number)
        if rows.any():
            found[f"task_reward/{name}"] = float(value[rows].mean())
            found[f"task_reward_std/{name}"] = float(value[rows].std(correction=0))
            found[f"task_advantage/{name}"] = float(advantage[rows].abs().mean())
    return found
