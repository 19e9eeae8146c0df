"""The ablation behind the defaults of configs/tiny/teacher_*.yaml: one setting changed at a time.

    python benchmarks/teacher_ablation.py --task geneval --updates 24

Every variant samples the same number of images (updates x prompts x copies is held equal), its
learning rate falls to 0 over its own length, and it is scored on the same validation prompts and
noise. Shorter runs than the configs', so the gains are smaller. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from flowalign.commands.run import train
from flowalign.config import load

VARIANTS: dict[str, list[str]] = {
    "default": [],
    "independent noise": ["rollout.shared_noise=false"],
    "window [0, 4]": ["rollout.window=[0, 4]"],
    "window [2, 6]": ["rollout.window=[2, 6]"],
    "window [0, 9]": ["rollout.window=[0, 9]"],
    "lr 5e-4": ["optimizer.lr=5e-4"],
    "lr 5e-3": ["optimizer.lr=5e-3"],
    "4 prompts, 4 times the updates": ["rollout.prompts=4"],
    "32 prompts, half the updates": ["rollout.prompts=32"],
    "noise level 0.7": ["rollout.noise_level=0.7"],
    "guidance 3.5": ["rollout.guidance=3.5"],
}


def run(task: str, updates: int, name: str, overrides: list[str], out: Path) -> tuple[float, ...]:
    """Train one variant -> held-out score before and after, KL at the end, seconds."""
    folder = out / task / name.replace(" ", "_").replace(",", "")
    path = f"configs/tiny/teacher_{task}.yaml"
    prompts = load(path, overrides).rollout.prompts
    length = updates * load(path).rollout.prompts // prompts
    began = time.time()
    train(
        load(
            path,
            [
                *overrides,
                f"output={folder}",
                f"train.updates={length}",
                f"evaluation.every={length}",
                "evaluation.prompts=256",
                f"train.sample_every={length}",
                f"train.checkpoint_every={length}",
                "train.trackers=[]",
            ],
        ),
        resume=True,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval/headline"] for row in rows if "eval/headline" in row]
    drift = [row["kl"] for row in rows if "kl" in row][-1]
    return scores[0], scores[-1], drift, time.time() - began


def main() -> None:
    """Run the variants asked for, in order; finished ones are read back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=["geneval", "ocr"], default="geneval")
    parser.add_argument("--updates", type=int, default=24, help="of the default; others to match")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("outputs/ablation"))
    args = parser.parse_args()
    print("| variant | before | after | gain | KL to base | seconds |\n|---|---|---|---|---|---|")
    for name in args.only:
        row = run(args.task, args.updates, name, VARIANTS[name], args.out)
        before, after, drift, seconds = row
        cells = f"{before:.3f} | {after:.3f} | {after - before:+.3f} | {drift:.1e} | {seconds:.0f}"
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
