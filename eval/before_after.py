"""before_after.png: held-out images of every task, before and after a training run."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from flowalign.training.report.pictures import (
    COLUMNS,
    Block,
    Row,
    comparison,
    read_metrics,
    scored_row,
)
from flowalign.training.rollout import generate
from flowalign.training.run.resume import LOG


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
    curves = {name: dict(curve) for name, curve in read_metrics(path.parent / LOG).items()}
    headlines = curves.get(metrics.HEADLINE, {})  # without evaluations that lost images
    best = max(headlines, key=lambda update: headlines[update], default=0)

    def row(benchmark: Benchmark, name: str, images: Tensor, update: int) -> Row:
        scores = next(answers)
        values = scores.parts.get(benchmark.headline or "", scores.value).tolist()
        prefix = f"{metrics.EVAL}{benchmark.name}/"  # then as stats.headline_row chooses
        names = [f"{prefix}overall", f"{prefix}{benchmark.headline or 'reward'}"]
        number = next((curves[n].get(update, math.nan) for n in names if n in curves), math.nan)
        return scored_row(name, list(images), {benchmark.name: values}, {benchmark.name: number})

    states = (("before", before, 0), (f"after update {best}", after, best))
    blocks = []
    for i, benchmark in enumerate(benchmarks):
        title = f"{benchmark.name}: {spread_text(indices[i], len(benchmark.prompts))}"
        rows = [row(benchmark, name, images[i], update) for name, images, update in states]
        blocks.append(Block(title, prompts[i].prompts, rows))
    scoring.discard()
    start = begin or "the base model"
    title = f"{path.parent.name}: before training ({start}), and the adapter that was kept."
    comparison(path, blocks, title=title)
