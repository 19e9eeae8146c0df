"""Held-out score against forward passes: Flow-OPD with its teachers, training on all rewards.

    python benchmarks/curves.py outputs/tiny/seed_{0,1,2}

Each folder is a run of benchmarks/seeds.yaml. Prints a Markdown table of means over the folders,
and draws docs/curves.png.

A forward pass is one image through the transformer once; a backward pass counts as two. The passes
of the common start (guided), of rewards and of evaluations are not counted.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from budget import cost, evaluated

from flowalign.config import TrainingStage, load

# Of an image of the student, on average: 2.4 to its trained state, a label with CFG (2), the anchor
# (1), and one training step (3)
STUDENT = 8.4
TEACHERS = ("teacher_geneval", "teacher_ocr", "teacher_preference")
LINES = {  # of the figure: the run, and whether the teachers come before it
    "Flow-OPD": ("student_curve", True),
    "NFT on all rewards": ("nft_mix", False),
    "GRPO on all rewards": ("grpo_mix", False),
}
COLORS = ("#d55e00", "#0072b2", "#777777")


def total(folder: Path, run: str) -> tuple[float, int]:
    """Forward passes and rollouts of a whole run."""
    config = load(folder / run / "config.yaml", [], stage=TrainingStage)
    assert config.train.updates
    if config.stage == "opd":
        return STUDENT * config.rollout.images * config.train.updates, config.train.updates
    return cost(config), config.train.updates


def curve(folder: Path, run: str, taught: bool) -> Iterator[tuple[int, float, float]]:
    """(rollouts, forward passes so far, held-out score) of each evaluation."""
    before = sum(total(folder, name)[0] for name in TEACHERS) if taught else 0.0
    passes, updates = total(folder, run)
    for rollouts, score in zip(*evaluated(folder / run), strict=True):
        yield rollouts, before + passes * rollouts / updates, score


def means(folders: Sequence[Path], run: str, taught: bool) -> list[tuple[int, float, list[float]]]:
    """(rollouts, forward passes, score of each folder), as far as all folders have them."""
    curves = [list(curve(folder, run, taught)) for folder in folders if (folder / run).is_dir()]
    return [
        (points[0][0], points[0][1], [score for *_, score in points])
        for points in zip(*curves, strict=False)
    ]


def said(scores: Sequence[float]) -> str:
    """Mean ± standard error over seeds."""
    mean = f"{statistics.fmean(scores):.3f}"
    if len(scores) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(scores) / math.sqrt(len(scores)):.3f}"


def main() -> None:
    """Print and draw."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path, default=Path("docs/curves.png"))
    args = parser.parse_args()
    figure = Figure(figsize=(7, 4.4), dpi=110, layout="constrained")
    axis = figure.subplots()
    print("| | rollouts | passes, thousands | held-out average | seeds |\n|---|---|---|---|---|")
    for (name, (run, taught)), color in zip(LINES.items(), COLORS, strict=True):
        points = means(args.folders, run, taught)
        for rollouts, passes, scores in points:
            cells = (name, str(rollouts), f"{passes / 1e3:.0f}", said(scores), str(len(scores)))
            print(f"| {' | '.join(cells)} |")
        x = [passes / 1e3 for _, passes, _ in points]
        axis.plot(x, [statistics.fmean(s) for *_, s in points], marker="o", color=color, label=name)
        for _, passes, scores in points:
            axis.scatter([passes / 1e3] * len(scores), scores, color=color, alpha=0.35, s=12)
    axis.set(xlabel="thousand forward passes, teachers counted", ylabel="held-out average")
    axis.set_ylim(0.65, 0.95)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")
    figure.savefig(args.picture)


if __name__ == "__main__":
    main()
