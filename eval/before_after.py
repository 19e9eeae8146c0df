"""before_after.png: held-out images of every task, before and after a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import TrainingStage
from flowalign.eval.suite import Benchmark, score_batch
from flowalign.rewards.scoring import AsyncScorer
from flowalign.system.images import eight_bits
from flowalign.training import metrics
from flowalign.training.algorithm import STUDENT
from flowalign.training.data import spread, spread_text
from flowalign.training.report.pictures import COLUMNS, Block, Curve, Row, comparison, read_metrics
from flowalign.training.rollout import generate
from flowalign.types import Scores


def before_after(
    backbone: Backbone,
    config: TrainingStage,
    benchmarks: Sequence[Benchmark],
    path: Path | None,
) -> None:
    """Draw what a run began with and its result: a block per benchmark, a row for each of the two.

    The images are some of those that its evaluations scored: same prompts, same noise, 8 bits.
    path: where to write; metrics.jsonl lies beside it. None: only sample, as every process of a
    sharded base must.
    """
    indices = [spread(len(benchmark.prompts), COLUMNS) for benchmark in benchmarks]
    prompts = [b.prompts.select(rows) for b, rows in zip(benchmarks, indices, strict=True)]

    def sample(adapter: str | Path | None) -> list[Tensor]:
        if adapter:
            backbone.replace_adapter(STUDENT, adapter)
        with backbone.adapter(STUDENT if adapter else None):
            settings = config.evaluation_sampling
            return [
                eight_bits(generate(backbone, batch, settings, rows))
                for batch, rows in zip(prompts, indices, strict=True)
            ]

    begin = config.lora.init
    before, after = sample(begin), sample(Path(config.output) / "adapter")
    if path is None:
        return
    # a reward that hangs must not stop the run
    scoring = AsyncScorer(seconds=config.train.score_seconds)
    for benchmark, batch, *pair in zip(benchmarks, prompts, before, after, strict=True):
        for images in pair:
            scoring.submit(images, batch, partial(score_batch, benchmark.reward))
    answers = scoring.results()
    curves, blocks = read_metrics(path.with_name("metrics.jsonl")), []
    headlines = dict(curves.get(metrics.HEADLINE, ()))  # without evaluations that lost images
    best = max(headlines, key=lambda update: headlines[update], default=0)
    states = (("before", before, 0), (f"after update {best}", after, best))
    for i, benchmark in enumerate(benchmarks):
        rows = [
            _row(benchmark, name, images[i], next(answers), _number(curves, benchmark, update))
            for name, images, update in states
        ]
        title = f"{benchmark.name}: {spread_text(indices[i], len(benchmark.prompts))}"
        blocks.append(Block(title, prompts[i].prompts, rows))
    scoring.discard()
    start = begin or "the base model"
    title = f"{path.parent.name}: before training ({start}), and the adapter that was kept."
    comparison(path, blocks, title=title)


def _row(benchmark: Benchmark, name: str, images: Tensor, scores: Scores, number: float) -> Row:
    values = scores.parts.get(benchmark.headline or "", scores.value).tolist()
    return Row(name, list(images), {benchmark.name: values}, {benchmark.name: number})


def _number(curves: Mapping[str, Curve], benchmark: Benchmark, update: int) -> float:
    """The benchmark's number at the evaluation after `update`; NaN if there is none."""
    for metric in ("overall", benchmark.headline or "reward"):  # as stats.headline_row chooses
        if curve := curves.get(f"{metrics.EVAL}{benchmark.name}/{metric}"):
            return dict(curve).get(update, math.nan)
    return math.nan
