"""The command line of `flowalign doctor`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from flowalign import rewards
from flowalign.commands import recipe
from flowalign.commands.doctor import budget, live, plan, predictions, reward
from flowalign.commands.doctor.findings import fault, healthy, note, ok, show
from flowalign.commands.doctor.pace import GPUS
from flowalign.commands.doctor.predictions import Forecast, is_here
from flowalign.config import LABELS, Stage, TrainingStage, assignments, label_of, load
from flowalign.eval.suite import environment
from flowalign.system.exit import refusing
from flowalign.training.preflight import Launch, own_code, scale_problems, unexamined
from flowalign.training.report.progress import quiet

CPU_MODEL = 2**31  # bytes of the largest model that a CPU samples from


@refusing("doctor")
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
        options = assignments(args.options)
        prompts = [args.prompts] if args.prompts else reward.PROBES
        found, _ = reward.diagnose(
            args.reward, options, args.count, args.size, prompts, args.images
        )
        show(found)
        return 0 if healthy(found) else 1
    finally:
        log.setLevel(level)


def parser() -> argparse.ArgumentParser:
    """--reward or --config, and the options of each."""
    text = "Find what is wrong with a run or a reward before training starts."
    parser = argparse.ArgumentParser("flowalign doctor", description=text)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a YAML file of any stage or a recipe")
    what.add_argument("--reward", help="a name, or package.module:attribute")
    parser.add_argument("--variant", help="config: a YAML file of keys by stage: other hardware")
    parser.add_argument("--no-model", action="store_true", help="only checks without weights")
    help = "config: run the code that it names (module:name), and look in its folder for that code"
    parser.add_argument("--trust", action="store_true", help=help)
    parser.add_argument("--resume", action="store_true", help="as `train --resume` would run")
    help = "as `train --allow-world-change` would run"
    parser.add_argument("--allow-world-change", action="store_true", help=help)
    help = f"plan for this GPU: {', '.join(GPUS)}; others by --memory and --tflops"
    parser.add_argument("--gpu", type=str.lower, choices=list(GPUS), metavar="NAME", help=help)
    help = "propose cuts, with which the config is predicted to run for so long at most"
    parser.add_argument("--hours", type=float, metavar="H", help=help)
    help = "GPUs of the run (default 1)"
    parser.add_argument("--gpus", "--processes", type=int, default=1, dest="gpus", help=help)
    parser.add_argument("--memory", type=float, metavar="GIB", help="plan for such a GPU")
    parser.add_argument("--tflops", type=float, help="the rate to plan with, TFLOP/s a GPU")
    parser.add_argument("--count", type=int, default=16, help="reward: scenes (default 16)")
    parser.add_argument("--size", type=int, help="reward: enlarge the 64-pixel scenes to this")
    help = "reward: score scenes with these prompts, not with those of the tiny world"
    parser.add_argument("--prompts", metavar="FILE", help=help)
    help = "reward: also score the pictures of a folder, such as those of a style; several times"
    parser.add_argument(
        "--images", action="append", type=Path, default=[], metavar="FOLDER", help=help
    )
    help = "config: changes; reward: its options"
    parser.add_argument("options", nargs="*", metavar="key=value", help=help)
    return parser


def examine(args: argparse.Namespace) -> int:
    """Examine every stage of a config and print the findings; the exit status.

    Raises ConfigError for a config that `train` refuses to read.
    """
    root = load(args.config, args.options, stage=Stage, variant=args.variant)
    show([ok(", ".join(f"{name} {version}" for name, version in environment().items()))])
    if label := label_of(args.config):
        show([note(f"the settings are {label}: {LABELS[label]}")])
    launch = Launch(
        args.gpus, args.resume, args.allow_world_change, args.trust, elsewhere=bool(args.gpu)
    )
    stages, problems = recipe.examine(root, Path(args.config).parent, launch)
    scales = list(scale_problems(stages))
    show(map(fault, [*problems, *scales]))
    if not args.trust:
        show(map(note, unexamined(stages)))
    device = predictions.Device(args.gpus, args.gpu, args.memory, args.tflops)
    forecasts = predictions.forecasts(stages, device)
    sound, pace = not problems and not scales, None
    for forecast in (forecast for forecast in forecasts if forecast.stage.samples):
        stage = forecast.stage
        print(f"\n{forecast.name} ({stage.stage})")
        findings = []
        if isinstance(stage, TrainingStage) and not problems:
            findings = plan.examine(stage)
            show(findings)
        reason = "fix the faults above first"
        if not problems and healthy(findings):
            reason = _why_no_images(forecast, args)
        if reason:
            show([note(f"no image was sampled: {reason}")])
        else:
            seen, measured = live.examine(stage)
            show(seen)
            findings += seen
            pace = measured or pace  # of this stage, or of one before
        last = list(forecast.conclude(pace))
        show(last)
        sound &= healthy([*findings, *last])
    predictions.show_total(forecasts)
    sound &= budget.conclude(root, forecasts, args.hours)
    print("no fault was found" if sound else "faults were found")
    return 2 if problems else 0 if sound else 1


def _why_no_images(forecast: Forecast, args: argparse.Namespace) -> str:
    """Why no image of a sound stage can be sampled here; "" if it can."""
    stage, estimate = forecast.stage, forecast.estimate
    if args.no_model:
        return "--no-model"
    if not args.trust and own_code(stage):
        return "the config names code, and --trust is not given"
    if not is_here(stage.model) or estimate is None:
        return f"{stage.model.id} is not on this machine (train downloads it)"
    if missing := [key for key, source in stage.inputs.items() if source in estimate.ranks]:
        return f"an earlier stage writes {', '.join(missing)}"
    if estimate.resident > CPU_MODEL and not torch.cuda.is_available():
        return "the model is too large to sample from without a GPU"
    return ""
