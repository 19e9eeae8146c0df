"""From the scores of a rollout to the advantages of its images, by the variant that a config names.

The variants are functions (flowalign.credit). Some need more than the rewards, which is collected
here: the parts of a composed reward, from all processes, and running averages of earlier rewards
(`adora` and `gated` weight prompts by them). The averages are the same on every process and are
saved with checkpoints, so that a resumed run has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign.config import AdvantageConfig, EarlierConfig
from flowalign.credit import ADVANTAGES, clip_advantage
from flowalign.rewards import as_reward
from flowalign.training.algorithm import TrainingError
from flowalign.types import PromptBatch, Reward, Scores


class Advantages:
    """The advantages of a stage that learns from rewards. rewards, prompts: by task
    name."""

    def __init__(
        self,
        settings: AdvantageConfig,
        accelerator: Accelerator,
        rewards: Mapping[str, Reward],
        prompts: Mapping[str, PromptBatch],
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.weights = {
            name: dict(as_reward(reward).weights or {}) for name, reward in rewards.items()
        }
        self.running = RunningRewards.of(settings, prompts)

    def __call__(
        self,
        scores: Scores,
        batch: PromptBatch,
        update: int,
        *,
        value: Tensor,
        valid: Tensor,
        group: Tensor,
        task: Tensor,
        names: Sequence[str],
    ) -> Tensor:
        """Clipped advantages [N] of the N images of all processes, the same on each.

        scores, batch: of this process. value, valid, group, task [N]: gathered, on the CPU; task:
        positions in names. Raises TrainingError if a reward does not give a part that it weights.
        """
        more: dict[str, Any] = {}
        if self.settings.advantage == "gdpo":
            more = self._parts(scores, valid, task, names)
        elif self.running:
            more = self._running(self.running, batch, update, value, valid)
        variant = ADVANTAGES[self.settings.advantage]
        advantage = variant(value, group, valid=valid, task=task, **more)
        return clip_advantage(advantage, self.settings.advantage_clip)

    def tensors(self) -> dict[str, list[Tensor]]:
        """What a checkpoint holds: {name: tensors}, written to in place when one is read."""
        return {"earlier": self.running.tensors()} if self.running else {}

    def _parts(
        self, scores: Scores, valid: Tensor, task: Tensor, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Parts and weights [K,N] of all processes; a process may lack some."""
        labels = sorted({label for name in names for label in self.weights[name]})
        lacking = torch.full((len(scores.value),), torch.nan)
        columns = torch.stack([scores.parts.get(label, lacking) for label in labels], 1)
        parts = self._gathered(columns).T
        table = torch.tensor([[self.weights[name].get(label, 0.0) for label in labels]
                              for name in names])  # fmt: skip
        weights = table[task].T
        for number, name in enumerate(names):
            for label, part in zip(labels, parts, strict=True):
                rows = valid & (task == number)
                if label in self.weights[name] and rows.any() and part[rows].isnan().all():
                    raise TrainingError(
                        f"the reward of task {name!r} has a weight for the part {label!r}, and its "
                        f"scores have no such part. Let `parts` of its Scores hold every key of "
                        "its `weights`, or use another `advantage`."
                    )
        return {"parts": parts, "weights": weights}

    def _running(
        self,
        running: RunningRewards,
        batch: PromptBatch,
        update: int,
        value: Tensor,
        valid: Tensor,
    ) -> dict[str, Any]:
        """The running averages of all images. This rollout is added to them."""
        keys = self._gathered(running.keys_of(batch))
        average = running.average(keys, update)
        running.add(keys, value, valid, update)
        settings = self.settings.earlier or EarlierConfig()
        if self.settings.advantage == "gated":
            return {"before": average, "attenuate": settings.attenuate}
        return {
            "bar": average,
            "threshold": settings.threshold,
            "amplify": settings.amplify,
        }

    def _gathered(self, values: Tensor) -> Tensor:
        gathered = self.accelerator.gather(values.to(self.accelerator.device))
        return gathered.cpu()  # type: ignore[union-attr]


Key = tuple[str, ...]  # (task,) or (task, prompt)


class RunningRewards:
    """Exponential moving averages of rewards, one for each key, over the rollouts that have it.

    decay: the share of the old average that is kept when a rollout is added. The first rollout of a
    key sets its average.

    A rollout that was added does not count before the next update begins: one that is interrupted
    is sampled and added again, and its checkpoint may hold it already.
    """

    def __init__(self, keys: Sequence[Key], decay: float) -> None:
        self.rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        self.decay = decay
        self.mean = torch.zeros(len(self.rows), dtype=torch.float64)
        self.rollouts = torch.zeros(len(self.rows), dtype=torch.int64)  # that count
        self.next = [self.mean.clone(), self.rollouts.clone()]  # both, with the latest rollout
        self.latest = torch.full((1,), -1)  # its update

    @staticmethod
    def of(settings: AdvantageConfig, prompts: Mapping[str, PromptBatch]) -> RunningRewards | None:
        """What the advantage of a config needs, by task or by prompt; None = it needs none.
        prompts: by task name."""
        decay = (settings.earlier or EarlierConfig()).decay
        if settings.advantage == "adora":
            return RunningRewards([(task,) for task in prompts], decay)
        if settings.advantage == "gated":
            keys = [(task, text) for task, batch in prompts.items() for text in batch.prompts]
            return RunningRewards(keys, decay)
        return None

    @property
    def by_prompt(self) -> bool:
        """Whether a key is a prompt of a task, and not a task."""
        return any(len(key) > 1 for key in self.rows)

    def keys_of(self, batch: PromptBatch) -> Tensor:
        """The number of each image's key [B]."""
        images = zip(batch.tasks, batch.prompts, strict=True)
        keys = [image if self.by_prompt else image[:1] for image in images]
        return torch.tensor([self.rows[key] for key in keys], dtype=torch.int64)

    def average(self, keys: Tensor, update: int) -> Tensor:
        """The average of each image's key [B] over the rollouts before that update, float64; NaN
        where there was none."""
        if int(self.latest) < update:
            self.mean.copy_(self.next[0])
            self.rollouts.copy_(self.next[1])
        return torch.where(self.rollouts[keys] > 0, self.mean[keys], torch.nan)

    def add(self, keys: Tensor, value: Tensor, valid: Tensor, update: int) -> None:
        """Add the rollout of an update: rewards [B] of the keys [B], of all processes.
        Images that are not valid do not count."""
        mean, rollouts = self.next
        mean.copy_(self.mean)
        rollouts.copy_(self.rollouts)
        self.latest.fill_(update)
        for key in keys[valid].unique():
            now = value[valid & (keys == key)].double().mean()
            old = self.decay * mean[key] + (1 - self.decay) * now
            mean[key] = old if rollouts[key] else now
            rollouts[key] += 1

    def tensors(self) -> list[Tensor]:
        """What a checkpoint holds of it; written to in place when one is read."""
        return [self.mean, self.rollouts, *self.next, self.latest]
