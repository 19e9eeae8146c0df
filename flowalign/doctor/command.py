"""The command line of `flowalign doctor`."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from flowalign import recipe, rewards
from flowalign.config import (
    ADAPTER,
    ConfigError,
    MergeStage,
    RecipeStage,
    Stage,
    TrainingStage,
    assignments,
    load,
)
from flowalign.doctor import reward
from flowalign.forecast.findings import Finding, fault, healthy, note, ok, show
from flowalign.packages import DISTRIBUTION
from flowalign.preflight import check_world
from flowalign.progress import quiet

CPU_MODEL = 2**31  # bytes of the largest model that a CPU samples from
PACKAGES = (DISTRIBUTION, "torch", "diffusers", "transformers", "accelerate", "peft")


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 = no fault, 1 = a fault, 2 = it could not be examined."""
    args = parser().parse_args(argv)
    quiet()
    log = logging.getLogger("flowalign.rewards.scoring")
    level = log.level
    log.setLevel(logging.ERROR)  # the findings say what failed
    try:
        if args.config:
            rewards.look_beside(args.config)
            return 0 if examine(args) else 1
        health = reward.diagnose(args.reward, assignments(args.options), args.count, args.size)
    except (ValueError, ImportError, OSError) as error:
        print(f"flowalign doctor: {error}", file=sys.stderr)
        return 2
    finally:
        log.setLevel(level)
    reward.show(args.reward, health)
    return 0 if health.healthy else 1


def parser() -> argparse.ArgumentParser:
    """--reward or --config, and the options of each."""
    text = "Find what is wrong with a run or a reward before training starts."
    parser = argparse.ArgumentParser("flowalign doctor", description=text)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a YAML file of a training stage or a recipe")
    what.add_argument("--reward", help="a name, or package.module:attribute")
    parser.add_argument("--variant", help="config: a YAML file of keys by stage: other hardware")
    parser.add_argument("--no-model", action="store_true", help="only checks without weights")
    parser.add_argument("--memory", type=float, metavar="GIB", help="plan for such a GPU")
    parser.add_argument("--processes", type=int, default=1, help="devices of the run (default 1)")
    parser.add_argument("--tflops", type=float, help="the rate to plan with, TFLOP/s a device")
    parser.add_argument("--count", type=int, default=16, help="reward: scenes (default 16)")
    parser.add_argument("--size", type=int, help="reward: enlarge the 64-pixel scenes to this")
    help = "config: changes; reward: its options"
    parser.add_argument("options", nargs="*", metavar="key=value", help=help)
    return parser


def examine(args: argparse.Namespace) -> bool:
    """Examine every stage of a config and print the findings; whether there was no fault.

    Raises ConfigError for a config that `train` refuses to read.
    """
    root = load(args.config, args.options, stage=Stage, variant=args.variant)
    show(_environment())
    stages: Mapping[str, Stage] = {Path(args.config).stem: root}
    refused: list[Finding] = []
    try:
        if isinstance(root, RecipeStage):
            stages = recipe.plan(root, Path(args.config).parent, args.processes)
        else:
            check_world(root, args.processes)
    except ConfigError as error:
        refused = [fault(text) for text in error.lines]
        show(refused)
    sound, ranks = not refused, _ranks(stages)
    for name, stage in stages.items():
        if isinstance(stage, TrainingStage):
            print(f"\n{name} ({stage.stage})")
            sound &= _examine_stage(name, stage, args, ranks, bool(refused))
    print("no fault was found" if sound else "faults were found")
    return sound


def _environment() -> Iterator[Finding]:
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} (not installed)")
    yield ok(", ".join(versions))
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield ok(f"device: {torch.cuda.get_device_name(0)}, {memory:.1f} GiB")
    else:
        yield note(f"device: CPU, {torch.get_num_threads()} threads; torch sees no GPU")


def _ranks(stages: Mapping[str, object]) -> dict[str, int]:
    """{folder: rank} of the adapters that the stages of a recipe will write."""
    from flowalign.forecast.estimate import rank_of

    ranks: dict[str, int] = {}
    for stage in stages.values():
        if isinstance(stage, MergeStage):
            given = [rank_of(source, ranks, 32) for source in stage.adapters]
            rank = sum(given) if stage.method == "concat" else stage.rank or max(given)
            rank = min(rank, sum(given)) if stage.method == "svd" else rank  # no more than exact
        elif isinstance(stage, TrainingStage):
            rank = rank_of(stage.lora.init, ranks, stage.lora.rank)
        else:
            continue
        folder = Path(stage.output) / "adapter"
        if not (folder / ADAPTER).is_file():
            ranks[str(folder)] = rank
    return ranks


def _examine_stage(
    name: str,
    config: TrainingStage,
    args: argparse.Namespace,
    ranks: Mapping[str, int],
    refused: bool,
) -> bool:
    """Print the findings of a training stage; whether there was no fault."""
    # diffusers is imported here: after `quiet`, and not for a reward
    from flowalign.doctor import budget, live, plan
    from flowalign.forecast.architectures import local_folder
    from flowalign.forecast.estimate import predict

    findings = [] if refused else plan.examine(config)  # refused: only a prediction is made
    show(findings)
    here = local_folder(config.model.id, config.model.revision) is not None
    # for this machine's CPU only where the run itself would be on it
    device = "cuda" if args.memory or torch.cuda.is_available() or not here else "cpu"
    try:
        estimate = predict(config, device_type=device, processes=args.processes, ranks=ranks)
    except LookupError as error:
        estimate = None
        show([note(f"memory: no prediction: {error.args[0]}")])

    missing = [place for place, source in config.inputs.items() if source in ranks]
    large = estimate is not None and estimate.resident > CPU_MODEL
    result, reason = live.Live([]), ""
    if refused or not healthy(findings):
        reason = "fix the faults above first"
    elif args.no_model:
        reason = "--no-model"
    elif not here:
        reason = f"{config.model.id} is not on this machine (train downloads it)"
    elif missing:
        reason = f"an earlier stage writes {', '.join(missing)}"
    elif large and not torch.cuda.is_available():
        reason = "the model is too large to sample from without a GPU"
    if reason:
        show([note(f"no image was sampled: {reason}")])
    else:
        result = live.examine(config)
        show(result.findings)
        findings += result.findings
    if estimate:
        budget.show(name, estimate)
        last = [*budget.fits(estimate, args.memory),
                budget.pace(estimate, args.tflops, result.rate, result.scoring)]  # fmt: skip
        show(last)
        findings += last
    return healthy(findings)
