"""A teacher from pairs of images: Flow-DPO (2501.13918), after Diffusion-DPO (2311.12908).

Nothing is sampled: the images of an update are read from files, as latents that are encoded once.
configs/tiny/dpo.yaml is a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowalign.config import DpoStage
from flowalign.system.images import read_image, stacked
from flowalign.training import metrics
from flowalign.training.algorithm import STUDENT, Algorithm, Compared, Keeps, Pairs, Parts
from flowalign.training.losses import velocity_error
from flowalign.training.noising import noised, stratified
from flowalign.training.rollout import Stream
from flowalign.training.student.sft import Targets
from flowalign.types import PromptBatch, Rollout, StepLoss

PAIR = ("chosen", "rejected")  # of a row: what the copies 0 and 1 of its prompt are
REFERENCE = "reference"  # a frozen copy of the adapter that the run starts from


class Dpo(Algorithm[Targets]):
    """The algorithm. The images of a pair follow one another, in a micro-batch too."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.settings = self.config.dpo
        if self.backbone.family.guidance == "embedded":  # an input of the one velocity field
            self.guidance = self.config.guidance
        self.reference = REFERENCE if self.config.lora.init else None  # None = the base
        if self.reference:
            self.backbone.copy_adapter(STUDENT, self.reference)
        self.folders = {task.name: Path(task.prompts).parent for task in self.config.tasks}
        self.latents: dict[Path, Tensor] = {}  # [C,h,w] on the CPU, of the images asked for so far

    @classmethod
    def keeps(cls, config: DpoStage, updates: Sequence[int] | None = None) -> Keeps:
        """Noised states with the velocity to match; the reference is evaluated at each."""
        reference = STUDENT if config.lora.init else None  # in size
        return Keeps(
            noise_levels=config.dpo.noise_levels,
            targets=["float32"],
            policies=[REFERENCE] if reference else [],
            compared=[Compared(reference, 1.0)],
        )

    @classmethod
    def row_problems(cls, config: DpoStage, source: str, prompts: PromptBatch) -> Iterator[str]:
        """What `pair_problems` finds in the rows."""
        check = partial(pair_problems, config, Path(source).parent)
        with ThreadPoolExecutor() as pool:  # PIL decodes without Python's lock
            for number, texts in enumerate(pool.map(check, prompts.metadata), 1):
                yield from (f"row {number}: {text}" for text in texts)

    def prepare(self, rollout: Rollout, update: int) -> Targets:
        """The pairs of an update at noise levels of their own."""
        key = (self.config.seed, update)
        shift = self.backbone.shift(self.config.rollout.steps)
        count = self.settings.noise_levels
        groups = rollout.group.tolist()
        levels = [stratified(shift, count, (*key, Stream.LEVELS, prompt)) for prompt in groups]
        kinds = [PAIR[copy] for copy in rollout.copy.tolist()]
        batch = rollout.batch
        rows = list(zip(batch.tasks, batch.metadata, kinds, strict=True))
        clean = torch.stack([self._latent(self.folders[task] / row[k]) for task, row, k in rows])
        # as copies 0, so that both images of a pair draw the same noise
        pairs = replace(rollout, latents=clean, copy=torch.zeros_like(rollout.copy))
        states, target = noised(pairs, torch.stack(levels), (*key, Stream.NOISE))
        return Targets.of(replace(states, copy=rollout.copy), target)

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Targets) -> StepLoss:
        """The mean of `dpo_loss` over the pairs of images."""
        target = prepared.velocity[pairs.rows, pairs.columns]
        reference = self.velocity_of(self.reference, pairs)
        loss, gain = dpo_loss(velocity, reference, target, beta=self.settings.beta)
        margin = gain[:, 0] - gain[:, 1]
        measured = {
            metrics.PAIR_ACCURACY: float((margin > 0).float().mean()),
            metrics.MARGIN: float(margin.mean()),
            metrics.CHOSEN_GAIN: float(gain[:, 0].mean()),
        }
        return StepLoss(loss.mean(), measured)

    def _latent(self, path: Path) -> Tensor:
        """The latent [C,h,w] of a file, encoded when it is first asked for, and alone: so it does
        not depend on the other images of an update."""
        if path not in self.latents:
            self.latents[path] = self.backbone.encode_image(stacked(read_image(path)))[0].cpu()
        return self.latents[path].to(self.backbone.device)


def pair_problems(config: DpoStage, folder: Path, row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a row: images that cannot be read, have another size than the model's or
    are the same. folder: of the file of pairs."""
    height, width = config.model.size
    problems: list[str] = []
    pixels: list[bytes] = []
    for kind in PAIR:
        name: Any = row.get(kind)
        try:
            image = read_image(folder / name)
            pixels.append(image.tobytes())
            if image.size != (width, height):
                seen = f"{image.width}x{image.height}"
                problems.append(f"{name} has {seen} pixels; want {width}x{height}.")
        except (ValueError, TypeError) as error:  # it may be no text
            text = f"`{kind}` is {name!r:.80}; want an image, by its path from the file"
            problems.append(f"{text} ({error}).")
    if len(pixels) == 2 and pixels[0] == pixels[1]:
        problems.append("`chosen` and `rejected` are the same image. Remove the row.")
    return problems


def dpo_loss(
    velocity: Tensor, reference: Tensor, target: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """The loss [B] of Flow-DPO (2501.13918), and the gains [B,2] of chosen and rejected images.

        loss = -log sigmoid(beta / 2 (gain_chosen - gain_rejected))
        gain = mean |v_ref - v*|^2 - mean |v - v*|^2,   v* = eps - x0

    velocity, reference, target [2B,C,h,w]: chosen and rejected in turn; only velocity carries
    gradient. Means are over C, h, w, where the paper has sums. A model that is the reference has
    loss log 2.
    """
    gain = velocity_error(reference.detach(), target) - velocity_error(velocity, target)
    gain = gain.view(-1, 2)
    return -logsigmoid(beta / 2 * (gain[:, 0] - gain[:, 1])), gain.detach()
