"""A teacher from pairs of images: Flow-DPO (2501.13918), after Diffusion-DPO (2311.12908).

Nothing is sampled: the images of an update are read from files, as latents that are encoded once.
configs/tiny/dpo.yaml is a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowalign.config import DpoStage
from flowalign.system.images import read_image, stacked
from flowalign.training import metrics
from flowalign.training.algorithm import STUDENT, Algorithm, Compared, Keeps, Pairs, Parts
from flowalign.training.losses import velocity_error
from flowalign.training.noising import noised, stratified
from flowalign.training.rollout import Noise, Stream
from flowalign.training.student.sft import Targets
from flowalign.types import PromptBatch, Rollout, StepLoss

IMAGES = ("chosen", "rejected")  # of a row: what the copies 0 and 1 of its prompt are
REFERENCE = "reference"  # a frozen copy of the adapter that the run starts from
SHOWN = 5  # bad rows of a file that are named


class Dpo(Algorithm[Targets]):
    """The algorithm. The images of a pair follow one another, in a micro-batch too."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.settings = self.config.dpo
        self.reference = REFERENCE if self.config.lora.init else None  # None = the base
        if self.reference:
            self.backbone.copy_adapter(STUDENT, self.reference)
        self.folders = {task.name: Path(task.prompts).parent for task in self.config.tasks}
        self.latents: dict[Path, Tensor] = {}  # [C,h,w] on the CPU, of the images asked for so far

    @classmethod
    def keeps(cls, config: DpoStage, updates: Sequence[int] | None = None) -> Keeps:
        """Noised states with the velocity to match; the reference is asked at each."""
        init = config.lora.init
        return Keeps(
            noise_levels=config.dpo.states,
            targets=["float32"],
            policies=[REFERENCE] if init else [],
            compared=[Compared(STUDENT if init else None, 1.0)],
        )

    @classmethod
    def row_problems(cls, config: DpoStage, source: str, prompts: PromptBatch) -> Iterator[str]:
        """Rows without images of the model's size, or without the noise that is to be known."""
        folder, (height, width) = Path(source).parent, config.model.size
        known = config.dpo.noise == "known"
        bad = (
            f"row {number}: {text}"
            for number, row in enumerate(prompts.metadata, 1)
            for text in pair_problems(row, folder, (width, height), known)
        )
        yield from islice(bad, SHOWN)

    def prepare(self, rollout: Rollout, update: int) -> Targets:
        """The pairs of an update at noise levels of their own."""
        key, shift = (self.config.seed, update), self.backbone.shift(self.config.rollout.steps)
        levels = [
            stratified(shift, self.settings.states, (*key, Stream.LEVELS, prompt))
            for prompt in rollout.group.tolist()
        ]
        kinds = [IMAGES[copy] for copy in rollout.copy.tolist()]
        rows = list(zip(rollout.batch.tasks, rollout.batch.metadata, kinds, strict=True))
        clean = torch.stack([self._latent(self.folders[task] / row[k]) for task, row, k in rows])
        noise = None
        if self.settings.noise == "known":
            noise = torch.stack([known_noise(row[f"{k}_noise"], clean[0]) for _, row, k in rows])
        # as copies 0, so that both images of a pair draw the same noise
        pairs = replace(rollout, latents=clean, copy=torch.zeros_like(rollout.copy))
        states, target = noised(pairs, torch.stack(levels), (*key, Stream.NOISE), noise)
        return Targets(
            rollout=replace(states, copy=rollout.copy),
            keep=torch.ones(len(rollout), dtype=torch.bool),
            metrics={},
            notes=[""] * len(rollout),
            velocity=target,
        )

    def loss(self, pairs: Pairs, velocity: Tensor, prepared: Targets) -> StepLoss:
        """The mean of `dpo_loss` over the pairs of images."""
        target = prepared.velocity[pairs.rows, pairs.columns]
        with torch.no_grad(), self.backbone.adapter(self.reference):
            reference = pairs.velocity(self.backbone, self.guidance)
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


# Rows --------------------------------------------------------------------------------------------


def known_noise(noise: Sequence[int], like: Tensor) -> Tensor:
    """The noise [C,h,w] that `flowalign sample` began an image with: noise is [seed, number of the
    prompt, number of the image]."""
    seed, prompt, copy = noise
    return Noise((seed,)).draw(prompt, copy, like.shape, 0)[0].to(like)


def pair_problems(
    row: Mapping[str, Any], folder: Path, size: tuple[int, int], known: bool
) -> Iterator[str]:
    """What is wrong with a row. size: width and height of its images; known: whether it needs
    their noise."""
    for kind in IMAGES:
        name, noise = row.get(kind), row.get(f"{kind}_noise")
        if not isinstance(name, str):
            yield f"`{kind}` is {name!r:.80}; want the path of an image, relative to the file."
            continue
        try:
            with Image.open(folder / name) as image:
                if image.size != size:
                    seen, wanted = ("{}x{}".format(*s) for s in (image.size, size))
                    yield f"{name} has {seen} pixels; want {wanted}, as in `model`."
        except (OSError, ValueError) as error:
            yield f"{name} is no image that can be read ({error})."
        whole = isinstance(noise, list) and len(noise) == 3 and all(type(n) is int for n in noise)
        if known and not (whole and min(noise) >= 0):
            text = f"`{kind}_noise` is {noise!r:.80}; want [seed, prompt, image]"
            yield f"{text}, as `flowalign vote` writes it, or dpo.noise: fresh."
