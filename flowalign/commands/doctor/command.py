"""The command line of `flowalign doctor`."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path

import torch

from flowalign import rewards
from flowalign.checks import Launch, once, refused
from flowalign.checks.rewards import own_code
from flowalign.commands import recipe
from flowalign.commands.doctor import advise, live
from flowalign.commands.doctor.advise import Device, Forecast
from flowalign.commands.findings import healthy, note, ok, print_findings
from flowalign.config import LABELS, assignments, label_of
from flowalign.eval.suite import environment
from flowalign.report.progress import quiet
from flowalign.system.exit import refusing
from flowalign.training.inputs import Inputs

CPU_MODEL = 2**31  # bytes of the largest model that a CPU samples from


@refusing("doctor")
def main(args: argparse.Namespace) -> int:
    """Exit status: 0 = no fault, 1 = a fault, 2 = `train` or `eval` refuses the config, or nothing
    could be examined."""
    quiet()
    log = logging.getLogger("flowalign.rewards.scoring")
    level = log.level
    log.setLevel(logging.ERROR)  # the findings say what failed
    try:
        if args.config:
            return examine_config(args)
        options = assignments(args.options)
        prompts = [args.prompts] if args.prompts else live.PROBES
        findings, _ = live.diagnose(args.reward, options, sources=prompts)
        print_findings(findings)
        return 0 if healthy(findings) else 1
    finally:
        log.setLevel(level)


def examine_config(args: argparse.Namespace) -> int:
    """Examine every stage of a config and print the findings; the exit status. Nothing is
    written."""
    if args.trust:
        rewards.add_config_folder(args.config)
    launch = Launch(args.gpus, False, trust=args.trust, elsewhere=bool(args.gpu), advise=True)
    print_findings(
        [ok("", ", ".join(f"{name} {version}" for name, version in environment().items()))]
    )
    if label := label_of(args.config):
        print_findings([note(f"the settings are {label}", LABELS[label])])
    inputs = Inputs(args.root.model)  # all stages have one base
    stages, problems = recipe.stages_and_problems(
        args.root, Path(args.config).parent, launch, inputs
    )
    refusals = refused(problems)
    print_findings(once(refusals))
    sound = healthy(problems)
    pace = None
    device = Device(args.gpus, args.gpu, args.memory, args.tflops)
    forecasts = advise.forecasts(stages, device, inputs)
    for number, forecast in enumerate(forecasts):
        stage = forecast.stage
        place = forecast.name if args.root.is_recipe else ""
        findings = [p for p in problems if p.stage == place and p.level != "refuse"]
        if not (stage.samples or findings):
            continue
        print(f"\n{forecast.name} ({stage.stage})")
        print_findings(replace(problem, stage="") for problem in findings)
        if not stage.samples:
            continue
        if reason := _why_no_images(forecast, args, bool(refusals) or not healthy(findings)):
            sampled = [note("no image was sampled", reason)]
        else:
            sampled, measured = live.examine_stage(stage, inputs)
            pace = measured or pace  # of this stage, or of one before
        print_findings(sampled)
        forecasts[number] = forecast = forecast.timed(pace)
        forecast.show()
        last = list(forecast.findings())
        print_findings(last)
        sound &= healthy([*sampled, *last])
    if forecasts:
        advise.show_total(forecasts)
    sound &= advise.within(args.root, forecasts, args.hours)
    good = "no fault was found"
    if not args.trust and any(map(own_code, stages.values())):
        good += " in what was examined; your code was not"
    print(good if sound else "faults were found")
    if refusals:
        return 2
    return 0 if sound else 1


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
    if missing := [
        key for key, source in stage.inputs.items() if source in forecast.inputs.pending
    ]:
        return f"an earlier stage writes {', '.join(missing)}"
    if estimate.resident > CPU_MODEL and not torch.cuda.is_available():
        return "the model is too large to sample from without a GPU"
    return ""
