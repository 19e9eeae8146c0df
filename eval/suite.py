"""Evaluation: held-out prompts -> images with fixed noise -> scores -> an EvalReport.

The noise of an image depends on the seed, on the place of its prompt in the set and on the number
of the copy alone, so that models are compared on the same noise, whatever the batch size or the
number of processes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.eval.stats import average, headline_row, rows_of
from flowalign.eval.store import Key, Store
from flowalign.pictures import png
from flowalign.rewards.ahead import Ahead
from flowalign.rewards.guarded import Guarded, score
from flowalign.rollout import Noise, Schedule, sample
from flowalign.types import EvalReport, EvalRow, PromptBatch, Reward


@dataclass(frozen=True)
class Benchmark:
    """A named set of prompts, what judges their images, and how many of them each prompt has.

    headline: the part of the scores that is the benchmark's number; None = the value itself.
    """

    name: str
    prompts: PromptBatch
    reward: Reward
    images: int = 1

    @property
    def headline(self) -> str | None:
        return getattr(self.reward, "headline", None)


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
    rollout = sample(
        backbone,
        prompts,
        schedule,
        guidance=settings.guidance,
        noise=Noise((settings.seed,)),
        copies=copies,
        first=first,
        batch_size=settings.batch_size,
    )
    assert rollout.images is not None
    return rollout.images


def run(
    backbone: Backbone,
    benchmarks: Sequence[Benchmark],
    settings: Settings,
    accelerator: Accelerator | None = None,
    *,
    seconds: float | None = None,
) -> EvalReport:
    """Score every benchmark; with an accelerator each process takes a share of the prompts.

    seconds: as in `judge_images`.
    """
    rows: list[EvalRow] = []
    for benchmark in benchmarks:
        judged = judge_images(backbone, benchmark, settings, accelerator, seconds=seconds)
        rows += rows_of(benchmark, judged.rows)
    return EvalReport(rows=rows, settings=vars(settings), environment=environment())


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
    *,
    keep: int = 0,
    features: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[int], None] | None = None,
    seconds: float | None = None,
    store: Store | None = None,
) -> Judged:
    """Sample and score the images of every prompt; the result is the same on every process.

    A batch is scored while the next one is sampled; one that takes longer than `seconds` is
    invalid (None = wait for ever). keep: prompts whose pictures are kept. features: images
    [B,3,H,W] -> [B,D], of every image. advance is told how many images of this process are done.
    store: where images and rows are kept; what it holds is neither sampled nor scored again.

    Images are scored as 8 bits a channel hold them, so that they are the same from a file.
    """
    world, rank = (accelerator.num_processes, accelerator.process_index) if accelerator else (1, 0)
    pictures: list[bytes] = []
    seen: list[Tensor] = []
    order: list[Key] = []
    scored = _Scored(benchmark, store, seconds, advance or (lambda count: None))
    for part in _batches(benchmark, settings.batch_size, world, rank):
        keys = [(index, copy) for index in part for copy in range(benchmark.images)]
        todo = _unscored(benchmark.reward, keys, scored.rows)
        shown = [key for key in keys if key[0] < keep]
        wanted = {*todo, *shown, *(keys if features else ())}
        images = _images(backbone, benchmark, settings, keys, wanted, store)
        if todo:
            scored.submit(todo, torch.stack([images[key] for key in todo]))
        scored.advance(len(keys) - len(todo))
        pictures += [png(images[key]) for key in shown]
        if features:
            seen.append(_features(torch.stack([images[key] for key in keys]), features))
        order += keys
    if backbone.sharded:
        _keep_step(backbone, benchmark, settings, world, rank)
    rows = scored.finish()
    found = [rows[key] for key in order]
    if world > 1:  # a process without prompts has no features, and knows not how wide they are
        found, pictures, seen = gather_object(found), gather_object(pictures), gather_object(seen)
    return Judged(found, pictures, torch.cat(seen) if seen else None)


class _Scored:
    """A benchmark's rows by (prompt, copy): the store's, and what is scored beside sampling."""

    def __init__(
        self,
        benchmark: Benchmark,
        store: Store | None,
        seconds: float | None,
        advance: Callable[[int], None],
    ) -> None:
        self.prompts, self.store, self.advance = benchmark.prompts, store, advance
        self.rows = dict(store.rows()) if store else {}
        self._under_way: Sequence[Key] = ()
        self._scoring = Ahead(
            lambda images, batch: score(benchmark.reward, images, batch.prompts, batch.metadata),
            seconds,
        )

    def submit(self, keys: Sequence[Key], images: Tensor) -> None:
        """Score these, once the batch before is done: a slow reward does not fill the memory."""
        self._collect()
        self._under_way = keys
        self._scoring.submit(images, self.prompts.select([index for index, _ in keys]))

    def finish(self) -> dict[Key, dict[str, Any]]:
        """All rows, when the last batch is scored."""
        self._collect()
        self._scoring.forget()
        return self.rows

    def _collect(self) -> None:
        keys, self._under_way = self._under_way, ()
        if not keys:
            return
        judged = _image_rows(keys, self.prompts, self._scoring.collect())
        fresh = {k: row for k, row in zip(keys, judged, strict=True) if k not in self.rows}
        self.rows.update(fresh)
        if self.store:
            self.store.append(list(fresh.values()))
        self.advance(len(keys))


def _batches(benchmark: Benchmark, size: int, world: int, rank: int) -> list[range]:
    """The prompts of each batch of a process: whole prompts, at most `size` images if that is
    possible.

    The batches are the same for any number of processes, and so is their arithmetic, unless there
    are more processes than batches; then they are smaller.
    """
    total = len(benchmark.prompts)
    step = max(1, size // benchmark.images)
    if total <= step * (world - 1):
        step = -(-total // world)
    starts = range(0, total, step)
    mine = starts[rank * len(starts) // world : (rank + 1) * len(starts) // world]
    return [range(start, min(start + step, total)) for start in mine]


def _keep_step(
    backbone: Backbone, benchmark: Benchmark, settings: Settings, world: int, rank: int
) -> None:
    """Sample one more batch, for nothing, where another process has one more: each forward pass of
    a sharded base is one of all processes."""
    turns = [len(_batches(benchmark, settings.batch_size, world, r)) for r in range(world)]
    for _ in range(max(turns) - turns[rank]):
        generate(backbone, benchmark.prompts.select([0]), settings)


def _unscored(reward: Reward, keys: Sequence[Key], rows: Mapping[Key, object]) -> list[Key]:
    """The images without a row; of a groupwise reward, whole prompts of which one has none."""
    missing = [key for key in keys if key not in rows]
    if not getattr(reward, "groupwise", False):
        return missing
    prompts = {index for index, _ in missing}
    return [key for key in keys if key[0] in prompts]


def _images(
    backbone: Backbone,
    benchmark: Benchmark,
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
    prompts = benchmark.prompts.select(place)
    images = generate(backbone, prompts, settings, place[0], benchmark.images)
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


def _image_rows(keys: Sequence[Key], prompts: PromptBatch, scores: Guarded) -> list[dict[str, Any]]:
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
    """The mean over the benchmarks of the number that each is known by."""
    return average([headline_row(mark, report.rows) for mark in benchmarks]).mean


def environment() -> dict[str, str]:
    """What the numbers were measured with: versions, and the device."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("diffusers", "transformers", "peft", "rapidocr", "paddleocr", "onnxruntime"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return found
