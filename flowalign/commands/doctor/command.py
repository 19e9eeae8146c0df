"""The command line of `flowalign doctor`."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flowalign import rewards
from flowalign.commands import recipe
from flowalign.commands.doctor import reward
from flowalign.commands.doctor.findings import Finding, fault, healthy, note, ok, show
from flowalign.commands.doctor.gpus import GPUS, named
from flowalign.config import EvalStage, Stage, TrainingStage, assignments, load
from flowalign.system.packages import DISTRIBUTION
from flowalign.training.preflight import own_code, unexamined
from flowalign.training.report.progress import quiet

if TYPE_CHECKING:
    from flowalign.commands.doctor.pace import Pace
    from flowalign.commands.doctor.predictions import Device, Forecast

CPU_MODEL = 2**31  # bytes of the largest model that a CPU samples from
PACKAGES = (DISTRIBUTION, "torch", "diffusers", "transformers", "accelerate", "peft")


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 = no fault, 1 = a fault, 2 = `train` or `eval` refuses the config, or nothing
    could be examined."""
    args = parser().parse_args(argv)
    quiet()
    log = logging.getLogger("flowalign.rewards.scoring")
    level = log.level
    log.setLevel(logging.ERROR)  # the findings say what failed
    try:
        if args.config:
            if args.trust:
                rewards.add_config_folder(args.config)
            return examine(args)
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
    what.add_argument("--config", help="a YAML file of any stage or a recipe")
    what.add_argument("--reward", help="a name, or package.module:attribute")
    parser.add_argument("--variant", help="config: a YAML file of keys by stage: other hardware")
    parser.add_argument("--no-model", action="store_true", help="only checks without weights")
    help = "config: run the code that it names (module:name), and look beside it for that code"
    parser.add_argument("--trust", action="store_true", help=help)
    parser.add_argument("--resume", action="store_true", help="as `train --resume` would run")
    help = "as `train --allow-world-change` would run"
    parser.add_argument("--allow-world-change", action="store_true", help=help)
    parser.add_argument("--gpu", help=f"plan for this GPU: {', '.join(GPUS)}")
    help = "GPUs of the run (default 1)"
    parser.add_argument("--gpus", "--processes", type=int, default=1, dest="gpus", help=help)
    parser.add_argument("--memory", type=float, metavar="GIB", help="plan for such a GPU")
    parser.add_argument("--tflops", type=float, help="the rate to plan with, TFLOP/s a GPU")
    parser.add_argument("--count", type=int, default=16, help="reward: scenes (default 16)")
    parser.add_argument("--size", type=int, help="reward: enlarge the 64-pixel scenes to this")
    help = "config: changes; reward: its options"
    parser.add_argument("options", nargs="*", metavar="key=value", help=help)
    return parser


def examine(args: argparse.Namespace) -> int:
    """Examine every stage of a config and print the findings; the exit status.

    Raises ConfigError for a config that `train` refuses to read.
    """
    from flowalign.commands.doctor import (
        predictions,  # imports diffusers: after `quiet`, and not for a reward
    )
    from flowalign.commands.doctor.downloads import needs

    root = load(args.config, args.options, stage=Stage, variant=args.variant)
    if args.gpu:
        named(args.gpu)  # refuse another name before anything is said
    show(_environment())
    home, any_world = Path(args.config).parent, args.allow_world_change
    stages, problems = recipe.examine(root, home, args.gpus, args.resume, any_world, args.trust)
    show(map(fault, problems))
    if not args.trust:
        show(map(note, unexamined(stages)))
    ranks = predictions.ranks(stages)
    device = predictions.Device(args.gpus, args.gpu, args.memory, args.tflops)
    forecasts = [predictions.forecast(name, stage, device, ranks) for name, stage in stages.items()]
    show(needs(stages, [f.estimate for f in forecasts if f.estimate]))
    sound, pace = not problems, None
    for forecast in forecasts:
        if forecast.stage.judged:
            print(f"\n{forecast.name} ({forecast.stage.stage})")
            why = "--no-model" if args.no_model else ""
            if not args.trust and own_code(forecast.stage):
                why = why or "the config names code, and --trust is not given"
            findings, pace = _examine_stage(forecast, device, why, ranks, problems, pace)
            sound &= healthy(findings)
    if len(forecasts) > 1:
        predictions.total(forecasts)
    print("no fault was found" if sound else "faults were found")
    return 2 if problems else 0 if sound else 1


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


def _examine_stage(
    forecast: Forecast,
    device: Device,
    without: str,
    ranks: Mapping[str, int],
    refused: Sequence[str],
    pace: Pace | None,
) -> tuple[list[Finding], Pace | None]:
    """Print the findings of a stage; they, and the pace of it or of the stages before.

    without: why no image may be sampled, "" if it may. refused: what `train` refuses; if anything,
    only a prediction is made. pace: what was measured in an earlier stage.
    """
    from flowalign.backbone.structure import local_folder
    from flowalign.commands.doctor import live, plan

    config, estimate = forecast.stage, forecast.estimate
    assert isinstance(config, TrainingStage | EvalStage)
    findings = []
    if isinstance(config, TrainingStage) and not refused:
        findings = plan.examine(config)
    show(findings)
    missing = [place for place, source in config.inputs.items() if source in ranks]
    large = estimate is not None and estimate.resident > CPU_MODEL
    reason = ""
    if refused or not healthy(findings):
        reason = "fix the faults above first"
    elif without:
        reason = without
    elif local_folder(config.model.id, config.model.revision) is None:
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
        pace = result.pace or pace
    last = list(forecast.conclude(device, pace))
    show(last)
    return [*findings, *last], pace
