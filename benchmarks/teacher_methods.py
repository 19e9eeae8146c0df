"""GRPO, DiffusionNFT and AWM as teachers of the tiny world: scores against images and forward
passes.

    python benchmarks/teacher_methods.py --seeds 0 1 2 --out outputs/teachers

Runs configs/tiny/teacher_TASK[_METHOD].yaml for every task, method and seed, with an evaluation and
a checkpoint every `--every` rollouts; runs that are there go on. Held equal: base model, adapter,
prompts, images of a rollout, held-out prompts and noise. Prints a Markdown table and draws
docs/teachers.png. The numbers of each run are kept in docs/teachers.json; a run that is not in
`--out` is read from there with `--present`.

A forward pass is counted per image and update: those of sampling, and for each trained state 3 (a
forward pass and a backward pass of twice its cost) plus one for each label without gradient.
Drift is the mean of |v - v_base|^2 over the states of the base model's own trajectories.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flowalign.commands import build, run
from flowalign.config import ForwardStage, GrpoStage, TrainingStage, load
from flowalign.training.algorithm import STUDENT
from flowalign.training.data import load_prompts, subset
from flowalign.training.run import checkpoint
from flowalign.training.solvers import forwards
from flowalign.training.step import MovingAverage

TASKS = ("geneval", "ocr", "preference")
METHODS = ("grpo", "nft", "awm")
COLORS = {"grpo": "#777777", "nft": "#0072b2", "awm": "#d55e00"}
PROMPTS = 64  # of the drift


@dataclass(frozen=True)
class Curve:
    """Held-out scores of a run, one an evaluation; drift: of the adapters that were evaluated."""

    rollouts: list[int]
    scores: list[float]
    drifts: list[float]


def config_of(method: str, task: str) -> str:
    """The config's file."""
    suffix = "" if method == "grpo" else f"_{method}"
    return f"configs/tiny/teacher_{task}{suffix}.yaml"


def settings(
    method: str, task: str, seed: int, every: int, out: Path, changes: Sequence[str] = ()
) -> TrainingStage:
    """The config of a run."""
    given = [
        f"output={out / f'{method}_{task}_{seed}'}",
        f"seed={seed}",
        f"evaluation.every={every}",
        f"train.checkpoint_every={every}",
        "train.keep=1000",
        "train.sample_every=1000",
        "train.trackers=[]",
    ]
    return load(config_of(method, task), [*given, *changes], stage=TrainingStage)


def passes(config: TrainingStage) -> float:
    """Forward passes an image of an update."""
    rollout = config.rollout
    sampling = forwards(rollout.solver, rollout.steps)
    if isinstance(config, GrpoStage):
        return sampling + rollout.width * (3 + (config.grpo.kl_weight > 0))
    assert isinstance(config, ForwardStage)
    labels = float(config.forward.kl_weight > 0) + ("average" in config.policies)
    if "old" in config.policies:  # in the first optimizer step it may still be the student
        share = 1 / config.optimizer.updates_per_rollout
        labels += 1 if config.policies["old"].decay > 0 else 1 - share
    return sampling + config.forward.states * (3 + labels)


def evaluated(folder: Path) -> tuple[list[int], list[float]]:
    """Rollouts and held-out scores of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(row["update"], row["eval/headline"]) for row in rows if "eval/headline" in row]
    return [update for update, _ in found], [score for _, score in found]


@torch.no_grad()
def drifts(config: TrainingStage, rollouts: Sequence[int]) -> list[float]:
    """The drift of the averaged adapter after so many rollouts, from the run's checkpoints."""
    folder = Path(config.output)
    cache = folder / "drift.json"
    known: dict[str, float] = json.loads(cache.read_text()) if cache.exists() else {"0": 0.0}
    if any(str(update) not in known for update in rollouts):
        torch.manual_seed(0)
        backbone = build.student(config, torch.device("cpu"))
        parameters = backbone.adapter_parameters(STUDENT)
        task = config.tasks[0]
        assert task.validation and config.ema
        prompts = subset(load_prompts(task.validation, task.name), PROMPTS).prompts
        cond = backbone.encode(prompts)
        states, sigmas = [], backbone.sigmas(config.rollout.steps)
        x = torch.randn(
            len(prompts), *backbone.latent_shape, generator=torch.Generator().manual_seed(1)
        )
        for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
            with backbone.base():
                velocity = backbone.velocity(x, float(sigma), cond, guidance=1.0)
            states.append((x, float(sigma), velocity))
            x = x + (following - sigma) * velocity
        average = MovingAverage(parameters, **config.ema.model_dump())
        for update in rollouts:
            if str(update) in known:
                continue
            place = folder / "checkpoints" / f"update_{update:06d}"
            weights = {"adapter": parameters, "ema": average.shadow_params}
            _, progress = checkpoint.load(place, 0, weights)
            with average.of(parameters, progress["steps"]):
                errors = [
                    float(((backbone.velocity(x, s, cond, guidance=1.0) - v) ** 2).mean())
                    for x, s, v in states
                ]
            known[str(update)] = statistics.fmean(errors)
        cache.write_text(json.dumps(known))
    return [known[str(update)] for update in rollouts]


def when(x: Sequence[float], y: Sequence[float], level: float) -> float | None:
    """Where a curve first reaches a level, between its points on a line; None if it never does."""
    for i, value in enumerate(y):
        if value >= level:
            if i == 0 or y[i - 1] >= value:
                return x[i]
            return x[i - 1] + (x[i] - x[i - 1]) * (level - y[i - 1]) / (value - y[i - 1])
    return None


def at(x: Sequence[float], y: Sequence[float], place: float) -> float:
    """The value of a curve at a place, between its points on a line."""
    for i in range(1, len(x)):
        if x[i] >= place:
            return y[i - 1] + (y[i] - y[i - 1]) * (place - x[i - 1]) / (x[i] - x[i - 1])
    return y[-1]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over seeds, at the rollouts that all have."""
    shared = sorted(set.intersection(*(set(curve.rollouts) for curve in curves)))
    rows = [[curve.rollouts.index(place) for place in shared] for curve in curves]
    pick = list(zip(curves, rows, strict=True))
    scores = [statistics.fmean(c.scores[r[i]] for c, r in pick) for i in range(len(shared))]
    drifts = [statistics.fmean(c.drifts[r[i]] for c, r in pick) for i in range(len(shared))]
    return Curve(shared, scores, drifts)


def table(runs: dict[tuple[str, str], list[Curve]], cost: dict[tuple[str, str], float]) -> str:
    """Each method against GRPO: when its mean curve reaches GRPO's best score, and the drift
    there."""
    lines = [
        "| task | method | seeds | best score (std of seeds) | after rollouts | "
        "rollouts to GRPO's best | forward passes an image to it | drift there | share of passes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        if ("grpo", task) not in runs:
            continue
        base = mean_curve(runs["grpo", task])
        level = max(base.scores)
        needed = base.rollouts[base.scores.index(level)]
        for method in METHODS:
            if (method, task) not in runs:
                continue
            curves = runs[method, task]
            curve, each = mean_curve(curves), cost[method, task]
            best = max(curve.scores)
            ends = [max(one.scores) for one in curves]
            spread = statistics.stdev(ends) if len(ends) > 1 else float("nan")
            reached = when(curve.rollouts, curve.scores, level)
            head = f"| {task} | {method} | {len(curves)} | {best:.3f} ({spread:.3f})"
            head += f" | {curve.rollouts[curve.scores.index(best)]}"
            if reached is None:
                lines.append(f"{head} | never | | | |")
                continue
            share = reached * each / (needed * cost["grpo", task])
            drift = at(curve.rollouts, curve.drifts, reached)
            lines.append(
                f"{head} | {reached:.0f} | {reached * each:.0f} | {drift:.4f} | {share:.2f} |"
            )
    return "\n".join(lines)


def draw(
    path: Path, runs: dict[tuple[str, str], list[Curve]], cost: dict[tuple[str, str], float],
    images: int,
) -> None:  # fmt: skip
    """Score against images, against forward passes an image, and against drift; a column a task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), dpi=110, layout="constrained")
    axes = figure.subplots(3, len(TASKS), squeeze=False)
    for column, task in enumerate(TASKS):
        for method in METHODS:
            if (method, task) not in runs:
                continue
            mean, each = mean_curve(runs[method, task]), cost[method, task]
            places = (
                lambda c: [images * r / 1000 for r in c.rollouts],
                lambda c, each=each: [each * r for r in c.rollouts],
                lambda c: c.drifts,
            )
            for row, place in enumerate(places):
                axis, color = axes[row][column], COLORS[method]
                for curve in runs[method, task]:
                    axis.plot(place(curve), curve.scores, color=color, alpha=0.3, linewidth=0.8)
                axis.plot(place(mean), mean.scores, color=color, linewidth=2, label=method)
        for row, label in enumerate(
            ("images (thousands)", "forward passes an image", "drift from the base model")
        ):
            axes[row][column].set_xlabel(label, fontsize=9)
            axes[row][column].set_ylabel("held-out score", fontsize=9)
            axes[row][column].grid(alpha=0.3)
        axes[0][column].set_title(task)
    axes[0][0].legend(fontsize=9)
    figure.savefig(path)


def main() -> None:
    """Run what is missing, then print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=5, help="rollouts between evaluations")
    parser.add_argument("--out", type=Path, default=Path("outputs/teachers"))
    parser.add_argument("--picture", type=Path, default=Path("docs/teachers.png"))
    parser.add_argument("--data", type=Path, default=Path("docs/teachers.json"))
    parser.add_argument("--present", action="store_true", help="train nothing")
    parser.add_argument("--set", nargs="*", default=[], help="key.path=value for every run")
    args = parser.parse_args()
    runs: dict[tuple[str, str], list[Curve]] = {}
    cost: dict[tuple[str, str], float] = {}
    images = 0
    data: dict[str, dict] = json.loads(args.data.read_text()) if args.data.exists() else {}
    for seed in args.seeds:
        for method in args.methods:
            for task in args.tasks:
                config = settings(method, task, seed, args.every, args.out, args.set)
                folder = Path(config.output)
                finished = (folder / "before_after.png").exists()  # the last thing that is written
                if not (finished or args.present):
                    run.train(config, resume=True)
                if finished or not args.present:
                    places, scores = evaluated(folder)
                    data[folder.name] = asdict(Curve(places, scores, drifts(config, places)))
                if folder.name in data:
                    runs.setdefault((method, task), []).append(Curve(**data[folder.name]))
                    cost[method, task], images = passes(config), config.rollout.images
    lines = (f"{json.dumps(name)}: {json.dumps(curve)}" for name, curve in sorted(data.items()))
    args.data.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(table(runs, cost))
    draw(args.picture, runs, cost, images)


if __name__ == "__main__":
    main()
