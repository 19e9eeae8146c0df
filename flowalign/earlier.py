"""What earlier rollouts say of a task or of a prompt: the average reward of each.

`advantage: adora` and `advantage: gated` (flowalign.credit) weigh prompts by it. The averages are
the same on every process and are saved with checkpoints, so that a resumed run has the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowalign.config import EarlierConfig, GrpoConfig, TaskConfig
from flowalign.data import load_prompts
from flowalign.types import PromptBatch

Key = tuple[str, ...]  # (task,) or (task, prompt)


class Earlier:
    """Exponential moving averages of rewards, one for each key, over the rollouts that have it.

    decay: the share of the old average that is kept when a rollout is added. The first rollout of a
    key sets its average.
    """

    def __init__(self, keys: Sequence[Key], decay: float) -> None:
        self.places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self.decay = decay
        self.mean = torch.zeros(len(self.places), dtype=torch.float64)
        self.rollouts = torch.zeros(len(self.places), dtype=torch.int64)  # that were added

    @staticmethod
    def of(grpo: GrpoConfig, tasks: Sequence[TaskConfig]) -> Earlier | None:
        """As the advantage of a config needs it, by task or by prompt; None = it needs none."""
        decay = (grpo.earlier or EarlierConfig()).decay
        if grpo.advantage == "adora":
            return Earlier([(task.name,) for task in tasks], decay)
        if grpo.advantage == "gated":
            prompts = {task.name: load_prompts(task.prompts, task.name).prompts for task in tasks}
            return Earlier([(task, text) for task, texts in prompts.items() for text in texts], decay)
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

    def average(self, place: Tensor) -> Tensor:
        """The average of each row's key [B], float64; NaN where no rollout was added yet."""
        known = self.rollouts[place] > 0
        return torch.where(known, self.mean[place], torch.nan)

    def add(self, place: Tensor, value: Tensor, valid: Tensor) -> None:
        """Add a rollout of all processes: rewards [B] of the keys at `place` [B], if valid."""
        for key in place[valid].unique():
            now = value[valid & (place == key)].double().mean()
            first = self.rollouts[key] == 0
            self.mean[key] = now if first else self.decay * self.mean[key] + (1 - self.decay) * now
            self.rollouts[key] += 1

    def tensors(self) -> list[Tensor]:
        """What a checkpoint holds of it; written to in place when one is read."""
        return [self.mean, self.rollouts]
