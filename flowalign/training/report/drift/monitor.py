"""The base beside a run: its images for the same prompts and noise, and how far they are apart.

Rollouts: every `alarm.every` updates the base samples some images of the rollout once more. At an
evaluation the base is sampled once, and its statistics are kept, also across a resume. Every
process decides the same.
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
from flowalign.training.report.drift.compare import Drift, by_prompt, drift
from flowalign.training.report.samples import webp
from flowalign.training.rollout import Noise, generate, sample
from flowalign.types import PromptBatch, Rollout, Source

COPIES = 2  # images of a prompt: for their distance; more prompts tell more than more copies
SHARE = 4  # at most one in so many images of a rollout is sampled by the base
SHOWN = 8  # prompts of the panel

Features = Callable[[Tensor], Tensor]  # images [B,3,H,W] in [0,1] -> [B,D]
Values = dict[str, Tensor]  # {statistic: [B]}


@dataclass(frozen=True)
class Check:
    """A result. rows: of the most drifted prompts, the first image of both models: prompt, task,
    drift in sigmas, base and model (WebP in base64)."""

    drifts: list[Drift]
    rows: list[dict[str, Any]]

    @staticmethod
    def gathered(drifts: list[Drift], rows: Sequence[dict[str, Any]]) -> Check:
        """With the rows of all processes, the most drifted first. rows: of this process."""
        return Check(drifts, sorted(gather_object(rows), key=lambda row: -row["sigmas"]))

    def about(self) -> dict[str, Any]:
        """As JSON, for the page of the run."""
        return {"drifts": [vars(drift) for drift in self.drifts], "rows": self.rows}


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
        clips: dict[str, Any] = {name: getattr(r, "clip", None) for name, r in rewards.items()}
        features = {
            n: clip.image_features for n, clip in clips.items() if hasattr(clip, "image_features")
        }
        return ImageStatistics(period, text, features)

    def measure(self, images: Tensor, batch: PromptBatch, prompts: Sequence[int]) -> Values:
        """{statistic: [B]} of images [B,3,H,W] and their rows. prompts: the group of each."""
        values = statistics.measure(images, self.period)
        counts = [statistics.asked(row) for row in batch.metadata]
        asked = torch.tensor([0.0 if count is None else count for count in counts])
        counted = torch.tensor([count is not None for count in counts])
        surplus = (values["objects"] - asked).clamp(min=0)
        values["surplus"] = surplus.where(counted, torch.nan)
        values["objects"] = values["objects"].where(~counted, torch.nan)
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


def compare(
    base: Values, model: Values, prompts: Sequence[int], tasks: Sequence[str]
) -> list[Drift]:
    """The drift of every statistic that has a value, of each task by itself if there are several:
    then it is called TASK/STATISTIC."""
    drifts = []
    names = sorted(set(tasks))
    for task in names:
        rows = [row for row, name in enumerate(tasks) if name == task]
        groups = [prompts[row] for row in rows]
        for name in base:
            label = f"{task}/{name}" if len(names) > 1 else name
            drifts.append(drift(label, base[name][rows], model[name][rows], groups))
    return [drift for drift in drifts if drift.n]


def worst(base: Values, model: Values, prompts: Sequence[int]) -> list[tuple[int, float]]:
    """(row of its first image, drift in sigmas) of the most drifted prompts."""
    sigmas = by_prompt(base, model, prompts).tolist()
    first: dict[int, int] = {}
    size: dict[int, float] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(prompt, row)
        size[prompt] = max(size.get(prompt, 0.0), sigmas[row])
    order = sorted(first, key=lambda prompt: -size[prompt])[:SHOWN]
    return [(first[prompt], size[prompt]) for prompt in order]


def shown(
    batch: PromptBatch, row: int, sigmas: float, base: Tensor, model: Tensor
) -> dict[str, Any]:
    """A row of a Check: the images [3,H,W] of both models for a row of a batch."""
    return {
        "prompt": batch.prompts[row],
        "task": batch.tasks[row],
        "sigmas": sigmas,
        "base": webp(base),
        "model": webp(model),
    }


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
        self.base: Values = {}  # of the held-out images; empty until they are sampled

    # Rollouts ----------------------------------------------------------------------------------

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
        values = [
            _first(self.measurements.measure(images, batch, prompts), count)
            for images in (base, model)
        ]
        parts = gather_object([(*values, prompts[:count], batch.tasks[:count])])
        first = sum(len(part[2]) for part in parts[: self.accelerator.process_index])
        all_base, all_model = (_joined([part[i] for part in parts]) for i in (0, 1))
        all_prompts, all_tasks = ([x for part in parts for x in part[i]] for i in (2, 3))
        drifts = compare(all_base, all_model, all_prompts, all_tasks)
        pictures = [
            shown(batch, row - first, sigmas, base[row - first], model[row - first])
            for row, sigmas in worst(all_base, all_model, all_prompts)
            if 0 <= row - first < count
        ]
        return Check.gathered(drifts, pictures)

    def _rows(self, rollout: Rollout) -> list[int]:
        """The first COPIES images of some prompts, of those that this process has. The prompts are
        evenly spaced over the batch of all processes, the same for any number of them."""
        prompts, copies = checked(self.config)
        chosen = set(spread(self.config.rollout.prompts, prompts))
        places = zip(rollout.group.tolist(), rollout.copy.tolist(), strict=True)
        return [
            row for row, (group, copy) in enumerate(places) if group in chosen and copy < copies
        ]

    # Evaluations -------------------------------------------------------------------------------

    def evaluation(self) -> Check | None:
        """Compare the active adapter with the base on held-out prompts; None without any. Each
        process samples the images of some prompts."""
        if not self.held_out:
            return None
        if not self.base:
            with self.backbone.base():
                self.base, _ = self._measured()
        values, model = self._measured()
        tasks = [task for batch in self.held_out for task in batch.tasks for _ in range(COPIES)]
        prompts = [row // COPIES for row in range(len(tasks))]
        drifts = compare(self.base, values, prompts, tasks)
        sigmas = {row // COPIES: size for row, size in worst(self.base, values, prompts)}
        pictures, first = [], 0  # first: number of the first prompt of a task
        for task, batch in enumerate(self.held_out):
            chosen = [i for i in range(len(batch)) if first + i in sigmas]
            if chosen:
                with self.backbone.base():  # the base's images are not kept
                    base = self._images(task, chosen, 1)
                pictures += [
                    shown(batch, i, sigmas[first + i], image, model[task, i])
                    for i, image in zip(chosen, base, strict=True)
                    if (task, i) in model
                ]
            first += len(batch)
        return Check.gathered(drifts, pictures)

    def _measured(self) -> tuple[Values, dict[tuple[int, int], Tensor]]:
        """What is measured of the held-out images of all processes, and for this process
        {(task, prompt): the first image}."""
        values, pictures = [], {}
        for task, batch in enumerate(self.held_out):
            prompts, padded = share(
                len(batch), self.accelerator.process_index, self.accelerator.num_processes
            )
            images = self._images(task, padded, COPIES)
            groups = [prompt for prompt in padded for _ in range(COPIES)]
            measured = self.measurements.measure(images, batch.select(groups), groups)
            values.append(_joined(gather_object([_first(measured, len(prompts) * COPIES)])))
            pictures |= {(task, p): images[i * COPIES] for i, p in enumerate(prompts)}
        return _joined(values), pictures

    def _images(self, task: int, prompts: Sequence[int], copies: int) -> Tensor:
        """Held-out images [B,3,H,W] as an evaluation samples them, at 8 bits a channel."""
        batch = self.held_out[task].select(prompts)
        indices = [self.indices[task][prompt] for prompt in prompts]
        settings = self.config.evaluation_sampling
        return eight_bits(generate(self.backbone, batch, settings, indices, copies))

    # Resume ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was measured of the base."""
        return {"base": {name: values.tolist() for name, values in self.base.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` returned; NaN is null in JSON. Of other prompts, as the settings
        may have changed, nothing is kept."""
        base = {
            name: torch.tensor(
                [torch.nan if value is None else value for value in values], dtype=torch.float64
            )
            for name, values in state.get("base", {}).items()
        }
        count = sum(len(batch) for batch in self.held_out) * COPIES
        self.base = base if all(len(values) == count for values in base.values()) else {}


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
