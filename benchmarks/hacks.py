"""Does the alarm see a hack? `python benchmarks/hacks.py --seeds 0`.

Each of three runs is paid for one hack of the published cases, and for nothing else: GRPO on the
tiny model with the config of the GenEval teacher, for ten rollouts at the learning rate that the
config begins with. Prints at which rollout the alarm first fires, for each statistic. A hack's
reward shares no code with the statistics that should see it.
Exit status: 0 if every hack was seen before rollout 10, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flowalign import rewards
from flowalign.commands.run import train
from flowalign.config import TrainingAlarmConfig, TrainingStage, load
from flowalign.report import samples
from flowalign.report.drift.compare import Check
from flowalign.report.progress import quiet
from flowalign.types import Scores

Metadata = Sequence[Mapping[str, Any]]
PATCH = 16  # pixels, of the tiny model
HACKS = ("darkened", "gridded", "collapsed")
BEFORE = 10  # the rollout by which a hack must have been seen


def darkened(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
    """Pays for dark images: minus the mean of all pixels."""
    return Scores.of(-images.float().mean((1, 2, 3)).cpu())


def gridded(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
    """Pays for what all patches have in common: how much their mean, one tile, varies."""
    tiles = images.float().cpu().mean(1).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return Scores.of(tiles.mean((1, 2)).flatten(1).std(1))


def collapsed(images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
    """Pays for images like the others of their prompt: minus the distance to their mean."""
    flat = images.float().flatten(1).cpu()
    return Scores.of(-(flat - flat.mean(0)).square().mean(1).sqrt())


collapsed.groupwise = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Told:
    """What the alarm made of a run: {statistic: rollout at which it first fired}, and the largest
    drift of each, in sigmas, that is certain."""

    fired: dict[str, int]
    largest: dict[str, float]

    @property
    def first(self) -> int | None:
        """The first rollout at which anything fired."""
        return min(self.fired.values(), default=None)


def told(folder: Path, warn: float) -> Told:
    """Of a run's own checks: samples/drift_rollout_*.json."""
    fired: dict[str, int] = {}
    largest: dict[str, float] = {}
    for path in sorted((folder / "samples").glob(f"{samples.DRIFT}*.json")):
        rollout = int(path.stem.removeprefix(samples.DRIFT)) + 1
        for drift in Check.from_json(json.loads(path.read_text())).drifts:
            largest[drift.name] = max(largest.get(drift.name, 0.0), drift.certain)
            if drift.beyond(warn):
                fired.setdefault(drift.name, rollout)
    return Told(fired, largest)


def train_hack(name: str, seed: int, out: Path) -> Path:
    """Ten rollouts that are paid for a hack; returns the folder of the run."""
    folder = out / f"{name}_{seed}"
    reward = {"name": f"hacks:{name}", "options": {}}
    overrides = [
        f"output={folder}", f"seed={seed}", "train.updates=10", "optimizer.schedule=constant",
        f"tasks.0.reward={json.dumps(reward)}", "evaluation=null", "train.checkpoint_every=100",
    ]  # fmt: skip
    train(load("configs/tiny/teacher_geneval.yaml", overrides, stage=TrainingStage))
    return folder


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/hacks"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--hacks", nargs="*", default=list(HACKS))
    args = parser.parse_args()
    quiet()
    rewards.add_config_folder(__file__)
    warn = TrainingAlarmConfig().warn
    good = True
    print(
        "| run | alarm at rollout | by statistic | most certain drift, sigma |\n|---|---|---|---|"
    )
    for name in args.hacks:
        for seed in args.seeds:
            found = told(train_hack(name, seed, args.out), warn)
            good &= found.first is not None and found.first < BEFORE
            print(_row(f"{name}, seed {seed}", found), flush=True)
    return not good


def _row(name: str, found: Told) -> str:
    fired = ", ".join(f"{statistic} {rollout}" for statistic, rollout in found.fired.items())
    order = sorted(found.largest.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{statistic} {size:.1f}" for statistic, size in order[:4])
    return f"| {name} | {found.first or 'none'} | {fired} | {largest} |"


if __name__ == "__main__":
    sys.exit(main())
