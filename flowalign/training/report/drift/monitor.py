"""The base beside a run: its images for the same prompts and noise, and how far they are apart.

Rollouts: every `alarm.every` updates the base samples some images of the rollout once more.
Evaluations: the base is sampled at the first one of a process. Every process decides the same.
With `alarm.reference: start` it is the base with the LoRA that the run starts from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.backbone.adapters import Lora
from flowalign.config import TrainingStage
from flowalign.training.data import spread
from flowalign.training.report.drift.compare import Check, Pair, check_drift
from flowalign.training.report.pictures import png
from flowalign.training.rollout import Noise, generate, sample
from flowalign.types import PromptBatch, Rollout, Source

COPIES = 2  # images of a prompt: for their distance; more prompts tell more than more copies
START = "alarm_start"  # the frozen adapter that the run starts from
SHARE = 4  # at most one in so many images of a rollout is sampled by the base

Origin = tuple[str, int, str]  # task, number of the prompt, prompt


def checked(config: TrainingStage) -> tuple[int, int]:
    """(prompts, images of each) of a rollout that the base samples for a check."""
    assert config.alarm
    rollout = config.rollout
    copies = min(COPIES, rollout.copies)
    limit = min(config.alarm.images, rollout.images // SHARE)
    return min(rollout.prompts, max(1, limit // copies)), copies


class Monitor:
    """The checks of one run. held_out: prompts of each task, whose images its evaluations see.
    start: what the run starts from, where it is the reference."""

    def __init__(
        self,
        config: TrainingStage,
        backbone: Backbone,
        accelerator: Accelerator,
        held_out: Sequence[PromptBatch] = (),
        start: Lora | None = None,
    ) -> None:
        assert config.alarm
        self.reference = None if start is None else START
        if start is not None:
            backbone.load_adapter(START, start, frozen=True)
        self.settings, self.config, self.backbone = config.alarm, config, backbone
        self.accelerator = accelerator
        self.held_out = held_out
        self.base: list[Tensor] = []  # its held-out images, once they are sampled

    def due(self, rollout: Rollout, update: int) -> bool:
        """Whether this rollout is to be checked: it has images, of the student or of its old policy
        (not of teachers, as those of sft), and something has been learnt."""
        by_student = rollout.sources is None or self.config.learns_from_rewards
        on_time = update > 0 and update % self.settings.every == 0
        return rollout.images is not None and by_student and on_time

    def rollout(self, rollout: Rollout, update: int) -> Check:
        """Compare a rollout with the base's images for its prompts and noise: the first COPIES
        images of some prompts, evenly spaced over the batch of all processes. Each process samples
        those that it has."""
        assert rollout.images is not None
        settings, (prompts, copies) = self.config.rollout, checked(self.config)
        chosen = set(spread(settings.prompts, prompts))
        places = list(zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True))
        rows = [i for i, (group, copy) in enumerate(places) if group in chosen and copy < copies]
        padded = rows or [0]  # a process without any samples one, with the others, and drops it
        base = sample(
            self.backbone,
            rollout.batch.select(padded),
            rollout.schedule,
            guidance=settings.guidance,
            noise=Noise((self.config.seed, update), settings.shared_noise),
            places=[places[row] for row in padded],
            batch_size=settings.batch_size,
            sources=[Source(self.reference, settings.guidance)] * len(padded),
        ).images
        assert base is not None
        origins = _origins(rollout.batch.select(rows), [places[row][0] for row in rows])
        return self._check(base[: len(rows)], rollout.images[rows], origins)

    def evaluation(self) -> Check | None:
        """Compare the active adapter with the base on held-out prompts; None without any. Each
        process samples the images of some prompts."""
        if not self.held_out:
            return None
        if not self.base:
            with self.backbone.adapter(self.reference):
                self.base, _ = self._sample_held_out()
        return self._check(self.base, *self._sample_held_out())

    def _sample_held_out(self) -> tuple[list[Tensor], list[Origin]]:
        """The held-out images [3,H,W] of this process, task by task, as an evaluation samples them;
        and what they are of."""
        images, origins = list[Tensor](), list[Origin]()
        world = self.accelerator.num_processes
        for prompts in self.held_out:
            indices = spread(len(prompts), max(1, self.settings.images // COPIES))
            mine, padded = share(len(indices), self.accelerator.process_index, world)
            batch, places = prompts.select(indices), [indices[prompt] for prompt in padded]
            settings = self.config.evaluation_sampling
            sampled = generate(self.backbone, batch.select(padded), settings, places, COPIES)
            images += sampled[: len(mine) * COPIES].cpu()
            rows = [prompt for prompt in mine for _ in range(COPIES)]
            origins += _origins(batch.select(rows), rows)
        return images, origins

    def _check(
        self, base: Iterable[Tensor], model: Iterable[Tensor], origins: Sequence[Origin]
    ) -> Check:
        """The check of the images of all processes, the same on each; given are those of this one.
        A pair with an image that is not finite is left out."""
        pairs = [
            Pair(png(before), png(after), *origin)
            for before, after, origin in zip(base, model, origins, strict=True)
            if before.isfinite().all() and after.isfinite().all()
        ]
        family = self.backbone.family
        return check_drift(gather_object(pairs), family.factor * family.patch)


def _origins(batch: PromptBatch, numbers: Sequence[int]) -> list[Origin]:
    return list(zip(batch.tasks, numbers, batch.prompts, strict=True))


def share(count: int, rank: int, world: int) -> tuple[range, list[int]]:
    """The part of `count` prompts for process `rank` of `world`, and the same padded: a sharded
    base needs equally many forward passes of all."""
    size = -(-count // world)
    part = range(min(rank * size, count), min((rank + 1) * size, count))
    return part, [*part, *[0] * (size - len(part))]
