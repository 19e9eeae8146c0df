"""From the scores of a rollout to the advantages of its images, by the variant that a config names.

The variants are functions (flowalign.credit). What some of them need beside the rewards is found
here: the parts of a composed reward, from all processes, and what was seen in earlier rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign.config import AdvantageConfig, EarlierConfig, TaskConfig
from flowalign.credit import ADVANTAGES, clip_advantage
from flowalign.rewards import as_reward
from flowalign.teachers.running_rewards import Earlier
from flowalign.training.algorithm import TrainingError
from flowalign.types import PromptBatch, Reward, Scores


class Advantages:
    """The advantages of a stage that learns from rewards. rewards: by task name."""

    def __init__(
        self,
        tasks: Sequence[TaskConfig],
        settings: AdvantageConfig,
        accelerator: Accelerator,
        rewards: Mapping[str, Reward],
    ) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.weights = {
            name: dict(as_reward(reward).weights or {}) for name, reward in rewards.items()
        }
        self.earlier = Earlier.of(settings, tasks)

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
        own: dict[str, Any] = {}
        if self.settings.advantage == "gdpo":
            own = self._parts(scores, valid, task, names)
        elif self.earlier:
            own = self._history(self.earlier, batch, update, value, valid)
        variant = ADVANTAGES[self.settings.advantage]
        advantage = variant(value, group, valid=valid, task=task, **own)
        return clip_advantage(advantage, self.settings.advantage_clip)

    def tensors(self) -> dict[str, list[Tensor]]:
        """What a checkpoint holds: {name: tensors}, written to in place when one is read."""
        return {"earlier": self.earlier.tensors()} if self.earlier else {}

    def _parts(
        self, scores: Scores, valid: Tensor, task: Tensor, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Parts and weights [K,N] of all processes; a process may lack some."""
        labels = sorted({label for name in names for label in self.weights[name]})
        lacking = torch.full((len(scores.value),), torch.nan)
        own = torch.stack([scores.parts.get(label, lacking) for label in labels], 1)
        parts = self._gathered(own).T
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

    def _history(
        self, earlier: Earlier, batch: PromptBatch, update: int, value: Tensor, valid: Tensor
    ) -> dict[str, Any]:
        """What earlier rollouts say of all images. This one is added to them."""
        place = self._gathered(earlier.place(batch))
        average = earlier.average(place, update)
        earlier.add(place, value, valid, update)
        settings = self.settings.earlier or EarlierConfig()
        if self.settings.advantage == "gated":
            return {"before": average, "attenuate": settings.attenuate}
        return {
            "bar": average,
            "threshold": settings.threshold,
            "amplify": settings.amplify,
        }

    def _gathered(self, own: Tensor) -> Tensor:
        gathered = self.accelerator.gather(own.to(self.accelerator.device))
        return gathered.cpu()  # type: ignore[union-attr]
