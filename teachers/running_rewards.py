"""What earlier rollouts say of a task or of a prompt: the average reward of each.

`advantage: adora` and `advantage: gated` (flowalign.credit) weight prompts by it. The averages are
the same on every process and are saved with checkpoints, so that a resumed run has the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowalign.config import AdvantageConfig, EarlierConfig, TaskConfig
from flowalign.training.data import load_prompts
from flowalign.types import PromptBatch

Key = tuple[str, ...]  # (task,) or (task, prompt)


class Earlier:
    """Exponential moving averages of rewards, one for each key, over the rollouts that have it.

    decay: the share of the old average that is kept when a rollout is added. The first rollout of a
    key sets its average.

    A rollout that was added does not count before the next update begins: one that is interrupted
    is sampled and added again, and its checkpoint may hold it already.
    """

    def __init__(self, keys: Sequence[Key], decay: float) -> None:
        self.places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self.decay = decay
        self.mean = torch.zeros(len(self.places), dtype=torch.float64)
        self.rollouts = torch.zeros(len(self.places), dtype=torch.int64)  # that count
        self.next = [self.mean.clone(), self.rollouts.clone()]  # both, with the latest rollout
        self.latest = torch.full((1,), -1)  # its update

    @staticmethod
    def of(settings: AdvantageConfig, tasks: Sequence[TaskConfig]) -> Earlier | None:
        """As the advantage of a config needs it, by task or by prompt; None = it needs none."""
        decay = (settings.earlier or EarlierConfig()).decay
        if settings.advantage == "adora":
            return Earlier([(task.name,) for task in tasks], decay)
        if settings.advantage == "gated":
            sets = {task.name: load_prompts(task.prompts, task.name) for task in tasks}
            keys = [(name, text) for name, batch in sets.items() for text in batch.prompts]
            return Earlier(keys, decay)
        return None

    @property
    def by_prompt(self) -> bool:
        """Whether a key is a prompt of a task, and not a task."""
        return any(len(key) > 1 for key in self.places)

    def place(self, batch: PromptBatch) -> Tensor:
        """The place of each row's key among all keys [B]."""
        rows = zip(batch.tasks, batch.prompts, strict=True)
        keys = [row if self.by_prompt else row[:1] for row in rows]
        return torch.tensor([self.places[key] for key in keys], dtype=torch.int64)

    def average(self, place: Tensor, update: int) -> Tensor:
        """The average of each row's key [B] over the rollouts before that update, float64; NaN
        where there was none."""
        if int(self.latest) < update:
            self.mean.copy_(self.next[0])
            self.rollouts.copy_(self.next[1])
        return torch.where(self.rollouts[place] > 0, self.mean[place], torch.nan)

    def add(self, place: Tensor, value: Tensor, valid: Tensor, update: int) -> None:
        """Add the rollout of an update: rewards [B] of the keys at `place` [B], of all processes.
        Images that are not valid do not count."""
        mean, rollouts = self.next
        mean.copy_(self.mean)
        rollouts.copy_(self.rollouts)
        self.latest.fill_(update)
        for key in place[valid].unique():
            now = value[valid & (place == key)].double().mean()
            old = self.decay * mean[key] + (1 - self.decay) * now
            mean[key] = old if rollouts[key] else now
            rollouts[key] += 1

    def tensors(self) -> list[Tensor]:
        """What a checkpoint holds of it; written to in place when one is read."""
        return [self.mean, self.rollouts, *self.next, self.latest]
