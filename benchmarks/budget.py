"""What a smaller budget costs a teacher: its held-out score against forward passes.

    python benchmarks/budget.py --seeds 0 1 2 --out outputs/budget

Each variant changes a setting of NFT teachers that start from the base model (ALL over
configs/tiny/teacher_TASK_nft.yaml); all else, the learning rate and its fall to 0 included, is held
equal. The score is that of the last weights on
400 test prompts, without guidance. Runs that are there are not repeated. Prints a Markdown table,
draws docs/budget.png, and keeps the numbers in docs/budget.json; with `--present` nothing is
trained.

A forward pass is one image through the transformer once; a backward pass counts as two. The passes
of evaluations and rewards are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowalign.commands import run
from flowalign.config import ForwardStage, GrpoStage, TrainingStage, load

TASKS = ("geneval", "ocr")
ALL = ["lora={rank: 32, alpha: 64}", "rollout.prompts=16", "train.updates=40"]
LR = {"geneval": "1e-3", "ocr": "1.5e-3"}
FULL = "all: 40 rollouts of 16 x 8 images, 8 noise levels, 10 steps"
VARIANTS: dict[str, list[str]] = {
    FULL: [],
    "20 rollouts": ["train.updates=20"],
    "10 rollouts": ["train.updates=10"],
    "8 x 8 images": ["rollout.prompts=8"],
    "4 x 8 images": ["rollout.prompts=4"],
    "2 x 8 images": ["rollout.prompts=2"],
    "8 x 8 images, 80 rollouts": ["rollout.prompts=8", "train.updates=80"],
    "4 x 8 images, 160 rollouts": ["rollout.prompts=4", "train.updates=160"],
    "group size 4": ["rollout.prompts=32", "rollout.copies=4"],
    "group size 2": ["rollout.prompts=64", "rollout.copies=2"],
    "4 noise levels": ["nft.states=4"],
    "1 noise level": ["nft.states=1"],
    "6 steps": ["rollout.steps=6"],
    "4 steps": ["rollout.steps=4"],
    "4 steps, dpm2": ["rollout.steps=4", "rollout.solver=dpm2"],
    "1 noise level, 4 steps": ["nft.states=1", "rollout.steps=4"],
    "1 noise level, 4 steps, 4 x 8 images": [
        "nft.states=1",
        "rollout.steps=4",
        "rollout.prompts=4",
    ],
}
KINDS = {  # of the lines that are drawn
    "rollouts": ("20 rollouts", "10 rollouts"),
    "images of a rollout": ("8 x 8 images", "4 x 8 images", "2 x 8 images"),
    "images, with more rollouts": ("8 x 8 images, 80 rollouts", "4 x 8 images, 160 rollouts"),
    "noise levels": ("4 noise levels", "1 noise level"),
    "group size": ("group size 4", "group size 2"),
    "steps": ("6 steps", "4 steps"),
    "several": ("1 noise level, 4 steps", "1 noise level, 4 steps, 4 x 8 images"),
}


def settings(task: str, name: str, seed: int, out: Path) -> TrainingStage:
    """The config of a run, which is evaluated before the first update and after the last."""
    changes = VARIANTS[name]
    updates = next((c.partition("=")[2] for c in changes if c.startswith("train.updates")), "40")
    slug = name.replace(",", "").replace(" ", "_") if changes else "all"
    given = [
        f"output={out / f'{task}_{slug}_{seed}'}",
        f"seed={seed}",
        f"tasks.0.validation=tiny/{task}_test",
        "evaluation.prompts=400",
        "evaluation.steps=10",
        f"evaluation.every={updates}",
        f"train.checkpoint_every={updates}",
        "train.sample_every=1000",
        "train.trackers=[]",
        "model.compile=true",
        f"optimizer.lr={LR[task]}",
        *ALL,
    ]
    return load(f"configs/tiny/teacher_{task}_nft.yaml", [*given, *changes], stage=TrainingStage)


def passes(config: TrainingStage) -> float:
    """Forward passes an image of an update: those of sampling, and for each trained state 3 and one
    for each label without gradient."""
    rollout = config.rollout
    sampling = rollout.steps
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


def cost(config: TrainingStage) -> float:
    """Forward passes of a run."""
    assert config.train.updates is not None
    return passes(config) * config.rollout.images * config.train.updates


def measured(data: Mapping[str, float], task: str, name: str) -> list[float]:
    """The scores of a variant, one a seed."""
    start = f"{task} {name} "
    return [score for key, score in data.items() if key.startswith(start)]


def table(data: Mapping[str, float], relative: Mapping[str, float], tasks: Sequence[str]) -> str:
    """Rows: variants; columns: passes, and for each task mean and standard error over seeds."""
    lines = [
        "| | passes | " + " | ".join(tasks) + " | seeds |",
        "|---|---|" + "---|" * (len(tasks) + 1),
    ]
    for name in ["base model", *VARIANTS]:
        found = [measured(data, task, name) for task in tasks]
        if not any(found):
            continue
        cells = []
        for one in found:
            error = statistics.stdev(one) / math.sqrt(len(one)) if len(one) > 1 else math.nan
            said = f" ± {error:.3f}" if math.isfinite(error) else ""
            cells.append(f"{statistics.fmean(one):.3f}{said}" if one else "")
        seeds = ", ".join(dict.fromkeys(str(len(one)) for one in found if one))
        cells = [f"{relative.get(name, 0):.2f}", *cells, seeds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(
    path: Path, data: Mapping[str, float], relative: Mapping[str, float], tasks: Sequence[str]
) -> None:
    """Score against forward passes, a line for each setting that is made smaller."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 5 * len(tasks), 4.6), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axis, task in zip(axes, tasks, strict=True):
        for number, (kind, names) in enumerate(KINDS.items()):
            # labels of neighbouring lines stand on either side of their points
            offset, side = ((-5, 5), "right") if number % 2 else ((5, -9), "left")
            line = [name for name in (FULL, *names) if measured(data, task, name)]
            if len(line) < 2:
                continue
            means = [statistics.fmean(measured(data, task, name)) for name in line]
            axis.plot([relative[name] for name in line], means, marker="o", label=kind)
            for name, mean in zip(line[1:], means[1:], strict=True):
                label = name.replace(" images", "")
                at = (relative[name], mean)
                axis.annotate(label, at, fontsize=7, xytext=offset, ha=side,
                    textcoords="offset points")  # fmt: skip
        if base := measured(data, task, "base model"):
            axis.axhline(statistics.fmean(base), color="#777777", linestyle=":")
            place = (0.98, statistics.fmean(base))
            axis.annotate("base model", place, xycoords=("axes fraction", "data"), fontsize=8,
                xytext=(0, 3), textcoords="offset points", ha="right")  # fmt: skip
        axis.set(xscale="log", title=task, xlabel="forward passes (1 = all)", ylabel="test score")
        shares = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
        axis.set_xticks(shares, ["1/16", "1/8", "1/4", "1/2", "1"], minor=False)
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, title="made smaller")
    figure.savefig(path)


def main() -> None:
    """Run what is missing, then print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/budget"))
    parser.add_argument("--picture", type=Path, default=Path("docs/budget.png"))
    parser.add_argument("--data", type=Path, default=Path("docs/budget.json"))
    parser.add_argument("--present", action="store_true", help="train nothing")
    args = parser.parse_args()
    data: dict[str, float] = json.loads(args.data.read_text()) if args.data.exists() else {}
    whole = cost(settings("ocr", FULL, 0, args.out))
    relative = {name: cost(settings("ocr", name, 0, args.out)) / whole for name in VARIANTS}
    for seed in () if args.present else args.seeds:
        for name in args.variants:
            for task in args.tasks:
                key = f"{task} {name} {seed}"
                if key in data:
                    continue
                config = settings(task, name, seed, args.out)
                run.train(config, resume=True)
                first, last = evaluated(Path(config.output))[1]
                data |= {f"{task} base model {seed}": first, key: last}
                args.data.write_text(json.dumps(data, indent=0, sort_keys=True) + "\n")
    print(table(data, relative, args.tasks))
    draw(args.picture, data, relative, args.tasks)


if __name__ == "__main__":
    main()
