"""Several tasks in one batch: every image is scored by the reward of its own task."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flowalign.rewards.guarded import Guarded, score
from flowalign.types import PromptBatch, Reward


class ByTask:
    """The rewards of a run by task name; failures mask images, as `score` has it."""

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self.rewards = dict(rewards)

    @property
    def groupwise(self) -> bool:
        """Whether a reward must see all images of a prompt at once."""
        return any(getattr(reward, "groupwise", False) for reward in self.rewards.values())

    def __call__(self, images: Tensor, batch: PromptBatch) -> Guarded:
        """images [B,3,H,W] and their rows -> Guarded scores of B; parts of other tasks are NaN."""
        value = torch.full((len(images),), float("nan"))
        valid = torch.zeros(len(images), dtype=torch.bool)
        parts: dict[str, Tensor] = {}
        reasons: dict[int, str] = {}
        for task in dict.fromkeys(batch.tasks):
            rows = [i for i, name in enumerate(batch.tasks) if name == task]
            mine = batch.select(rows)
            found = score(self.rewards[task], images[rows], mine.prompts, mine.metadata)
            value[rows], valid[rows] = found.value, found.valid
            for name, part in found.parts.items():
                parts.setdefault(name, torch.full_like(value, float("nan")))[rows] = part
            reasons.update({rows[row]: text for row, text in found.reasons.items()})
        return Guarded(value, valid, parts, reasons)
