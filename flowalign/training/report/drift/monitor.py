"""The base beside a run: its images for the same prompts and noise, and how far they are apart.

Rollouts: every `alarm.every` updates the base samples some images of the rollout once more. At an
evaluation it is known already: it was sampled once, and what was measured of it is kept, also
across a resume. Every process decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from flowalign.training.rollout import Noise, Place, clean_schedule, sample
from flowalign.types import PromptBatch, Rollout, Source

COPIES = 2  # images of a prompt: for their distance; more prompts tell more than more copies
SHARE = 4  # at most one in so many images of a rollout is sampled by the base
SHOWN = 8  # prompts of the panel

Features = Callable[[Tensor], Tensor]  # images [B,3,H,W] in [0,1] -> [B,D]
Values = dict[str, Tensor]  # {statistic: [B]}


@dataclass(frozen=True)
class Check:
    """What was found. rows: of the most drifted prompts, the first image of both models: prompt,
    task, drift in sigmas, base and model (WebP in base64)."""

    drifts: list[Drift]
    rows: list[dict[str, Any]]

    @staticmethod
    def gathered(drifts: list[Drift], own: Sequence[dict[str, Any]]) -> Check:
        """With the rows of all processes, the most drifted first. own: those of this process."""
        return Check(drifts, sorted(gather_object(own), key=lambda row: -row["sigmas"]))

    def about(self) -> dict[str, Any]:
        """As JSON, for the page of the run."""
        return {"drifts": [vars(drift) for drift in self.drifts], "rows": self.rows}


@dataclass(frozen=True)
class Lens:
    """How images are measured. period: pixels of a patch. text: the tasks that an OCR engine
    scores. features {task: those of a CLIP that its reward has loaded}."""

    period: int
    text: frozenset[str] = frozenset()
    features: Mapping[str, Features] | None = None

    @staticmethod
    def of(backbone: Backbone, rewards: Mapping[str, Any]) -> Lens:
        """Of a model, and of the rewards of the tasks."""
        period = backbone.family.factor * backbone.family.patch
        text = frozenset(name for name, reward in rewards.items() if hasattr(reward, "engine"))
        features: dict[str, Features] = {}
        for name, reward in rewards.items():
            of_clip = getattr(getattr(reward, "clip", None), "image_features", None)
            if of_clip is not None:
                features[name] = of_clip
        return Lens(period, text, features)

    def measure(self, images: Tensor, batch: PromptBatch, prompts: Sequence[int]) -> Values:
        """{statistic: [B]} of images [B,3,H,W] and their rows. prompts: the group of each."""
        values = statistics.measure(images, self.period)
        wanted = [statistics.asked(row) for row in batch.metadata]
        known = torch.tensor([0.0 if count is None else count for count in wanted])
        counted = torch.tensor([count is not None for count in wanted])
        surplus = (values["objects"] - known).clamp(min=0)
        values["surplus"] = surplus.where(counted, torch.nan)
        values["objects"] = values["objects"].where(~counted, torch.nan)
        spelt = torch.tensor([task in self.text for task in batch.tasks])
        values["text"] = values["text"].where(spelt, torch.nan)
        values["diversity"] = statistics.diversity(images.float(), prompts)
        found = torch.full((len(images),), torch.nan, dtype=torch.float64)
        for task, features in (self.features or {}).items():
            own = [i for i, name in enumerate(batch.tasks) if name == task]
            own = [i for i in own if bool(images[i].isfinite().all())]
            if own:
                vectors = features(images[own])
                found[own] = statistics.diversity(vectors, [prompts[i] for i in own])
        values["feature_diversity"] = found
        return values


def compare(
    base: Values, model: Values, prompts: Sequence[int], tasks: Sequence[str]
) -> list[Drift]:
    """The drift of every statistic that has a value, of each task by itself if there are several:
    then it is called TASK/STATISTIC."""
    found = []
    names = sorted(set(tasks))
    for task in names:
        rows = [row for row, name in enumerate(tasks) if name == task]
        own = [prompts[row] for row in rows]
        for name in base:
            label = f"{task}/{name}" if len(names) > 1 else name
            one = drift(label, base[name][rows], model[name][rows], own)
            found += [one] if one.n else []
    return found


def checked(config: TrainingStage) -> tuple[int, int]:
    """(prompts, images of each) of a rollout that the base samples for a check."""
    assert config.alarm
    rollout = config.rollout
    copies = min(COPIES, rollout.copies)
    limit = min(config.alarm.images, rollout.images // SHARE)
    return min(rollout.prompts, max(1, limit // copies)), copies


@dataclass(frozen=True)
class HeldOut:
    """Held-out images of one size: a row of batch each, COPIES of a prompt, and their places in the
    sets of their tasks."""

    batch: PromptBatch
    places: list[Place]

    @staticmethod
    def of(sets: Sequence[PromptBatch], size: tuple[int, int] | None, count: int) -> HeldOut:
        """Of so many prompts of each of those sets whose images have a size."""
        parts: list[PromptBatch] = []
        own: list[Place] = []
        for prompts in sets:
            if prompts.size == size:
                places = [(p, c) for p in spread(len(prompts), count) for c in range(COPIES)]
                parts.append(prompts.select([prompt for prompt, _ in places]))
                own += places
        batch = PromptBatch(
            [text for part in parts for text in part.prompts],
            [task for part in parts for task in part.tasks],
            [row for part in parts for row in part.metadata],
            size,
        )
        return HeldOut(batch, own)


class Monitor:
    """The checks of one run. held_out: prompts of a task, whose images its evaluations see."""

    def __init__(
        self,
        config: TrainingStage,
        backbone: Backbone,
        accelerator: Accelerator,
        lens: Lens,
        held_out: Sequence[PromptBatch] = (),
    ) -> None:
        assert config.alarm
        self.settings, self.config, self.backbone = config.alarm, config, backbone
        self.accelerator, self.lens = accelerator, lens
        count = max(1, self.settings.images // COPIES)
        sizes = [s for s in backbone.sizes if s in {prompts.size for prompts in held_out}]
        self.held_out = [HeldOut.of(held_out, size, count) for size in sizes]
        self.base: Values = {}  # of the held-out images; empty until they are sampled

    # Rollouts ----------------------------------------------------------------------------------

    def due(self, rollout: Rollout, update: int) -> bool:
        """Whether this rollout is to be checked: it has images, of the student or of its old policy
        (not of teachers, as those of sft), and something has been learnt."""
        own = rollout.sources is None or self.config.learns_from_rewards
        return (
            rollout.images is not None and own and update > 0 and update % self.settings.every == 0
        )

    def rollout(self, rollout: Rollout, update: int) -> Check:
        """Compare a rollout with the base's images for its prompts and noise. Each process takes
        some of its own images."""
        assert rollout.images is not None
        own = self._rows(rollout)
        rows = own or [0]  # a process without any samples one, with the others, and drops it
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
        values = [self.lens.measure(images, batch, prompts) for images in (base, model)]
        if not own:
            values = [{name: column[:0] for name, column in part.items()} for part in values]
            prompts, batch = [], batch.select([])
        parts = gather_object([(*values, prompts, batch.tasks)])
        first = sum(len(p[2]) for p in parts[: self.accelerator.process_index])
        all_base, all_model = (_joined([part[i] for part in parts]) for i in (0, 1))
        all_prompts = [prompt for part in parts for prompt in part[2]]
        drifts = compare(all_base, all_model, all_prompts, [t for part in parts for t in part[3]])
        pictures = []
        for row, sigmas in worst(all_base, all_model, all_prompts):
            if 0 <= row - first < len(batch):  # one of its own
                i = row - first
                pictures.append(shown(batch, i, sigmas, base[i], model[i]))
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
        accelerator = self.accelerator
        base, model, kept = [], [], []
        for images in self.held_out:
            count = len(images.batch) // COPIES
            own, padded = share(count, accelerator.process_index, accelerator.num_processes)
            rows = [prompt * COPIES + copy for prompt in padded for copy in range(COPIES)]
            if not self.base:
                base.append(self._measured(images, self._images(images, rows, True), rows, own))
            sampled = self._images(images, rows)
            model.append(self._measured(images, sampled, rows, own))
            kept.append({row: sampled[i] for i, row in enumerate(rows) if row // COPIES in own})
        self.base = self.base or _joined(base)
        values = _joined(model)
        tasks = [task for images in self.held_out for task in images.batch.tasks]
        prompts = [row // COPIES for row in range(len(tasks))]
        drifts = compare(self.base, values, prompts, tasks)
        chosen, first, pictures = worst(self.base, values, prompts), 0, []
        for images, sampled in zip(self.held_out, kept, strict=True):
            end = first + len(images.batch)
            those = [(row - first, sigmas) for row, sigmas in chosen if first <= row < end]
            again = self._images(images, [row for row, _ in those], True) if those else ()
            pictures += [  # the base's images are not kept
                shown(images.batch, row, sigmas, image, sampled[row])
                for (row, sigmas), image in zip(those, again, strict=True)
                if row in sampled
            ]
            first = end
        return Check.gathered(drifts, pictures)

    def _measured(
        self, images: HeldOut, sampled: Tensor, rows: Sequence[int], own: Sequence[int]
    ) -> Values:
        """What is measured of the images of all processes; each counts those of its own prompts,
        which come first."""
        groups = [row // COPIES for row in rows]
        values = self.lens.measure(sampled, images.batch.select(rows), groups)
        kept = {name: column[: len(own) * COPIES] for name, column in values.items()}
        return _joined(gather_object([kept]))

    def _images(self, images: HeldOut, rows: Sequence[int], base: bool = False) -> Tensor:
        """Held-out images [B,3,H,W] as an evaluation samples them, at 8 bits a channel."""
        settings = self.config.evaluation_sampling
        with self.backbone.base() if base else nullcontext():
            sampled = sample(
                self.backbone,
                images.batch.select(rows),
                clean_schedule(self.backbone, settings.steps, images.batch.size),
                guidance=settings.guidance,
                noise=Noise((settings.seed,)),
                places=[images.places[row] for row in rows],
                batch_size=settings.batch_size,
            ).images
        assert sampled is not None
        return eight_bits(sampled)

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
        count = sum(len(images.batch) for images in self.held_out)
        fits = all(len(values) == count for values in base.values())
        self.base = base if fits else {}


def worst(base: Values, model: Values, prompts: Sequence[int]) -> list[tuple[int, float]]:
    """(row of its first image, drift in sigmas) of the most drifted prompts."""
    sigmas = by_prompt(base, model, prompts)
    first: dict[int, int] = {}
    size: dict[int, float] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(prompt, row)
        size[prompt] = max(size.get(prompt, 0.0), float(sigmas[row]))
    order = sorted(first, key=lambda prompt: -size[prompt])[:SHOWN]
    return [(first[prompt], size[prompt]) for prompt in order]


def share(count: int, rank: int, world: int) -> tuple[range, list[int]]:
    """The part of `count` things that is of process `rank` of `world`, and the same padded: a
    sharded base needs equally many forward passes of all."""
    size = -(-count // world)
    own = range(min(rank * size, count), min((rank + 1) * size, count))
    return own, [*own, *[0] * (size - len(own))]


def _joined(parts: Sequence[Values]) -> Values:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


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
