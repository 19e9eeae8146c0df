"""The command line of `flowalign doctor`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from flowalign import rewards
from flowalign.commands import recipe
from flowalign.commands.doctor import advise, live, plan
from flowalign.commands.doctor.advise import Device, Forecast
from flowalign.commands.doctor.pace import GPUS
from flowalign.commands.findings import Finding, fault, healthy, note, ok, show
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
            return examine(args)
        options = assignments(args.options)
        prompts = [args.prompts] if args.prompts else live.PROBES
        found, _ = live.diagnose(args.reward, options, sources=prompts)
        show(found)
        return 0 if healthy(found) else 1
    finally:
        log.setLevel(level)


def parser() -> argparse.ArgumentParser:
    """--reward or --config, and the options of each."""
    text = "Find what is wrong with a run or a reward before training starts."
    parser = argparse.ArgumentParser("flowalign doctor", description=text)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a YAML file of any stage or a recipe")
    what.add_argument("--reward", help="a name, or package.module:attribute")
    add("--variant", help="config: a YAML file of keys by stage: other hardware")
    add("--no-model", action="store_true", help="only checks without weights")
    help = "config: run the code that it names (module:name), and look in its folder for that code"
    add("--trust", action="store_true", help=help)
    help = f"plan for this GPU: {', '.join(GPUS)}; others by --memory and --tflops"
    add("--gpu", type=str.lower, choices=list(GPUS), metavar="NAME", help=help)
    help = "propose cuts, with which the config is predicted to run for so long at most"
    add("--hours", type=float, metavar="H", help=help)
    help = "GPUs of the run (default 1)"
    add("--gpus", "--processes", type=int, default=1, dest="gpus", help=help)
    add("--memory", type=float, metavar="GIB", help="plan for such a GPU")
    add("--tflops", type=float, help="the rate to plan with, TFLOP/s a GPU")
    help = "reward: score scenes with these prompts, not with those of the tiny world"
    add("--prompts", metavar="FILE", help=help)
    help = "config: changes; reward: its options"
    add("options", nargs="*", metavar="key=value", help=help)
    return parser


def examine(args: argparse.Namespace) -> int:
    """Examine every stage of a config and print the findings; the exit status. Nothing is
    written."""
    if args.trust:
        rewards.add_config_folder(args.config)
    root = load(args.config, args.options, stage=Stage, variant=args.variant)
    launch = Launch(args.gpus, resume=False, trust=args.trust, elsewhere=bool(args.gpu))
    show([ok(", ".join(f"{name} {version}" for name, version in environment().items()))])
    if label := label_of(args.config):
        show([note(f"the settings are {label}: {LABELS[label]}")])
    stages, problems = recipe.examine(root, Path(args.config).parent, launch)
    scales = list(scale_problems(stages))
    show(map(fault, [*problems, *scales]))
    if not args.trust:
        show(map(note, unexamined(stages)))
    sound, pace = not problems and not scales, None
    forecasts = advise.forecasts(stages, Device(args.gpus, args.gpu, args.memory, args.tflops))
    for number, forecast in enumerate(forecasts):
        stage, findings = forecast.stage, list[Finding]()
        if not stage.samples:
            continue
        print(f"\n{forecast.name} ({stage.stage})")
        if isinstance(stage, TrainingStage) and not problems:
            findings = plan.examine(stage)
            show(findings)
        faulty = bool(problems) or not healthy(findings)
        if reason := _why_no_images(forecast, args, faulty):
            sampled = [note(f"no image was sampled: {reason}")]
        else:
            sampled, measured = live.examine(stage)
            pace = measured or pace  # of this stage, or of one before
        show(sampled)
        forecasts[number] = forecast = forecast.timed(pace)
        forecast.show()
        last = list(forecast.findings())
        show(last)
        sound &= healthy([*findings, *sampled, *last])
    advise.show_total(forecasts)
    sound &= advise.within(root, forecasts, args.hours)
    print("no fault was found" if sound else "faults were found")
    return 2 if problems else 0 if sound else 1


def _why_no_images(forecast: Forecast, args: argparse.Namespace, faulty: bool) -> str:
    """Why no image of a stage can be sampled here; "" if it can."""
    stage, estimate = forecast.stage, forecast.estimate
    if faulty:
        return "fix the faults above first"
    if args.no_model:
        return "--no-model"
    if not args.trust and own_code(stage):
        return "the config names code, and --trust is not given"
    if not advise.is_here(stage.model) or estimate is None:
        return f"{stage.model.id} is not on this machine (train downloads it)"
    if missing := [key for key, source in stage.inputs.items() if source in forecast.ranks]:
        return f"an earlier stage writes {', '.join(missing)}"
    if estimate.resident > CPU_MODEL and not torch.cuda.is_available():
        return "the model is too large to sample from without a GPU"
    return ""
