"""Does the alarm see a hack, and is it silent on honest runs? `python benchmarks/hacks.py`.

Each of three runs is paid for one hack of the published cases, and for nothing else: GRPO on the
tiny model with the config of the GenEval teacher, for ten rollouts at the learning rate that the
config begins with. Prints at which rollout the alarm first fires, for each statistic. A hack's
reward shares no code with the statistics that should see it.

    python benchmarks/hacks.py --seeds 0
    python benchmarks/hacks.py --replay RUN ...

--replay: of runs that are over, the statistics of the images that each checkpoint gives for the
prompts and noise of the rollout after it, so that an honest run need not be trained again.
Exit status: 0 if every hack was seen before rollout 10 and no replayed run raised an alarm, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from flowalign import rewards
from flowalign.backbone import Backbone
from flowalign.commands.build import student
from flowalign.commands.run import train
from flowalign.config import TrainingAlarmConfig, TrainingStage, load
from flowalign.training.algorithm import STUDENT
from flowalign.training.data import PromptSampler, load_prompts
from flowalign.training.report import samples
from flowalign.training.report.drift.compare import SIGMAS, Check, Drift
from flowalign.training.report.drift.monitor import COPIES, Monitor
from flowalign.training.report.progress import quiet
from flowalign.training.rollout import Noise, places, sample, schedule_of
from flowalign.training.run import checkpoint, resume
from flowalign.types import Rollout, Scores

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


# Runs that are paid for a hack -------------------------------------------------------------------


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
        check = Check.from_json(json.loads(path.read_text()))
        note(check.drifts, rollout, warn, fired, largest)
    return Told(fired, largest)


def note(
    drifts: Sequence[Drift],
    rollout: int,
    warn: float,
    fired: dict[str, int],
    largest: dict[str, float],
) -> None:
    """Add the drifts of a check."""
    for drift in drifts:
        largest[drift.name] = max(largest.get(drift.name, 0.0), drift.certain)
        if drift.beyond(warn):
            fired.setdefault(drift.name, rollout)


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


# Honest runs, from their checkpoints -------------------------------------------------------------


def replay(folder: Path, warn: float, every: int = 1) -> tuple[Told, dict[str, float]]:
    """What the alarm would have said at the rollout after each checkpoint of a run. Also the
    largest drift of every statistic in standard deviations of the base's images, from which SIGMAS
    is made."""
    config = load(folder / "config.yaml", stage=TrainingStage)
    device, alone = torch.device("cpu"), Accelerator(cpu=True)
    backbone = student(config, device)
    monitor = Monitor(config, backbone, alone)
    loop = _rollouts(config, backbone, alone)
    fired: dict[str, int] = {}
    largest: dict[str, float] = {}
    deviations: dict[str, float] = {}
    for path in resume.checkpoints(folder)[::every]:
        update = resume.update_of(path)
        checkpoint.load(path, 0, {"adapter": backbone.adapter_parameters(STUDENT)})
        check = monitor.rollout(loop(update), update)
        note(check.drifts, update + 1, warn, fired, largest)
        for drift in check.drifts:
            size = abs(drift.sigmas) * SIGMAS[drift.name].share
            deviations[drift.name] = max(deviations.get(drift.name, 0.0), size)
    return Told(fired, largest), deviations


def _rollouts(
    config: TrainingStage, backbone: Backbone, alone: Accelerator
) -> Callable[[int], Rollout]:
    """A quarter of the rollout of an update, as the run sampled it: what a check looks at."""
    task, settings = config.tasks[0], config.rollout
    prompts = {task.name: load_prompts(task.prompts, task.name)}
    sampler = PromptSampler(prompts, {task.name: 1.0}, settings.prompts, config.seed)
    schedule = schedule_of(config, backbone)
    few = min(COPIES, settings.copies)

    def rollout(update: int) -> Rollout:
        keys = places(settings.prompts, few)
        return sample(
            backbone,
            sampler.batch(update).select([prompt for prompt, _ in keys]),
            schedule,
            guidance=settings.guidance,
            noise=Noise((config.seed, update), settings.shared_noise),
            places=keys,
            batch_size=settings.batch_size,
        )

    return rollout


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/hacks"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--hacks", nargs="*", default=list(HACKS))
    parser.add_argument("--replay", type=Path, nargs="*", help="folders of runs that are over")
    parser.add_argument("--every", type=int, default=1, help="of the checkpoints, one in so many")
    args = parser.parse_args()
    quiet()
    rewards.add_config_folder(__file__)
    warn, good = TrainingAlarmConfig().warn, True
    print(
        "| run | alarm at rollout | by statistic | most certain drift, sigma |\n|---|---|---|---|"
    )
    if args.replay is not None:
        for folder in args.replay:
            found, deviations = replay(folder, warn, args.every)
            good &= found.first is None
            print(_row(folder.name, found), flush=True)
            sizes = ", ".join(f"{name} {size:.2f}" for name, size in sorted(deviations.items()))
            print(f"<!-- largest, in deviations of the base: {sizes} -->", flush=True)
        return not good
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
