"""Evaluation: held-out prompts -> images with fixed noise -> scores -> an EvalReport.

The noise of an image depends on the seed, on the place of its prompt in the set and on the number
of the copy alone, so that models are compared on the same noise, whatever the batch size or the
number of processes.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.devices import current
from flowalign.eval.stats import average, headline_row, lost, rows_of
from flowalign.eval.store import Key, Store
from flowalign.pictures import png
from flowalign.rewards.scoring import Ahead, score
from flowalign.rollout import Noise, Schedule, places, sample
from flowalign.types import EvalReport, EvalRow, PromptBatch, Reward, Scores


@dataclass(frozen=True)
class Benchmark:
    """A named set of prompts, what judges their images, and how many of them each prompt has.

    source: the name of the images, which other benchmarks may judge, too; None = they are its own.
    headline: the part of the scores that is the benchmark's number; None = the value itself.
    """

    name: str
    prompts: PromptBatch
    reward: Reward
    images: int = 1
    source: str | None = None

    @property
    def headline(self) -> str | None:
        return getattr(self.reward, "headline", None)


@dataclass(frozen=True)
class ImageSet:
    """Images that are sampled once: so many of each prompt, and the benchmarks that judge them, if
    any; layout: the official folder that they are written to, too (a key of layouts.LAYOUTS)."""

    name: str
    prompts: PromptBatch
    images: int = 1
    judges: tuple[Benchmark, ...] = ()
    layout: str | None = None

    @staticmethod
    def of(benchmark: Benchmark) -> ImageSet:
        """That of a benchmark which shares its images with no other."""
        return ImageSet(benchmark.name, benchmark.prompts, benchmark.images, (benchmark,))


@dataclass(frozen=True)
class Settings:
    """How images are sampled: ODE steps, CFG scale, seed, images a forward."""

    steps: int
    guidance: float
    seed: int
    batch_size: int


def generate(
    backbone: Backbone,
    prompts: PromptBatch,
    settings: Settings,
    first: int = 0,
    copies: int = 1,
) -> Tensor:
    """Images [P*copies,3,H,W] in [0,1] of P prompts, deterministic (Euler ODE).

    first: the place of prompts[0] in its set. The copies of a prompt follow one another.
    """
    schedule = Schedule(backbone.sigmas(settings.steps), "ode", 0.0, None)
    found = places(len(prompts), copies)
    rollout = sample(
        backbone,
        prompts.select([prompt for prompt, _ in found]),
        schedule,
        guidance=settings.guidance,
        noise=Noise((settings.seed,)),
        places=[(first + prompt, copy) for prompt, copy in found],
        batch_size=settings.batch_size,
    )
    assert rollout.images is not None
    return rollout.images


class EvaluationError(RuntimeError):
    """An evaluation of which too many images have no score: which, why, what to do."""


def run(
    backbone: Backbone,
    sets: Sequence[ImageSet],
    settings: Settings,
    accelerator: Accelerator | None = None,
    *,
    seconds: float | None = None,
    max_invalid_share: float = 1.0,
) -> EvalReport:
    """Score every benchmark; with an accelerator each process takes a share of the prompts.

    seconds: as in `judge_set`. max_invalid_share: a benchmark with more images without a score is
    `lost`.
    """
    rows: list[EvalRow] = []
    gone: dict[str, str] = {}
    for images in sets:
        found = judge_set(backbone, images, settings, accelerator, seconds=seconds)
        for benchmark, judged in zip(images.judges, found, strict=True):
            rows += rows_of(benchmark, judged.rows)
            why = lost(benchmark, judged.rows, max_invalid_share)
            gone |= {benchmark.name: why} if why else {}
    return EvalReport(rows, vars(settings), environment(), gone)


@dataclass(frozen=True)
class Judged:
    """The images of a benchmark: one row per image, in order, and the first few pictures.

    A row holds index (the place of its prompt), copy, prompt, metadata, value (NaN = invalid),
    reason (why it failed, or what the score rests on; None where nothing is said) and the parts of
    its score; the copies of a prompt follow one another. pictures are PNG files, of the first rows;
    features [N,D] on the CPU, one a row, None where none were asked for.
    """

    rows: list[dict[str, Any]]
    pictures: list[bytes]
    features: Tensor | None = None


def judge_images(
    backbone: Backbone,
    benchmark: Benchmark,
    settings: Settings,
    accelerator: Accelerator | None = None,
    **options: Any,
) -> Judged:
    """`judge_set` of one benchmark that has its images for itself."""
    return judge_set(backbone, ImageSet.of(benchmark), settings, accelerator, **options)[0]


def judge_set(
    backbone: Backbone,
    images: ImageSet,
    settings: Settings,
    accelerator: Accelerator | None = None,
    *,
    keep: int = 0,
    features: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[int], None] | None = None,
    seconds: float | None = None,
    store: Store | None = None,
) -> list[Judged]:
    """Sample and score the images of every prompt: what each judge finds, in the order of
    `images.judges`; the result is the same on every process.

    A batch is scored while the next one is sampled; one that takes a judge longer than `seconds` is
    invalid (None = wait for ever). keep: prompts whose pictures are kept. features: images
    [B,3,H,W] -> [B,D], of every image. advance is told how many images of this process are done,
    once by each judge (where there is none, once). store: where images and rows are kept; what it
    holds is neither sampled nor scored again.

    Images are scored as 8 bits a channel hold them, so that they are the same from a file.
    """
    world, rank = (accelerator.num_processes, accelerator.process_index) if accelerator else (1, 0)
    advance = advance or (lambda count: None)
    pictures: list[bytes] = []
    seen: list[Tensor] = []
    order: list[Key] = []
    scored = _Scored(images.judges, store, seconds, advance)
    parts = _batches(images, settings.batch_size, world, rank)
    needs = {part: _needs(images, part, scored, keep, features is not None) for part in parts}
    sampled = [part for part in parts if _to_sample(_keys(images, part), needs[part], store)]
    for part, wanted in needs.items():
        if sampled[:1] == [part]:  # the encoders come to the device once, not for every batch
            backbone.text.prepare([images.prompts.select(each).prompts for each in sampled])
            sampled.pop(0)
        keys = _keys(images, part)
        todo = scored.missing(keys)
        shown = [key for key in keys if key[0] < keep]
        found = _images(backbone, images, settings, keys, wanted, store)
        scored.submit(keys, todo, found)
        if not images.judges:
            advance(len(keys))
        pictures += [png(found[key]) for key in shown]
        if features:
            seen.append(_features(torch.stack([found[key] for key in keys]), features))
        order += keys
    if backbone.sharded:
        _keep_step(backbone, images, settings, world, rank)
    ordered = [[rows[key] for key in order] for rows in scored.finish()]
    if world > 1:  # a process without prompts has no features, and knows not how wide they are
        ordered = [gather_object(rows) for rows in ordered]
        pictures, seen = gather_object(pictures), gather_object(seen)
    joined = torch.cat(seen) if seen else None
    return [Judged(rows, pictures, joined) for rows in ordered]


class _Scored:
    """The rows of each judge by (prompt, copy): the store's, and what is scored beside sampling."""

    def __init__(
        self,
        judges: Sequence[Benchmark],
        store: Store | None,
        seconds: float | None,
        advance: Callable[[int], None],
    ) -> None:
        self.judges, self.store, self.advance = judges, store, advance
        self.rows = {
            mark.name: store.rows[mark.name].read(mark.prompts) if store else {} for mark in judges
        }
        self._under_way: list[tuple[Benchmark, Sequence[Key]]] = []
        self._scoring = Ahead(seconds=seconds)

    def missing(self, keys: Sequence[Key]) -> dict[str, list[Key]]:
        """{judge: which of these it has yet to score}."""
        return {
            mark.name: _unscored(mark.reward, keys, self.rows[mark.name]) for mark in self.judges
        }

    def submit(
        self, keys: Sequence[Key], todo: Mapping[str, Sequence[Key]], images: Mapping[Key, Tensor]
    ) -> None:
        """Score those of a batch that are to do, once the batch before is done: a slow reward does
        not fill the memory."""
        for mine in todo.values():
            self.advance(len(keys) - len(mine))
        if not any(todo.values()):
            return
        self._collect()
        for mark in self.judges:
            if mine := todo[mark.name]:
                batch = mark.prompts.select([index for index, _ in mine])
                shown = torch.stack([images[key] for key in mine])
                self._scoring.submit(shown, batch, partial(_score, mark.reward))
                self._under_way.append((mark, mine))

    def finish(self) -> list[dict[Key, dict[str, Any]]]:
        """All rows of each judge, when the last batch is scored."""
        self._collect()
        self._scoring.forget()
        return [self.rows[mark.name] for mark in self.judges]

    def _collect(self) -> None:
        under_way, self._under_way = self._under_way, []
        for (mark, keys), scores in zip(under_way, self._scoring.answers(), strict=True):
            judged = _image_rows(keys, mark.prompts, scores)
            rows = self.rows[mark.name]
            fresh = {k: row for k, row in zip(keys, judged, strict=True) if k not in rows}
            rows.update(fresh)
            if self.store:
                self.store.rows[mark.name].append(list(fresh.values()))
            self.advance(len(keys))


def _score(reward: Reward, images: Tensor, batch: PromptBatch) -> Scores:
    return score(reward, images, batch.prompts, batch.metadata)


def _batches(images: ImageSet, size: int, world: int, rank: int) -> list[range]:
    """The prompts of each batch of a process: whole prompts, at most `size` images if that is
    possible.

    The batches are the same for any number of processes, and so is their arithmetic: where there
    are more processes than batches, some have none.
    """
    total = len(images.prompts)
    step = max(1, size // images.images)
    starts = range(0, total, step)
    mine = starts[rank * len(starts) // world : (rank + 1) * len(starts) // world]
    return [range(start, min(start + step, total)) for start in mine]


def _keys(images: ImageSet, part: range) -> list[Key]:
    return [(index, copy) for index in part for copy in range(images.images)]


def _needs(images: ImageSet, part: range, scored: _Scored, keep: int, features: bool) -> set[Key]:
    """Which images of a batch are asked for: those to score, to show, to take features of."""
    keys = _keys(images, part)
    shown = [key for key in keys if key[0] < keep]
    return {*shown, *(keys if features else ())}.union(*scored.missing(keys).values())


def _to_sample(keys: Sequence[Key], wanted: Collection[Key], store: Store | None) -> bool:
    """Whether a batch will be sampled, as far as can be told without a look into the files."""
    if store is None:
        return bool(wanted)
    return any(not store.has(key) for key in keys if key in wanted or store.keeps(key))


def _keep_step(
    backbone: Backbone, images: ImageSet, settings: Settings, world: int, rank: int
) -> None:
    """Sample one more batch, for nothing, where another process has one more: each forward pass of
    a sharded base is one of all processes."""
    turns = [len(_batches(images, settings.batch_size, world, r)) for r in range(world)]
    for _ in range(max(turns) - turns[rank]):
        generate(backbone, images.prompts.select([0]), settings)


def _unscored(reward: Reward, keys: Sequence[Key], rows: Mapping[Key, object]) -> list[Key]:
    """The images without a row; of a groupwise reward, whole prompts of which one has none."""
    missing = [key for key in keys if key not in rows]
    if not getattr(reward, "groupwise", False):
        return missing
    prompts = {index for index, _ in missing}
    return [key for key in keys if key[0] in prompts]


def _images(
    backbone: Backbone,
    of: ImageSet,
    settings: Settings,
    keys: Sequence[Key],
    wanted: Collection[Key],
    store: Store | None,
) -> dict[Key, Tensor]:
    """The wanted images [3,H,W] of a batch, on the model's device, each at 8 bits a channel.

    Those that the store lacks are sampled with their whole batch, so that they are those of a run
    that was not interrupted; what it keeps is written.
    """
    found: dict[Key, Tensor] = {}
    for key in wanted:
        image = store.load(key) if store else None
        if image is not None:
            found[key] = _eight_bits(image.to(backbone.device))
    missing = {key for key in wanted if key not in found}
    if store:
        missing |= {key for key in keys if store.keeps(key) and not store.has(key)}
    if not missing:
        return found
    place = sorted({index for index, _ in keys})
    images = generate(backbone, of.prompts.select(place), settings, place[0], of.images)
    for key, image in zip(keys, _eight_bits(images), strict=True):
        if key in missing:
            found[key] = image
            if store:
                store.save(key, image)
    return found


def _eight_bits(images: Tensor) -> Tensor:
    """Images in [0,1] as a PNG holds them; what is not finite stays so."""
    return ((images.clamp(0, 1) * 255).round() / 255).where(images.isfinite(), images)


def _features(images: Tensor, features: Callable[[Tensor], Tensor]) -> Tensor:
    """[B,D] on the CPU; NaN for an image that is not finite, which no encoder need bear."""
    known = images.isfinite().flatten(1).all(1)
    found = features(images.where(known[:, None, None, None], 0)).float().cpu()
    return found.where(known.cpu()[:, None], torch.nan)


def _image_rows(keys: Sequence[Key], prompts: PromptBatch, scores: Scores) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "copy": copy,
            "prompt": prompts.prompts[index],
            "metadata": prompts.metadata[index],
            "reason": scores.reasons.get(i),
            "value": float(scores.value[i]),
            **{name: float(part[i]) for name, part in scores.parts.items()},
        }
        for i, (index, copy) in enumerate(keys)
    ]


def headline(report: EvalReport, benchmarks: Sequence[Benchmark]) -> float:
    """The mean over the benchmarks of the number that each is known by; NaN if one of them is
    lost."""
    if any(mark.name in report.lost for mark in benchmarks):
        return math.nan
    return average([headline_row(mark, report.rows) for mark in benchmarks]).mean


def environment() -> dict[str, str]:
    """What the numbers were measured with: versions, and the device."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("diffusers", "transformers", "peft", "rapidocr", "paddleocr", "onnxruntime"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    device = current() or torch.device("cpu")
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    return found
