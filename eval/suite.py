"""Evaluation: held-out prompts -> images with fixed noise -> scores -> an EvalReport.

The noise of an image depends on the seed and on the place of its prompt in the set alone, so that
models are compared on the same noise, whatever the batch size or the number of processes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.eval.stats import average, headline_row, rows_of
from flowalign.pictures import png
from flowalign.rewards.ahead import Ahead
from flowalign.rewards.guarded import Guarded, score
from flowalign.rollout import Noise, Schedule, sample
from flowalign.types import EvalReport, EvalRow, PromptBatch, Reward


@dataclass(frozen=True)
class Benchmark:
    """A named set of prompts and what judges their images.

    headline: the part of the scores that is the benchmark's number; None = the value itself.
    """

    name: str
    prompts: PromptBatch
    reward: Reward

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
    backbone: Backbone, prompts: PromptBatch, settings: Settings, first: int = 0
) -> Tensor:
    """Images [P,3,H,W] in [0,1] of P prompts, deterministic (Euler ODE)."""
    schedule = Schedule(backbone.sigmas(settings.steps), "ode", 0.0, None)
    rollout = sample(
        backbone,
        prompts,
        schedule,
        guidance=settings.guidance,
        noise=Noise((settings.seed,)),
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
    """The images of a benchmark: one row per prompt, in order, and the first few pictures.

    A row holds index, prompt, metadata, value (NaN = invalid), reason (why it failed, or what the
    score rests on; None where nothing is said) and the parts of its score;
    pictures are PNG files; features [P,D] on the CPU, None where none were asked for.
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
) -> Judged:
    """Sample and score one image per prompt; the result is the same on every process.

    A batch is scored while the next one is sampled; one that takes longer than `seconds` is
    invalid (None = wait for ever). keep: pictures that are kept. features: images [B,3,H,W] ->
    [B,D], of every image. advance is told how many images of this process were scored.
    """
    world, rank = (accelerator.num_processes, accelerator.process_index) if accelerator else (1, 0)
    total, size = len(benchmark.prompts), settings.batch_size
    first, last = rank * total // world, (rank + 1) * total // world
    rows: list[dict[str, Any]] = []
    pictures: list[bytes] = []
    seen: list[Tensor] = []
    scoring = Ahead(
        lambda images, batch: score(benchmark.reward, images, batch.prompts, batch.metadata),
        seconds,
    )

    def collect(start: int, mine: PromptBatch) -> None:
        rows.extend(_image_rows(start, mine, scoring.collect()))
        if advance:
            advance(len(mine))

    before: tuple[int, PromptBatch] | None = None
    for start in range(first, last, size):
        mine = benchmark.prompts.select(range(start, min(start + size, last)))
        images = generate(backbone, mine, settings, start)
        if before:  # one batch waits at a time, so that a slow reward does not fill the memory
            collect(*before)
        scoring.submit(images, mine)
        before = start, mine
        pictures += [png(image) for image in images[: max(0, keep - start)]]
        if features:
            seen.append(_features(images, features))
    if before:
        collect(*before)
    scoring.forget()
    if world > 1:  # a process without prompts has no features, and knows not how wide they are
        rows, pictures, seen = gather_object(rows), gather_object(pictures), gather_object(seen)
    return Judged(rows, pictures, torch.cat(seen) if seen else None)


def _features(images: Tensor, features: Callable[[Tensor], Tensor]) -> Tensor:
    """[B,D] on the CPU; NaN for an image that is not finite, which no encoder need bear."""
    known = images.isfinite().flatten(1).all(1)
    found = features(images.where(known[:, None, None, None], 0)).float().cpu()
    return found.where(known.cpu()[:, None], torch.nan)


def _image_rows(first: int, prompts: PromptBatch, scores: Guarded) -> list[dict[str, Any]]:
    return [
        {
            "index": first + i,
            "prompt": prompts.prompts[i],
            "metadata": prompts.metadata[i],
            "reason": scores.reasons.get(i),
            "value": float(scores.value[i]),
            **{name: float(part[i]) for name, part in scores.parts.items()},
        }
        for i in range(len(prompts))
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
