"""How images are credited, one setting at a time: advantages, the ratio, the window. Tiny world.

    python benchmarks/credit_ablation.py --updates 24 --seeds 0 1 2

Every variant trains configs/tiny/teacher_geneval.yaml on the sum of two rewards of different range:
GenEval's and the preference model's. It changes what its name says, and nothing else: the same
prompts, noise, images, learning rate and number of optimizer steps (but for "two steps"). Scores
are those of the two parts on the validation prompts, before and after.

One run is a folder (OUT/VARIANT/seed_N). A run that was stopped goes on where it was, one that is
finished is read back. --list prints what is missing; --only and --seeds take a part, so that the
table can be made by several calls. Prints a Markdown table of what is there: mean and standard
deviation over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from flowalign.commands.run import train
from flowalign.config import TrainingStage, load

CONFIG = "configs/tiny/teacher_geneval.yaml"
REWARD = (
    "tasks.0.reward={name: weighted, options: {rewards: ["
    "{name: geneval, options: {detector: tiny, reward: official}}, "
    "{name: pickscore, options: {model: tiny, normalizer: 25}}]}}"
)
PARTS = {"geneval": "GenEval", "pickscore": "preference"}  # of the reward: their columns
TWO = "optimizer.updates_per_rollout=2"
GUARD = ["grpo.ratio=guard", "grpo.clip_range=5e-5"]
VARIANTS: dict[str, list[str]] = {
    "group_std": [],
    "batch_std": ["grpo.advantage=batch_std"],
    "gaussian": ["grpo.advantage=gaussian"],
    "gdpo": ["grpo.advantage=gdpo"],
    "gated": ["grpo.advantage=gated"],
    "adora": ["grpo.advantage=adora"],
    "guard": GUARD,
    "two steps": [TWO],
    "two steps, guard": [TWO, *GUARD],
    "sliding window": ["rollout.window={width: 4, every: 4}"],
    "random window": ["rollout.window={width: 4, random: true}"],
}


def config_of(name: str, seed: int, args: argparse.Namespace) -> TrainingStage:
    """The run of a variant and a seed: evaluated at its beginning and at its end."""
    folder = args.out / name.replace(", ", "_").replace(" ", "_") / f"seed_{seed}"
    length = args.updates
    common = [
        f"output={folder}", f"seed={seed}", f"train.updates={length}",
        f"train.checkpoint_every={min(length, 6)}", f"train.sample_every={length}",
        f"evaluation.every={length}", f"evaluation.prompts={args.prompts}", "train.trackers=[]",
    ]  # fmt: skip
    return load(CONFIG, [REWARD, *VARIANTS[name], *common])


def measured(config: TrainingStage) -> dict[str, list[float]] | None:
    """{part: scores before and after} and the last KL to the base; None if it is not finished."""
    log = Path(config.output) / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = {
        part: [row[key] for row in rows if (key := f"eval/geneval/{part}") in row] for part in PARTS
    }
    done = bool(rows) and rows[-1]["update"] == config.train.updates
    if not done or any(len(scores) < 2 for scores in found.values()):
        return None
    return {**found, "kl": [row["kl"] for row in rows if "kl" in row][-1:]}


def cell(values: list[float], form: str) -> str:
    """Mean and standard deviation over the seeds."""
    text = f"{statistics.mean(values):{form}}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):{form.lstrip('+')}}"
    return text


def row_of(name: str, args: argparse.Namespace) -> str | None:
    """A row of the table, over the seeds that are finished; None if there is none."""
    seeds = [found for seed in args.seeds if (found := measured(config_of(name, seed, args)))]
    if not seeds:
        return None
    cells = [name, str(len(seeds))]
    gains = [[found[part][-1] - found[part][0] for found in seeds] for part in PARTS]
    for part, gain in zip(PARTS, gains, strict=True):
        cells += [cell([found[part][-1] for found in seeds], ".3f"), cell(gain, "+.3f")]
    cells += [
        cell([sum(parts) for parts in zip(*gains, strict=True)], "+.3f"),
        cell([found["kl"][0] for found in seeds], ".1e"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run what is asked for and not finished, seed by seed; then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--updates", type=int, default=24, help="rollouts of a run")
    parser.add_argument("--prompts", type=int, default=256, help="of the validation set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("outputs/credit"))
    parser.add_argument("--list", action="store_true", help="say what is missing; run nothing")
    args = parser.parse_args()
    for seed in args.seeds:
        for name in args.only:
            config = config_of(name, seed, args)
            if measured(config):
                continue
            if args.list:
                print(f"missing: {name}, seed {seed}: {config.output}")
                continue
            began = time.time()
            train(config, resume=True)
            print(f"{name}, seed {seed}: {time.time() - began:.0f} s", flush=True)
    columns = [text for title in PARTS.values() for text in (title, "gain")]
    heads = ["variant", "seeds", *columns, "sum of gains", "KL to base"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in args.only:
        if row := row_of(name, args):
            print(row)


if __name__ == "__main__":
    main()
