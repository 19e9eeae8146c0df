"""The base beside a run: its images for the same prompts and noise, and how far they are apart.

Rollouts: every `alarm.every` updates the base samples some images of the rollout once more.
Evaluations: the base is sampled at the first one of a process. Every process decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import TrainingStage
from flowalign.system.images import eight_bits
from flowalign.training.data import spread
from flowalign.training.report.drift import statistics
from flowalign.training.report.drift.compare import (
    Check,
    Origin,
    Pictures,
    Values,
    check_drift,
)
from flowalign.training.report.pictures import webp
from flowalign.training.rollout import Noise, generate, sample
from flowalign.types import PromptBatch, Rollout, Source

COPIES = 2  # images of a prompt: for their distance; more prompts tell more than more copies
SHARE = 4  # at most one in so many images of a rollout is sampled by the base

Features = Callable[[Tensor], Tensor]  # images [B,3,H,W] in [0,1] -> [B,D]


@dataclass(frozen=True)
class ImageStatistics:
    """What is measured of images. period: pixels of a patch. text: the tasks that an OCR engine
    scores. features {task: the features of a CLIP that its reward has loaded}."""

    period: int
    text: frozenset[str] = frozenset()
    features: Mapping[str, Features] = field(default_factory=dict)

    @staticmethod
    def of(backbone: Backbone, rewards: Mapping[str, Any]) -> ImageStatistics:
        """For the images of a model, and the rewards of the tasks."""
        period = backbone.family.factor * backbone.family.patch
        text = frozenset(name for name, reward in rewards.items() if hasattr(reward, "engine"))
        features = {
            name: reward.clip.image_features
            for name, reward in rewards.items()
            if hasattr(getattr(reward, "clip", None), "image_features")
        }
        return ImageStatistics(period, text, features)

    def measure(self, images: Tensor, batch: PromptBatch, prompts: Sequence[int]) -> Values:
        """{statistic: [B]} of images [B,3,H,W] and their rows. prompts: the group of each."""
        values = statistics.measure(images, self.period)
        asked = torch.tensor([statistics.asked(row) for row in batch.metadata])
        values["surplus"] = (values["objects"] - asked).clamp(min=0)  # NaN stays
        values["objects"] = values["objects"].where(asked.isnan(), torch.nan)
        has_text = torch.tensor([task in self.text for task in batch.tasks])
        values["text"] = values["text"].where(has_text, torch.nan)
        values["diversity"] = statistics.diversity(images.float(), prompts)
        distances = torch.full((len(images),), torch.nan, dtype=torch.float64)
        finite = images.isfinite().flatten(1).all(1).tolist()
        for task, features in self.features.items():
            rows = [i for i, name in enumerate(batch.tasks) if name == task and finite[i]]
            if rows:
                groups = [prompts[i] for i in rows]
                distances[rows] = statistics.diversity(features(images[rows]), groups)
        values["feature_diversity"] = distances
        return values


def checked(config: TrainingStage) -> tuple[int, int]:
    """(prompts, images of each) of a rollout that the base samples for a check."""
    assert config.alarm
    rollout = config.rollout
    copies = min(COPIES, rollout.copies)
    limit = min(config.alarm.images, rollout.images // SHARE)
    return min(rollout.prompts, max(1, limit // copies)), copies


class Monitor:
    """The checks of one run. held_out: prompts of each task, whose images its evaluations see."""

    def __init__(
        self,
        config: TrainingStage,
        backbone: Backbone,
        accelerator: Accelerator,
        measurements: ImageStatistics,
        held_out: Sequence[PromptBatch] = (),
    ) -> None:
        assert config.alarm
        self.settings, self.config, self.backbone = config.alarm, config, backbone
        self.accelerator, self.measurements = accelerator, measurements
        count = max(1, self.settings.images // COPIES)
        self.indices = [spread(len(prompts), count) for prompts in held_out]
        self.held_out = [
            prompts.select(indices) for prompts, indices in zip(held_out, self.indices, strict=True)
        ]
        # of the base's held-out images: statistics and pictures; None until they are sampled
        self.base: tuple[Values, list[str]] | None = None

    def due(self, rollout: Rollout, update: int) -> bool:
        """Whether this rollout is to be checked: it has images, of the student or of its old policy
        (not of teachers, as those of sft), and something has been learnt."""
        by_student = rollout.sources is None or self.config.learns_from_rewards
        on_time = update > 0 and update % self.settings.every == 0
        return rollout.images is not None and by_student and on_time

    def rollout(self, rollout: Rollout, update: int) -> Check:
        """Compare a rollout with the base's images for its prompts and noise. Each process takes
        some of its own images."""
        assert rollout.images is not None
        rows = self._rows(rollout)
        count = len(rows)
        rows = rows or [0]  # a process without any samples one, with the others, and drops it
        places = [(int(rollout.group[row]), int(rollout.copy[row])) for row in rows]
        batch, settings = rollout.batch.select(rows), self.config.rollout
        base = sample(
            self.backbone,
            batch,
            rollout.schedule,
            guidance=settings.guidance,
            noise=Noise((self.config.seed, update), settings.shared_noise),
            places=places,
            batch_size=settings.batch_size,
            sources=[Source(None, settings.guidance)] * len(batch),
        ).images
        assert base is not None
        base, model = eight_bits(base), eight_bits(rollout.images[rows])
        prompts = [prompt for prompt, _ in places]
        origins = list(zip(prompts, batch.tasks, batch.prompts, strict=True))[:count]
        return self._check(
            _first(self.measurements.measure(base, batch, prompts), count),
            _first(self.measurements.measure(model, batch, prompts), count),
            origins,
            lambda row: (webp(base[row]), webp(model[row])),
        )

    def _rows(self, rollout: Rollout) -> list[int]:
        """The first COPIES images of some prompts, of those that this process has. The prompts are
        evenly spaced over the batch of all processes, the same for any number of them."""
        prompts, copies = checked(self.config)
        chosen = set(spread(self.config.rollout.prompts, prompts))
        places = zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True)
        return [
            row for row, (group, copy) in enumerate(places) if group in chosen and copy < copies
        ]

    def evaluation(self) -> Check | None:
        """Compare the active adapter with the base on held-out prompts; None without any. Each
        process samples the images of some prompts."""
        if not self.held_out:
            return None
        if self.base is None:
            with self.backbone.base():
                values, images, _ = self._sample_held_out()
            self.base = values, [webp(image) for image in images]
        base, pictures = self.base
        values, images, origins = self._sample_held_out()
        return self._check(base, values, origins, lambda row: (pictures[row], webp(images[row])))

    def _sample_held_out(self) -> tuple[Values, list[Tensor], list[Origin]]:
        """Of the held-out images of this process, as an evaluation samples them: statistics, the
        images [3,H,W] at 8 bits a channel, and origins."""
        values, images, origins, before = [], [], [], 0  # before: prompts of the tasks before
        for batch, indices in zip(self.held_out, self.indices, strict=True):
            prompts, padded = share(
                len(batch), self.accelerator.process_index, self.accelerator.num_processes
            )
            rows, count = [p for p in padded for _ in range(COPIES)], len(prompts) * COPIES
            settings, places = self.config.evaluation_sampling, [indices[p] for p in padded]
            sampled = generate(self.backbone, batch.select(padded), settings, places, COPIES)
            sampled = eight_bits(sampled)
            measured = self.measurements.measure(sampled, batch.select(rows), rows)
            values.append(_first(measured, count))
            images += sampled[:count]
            origins += [(before + p, batch.tasks[p], batch.prompts[p]) for p in rows[:count]]
            before += len(batch)
        return _joined(values), images, origins

    def _check(
        self, base: Values, model: Values, origins: Sequence[Origin], pictures: Pictures
    ) -> Check:
        """The check of the images of all processes; given are those of this one."""
        parts = gather_object([(base, model, origins)])
        first = sum(len(part[2]) for part in parts[: self.accelerator.process_index])

        def local_pictures(row: int) -> tuple[str, str] | None:
            return pictures(row - first) if 0 <= row - first < len(origins) else None

        check = check_drift(
            _joined([part[0] for part in parts]),
            _joined([part[1] for part in parts]),
            [origin for part in parts for origin in part[2]],
            local_pictures,
        )
        rows = sorted(gather_object(check.rows), key=lambda row: -row["sigmas"])
        return Check(check.drifts, rows)


def share(count: int, rank: int, world: int) -> tuple[range, list[int]]:
    """The part of `count` prompts for process `rank` of `world`, and the same padded: a sharded
    base needs equally many forward passes of all."""
    size = -(-count // world)
    part = range(min(rank * size, count), min((rank + 1) * size, count))
    return part, [*part, *[0] * (size - len(part))]


def _first(values: Values, count: int) -> Values:
    return {name: column[:count] for name, column in values.items()}


def _joined(parts: Sequence[Values]) -> Values:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
