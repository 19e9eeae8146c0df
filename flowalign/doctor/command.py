"""The command line of `flowalign doctor`."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.doctor.findings import Finding, healthy, show

if TYPE_CHECKING:
    from flowalign.config import TrainingStage
    from flowalign.doctor.estimate import Estimate

CPU_MODEL = 2**31  # bytes that are still sampled from on a CPU
PACKAGES = ("flowalign", "torch", "diffusers", "transformers", "accelerate", "peft")


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 = healthy, 1 = a fault was found, 2 = it could not be examined."""
    from flowalign.config import assignments
    from flowalign.doctor import reward
    from flowalign.progress import quiet

    args = parser().parse_args(argv)
    quiet()
    with _silent("flowalign.rewards.scoring"):  # the findings tell
        try:
            if args.config:
                return 0 if examine(args) else 1
            options = assignments(args.options)
            health = reward.diagnose(args.reward, options, args.count, args.size)
        except (ValueError, ImportError, OSError) as error:
            print(f"flowalign doctor: {error}", file=sys.stderr)
            return 2
    reward.show(args.reward, health)
    return 0 if health.healthy else 1


def parser() -> argparse.ArgumentParser:
    """--reward or --config, and what goes with each."""
    text = "Find what would break a run, or a reward, before it costs hours."
    found = argparse.ArgumentParser("flowalign doctor", description=text)
    what = found.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="a YAML file of a training stage or a recipe")
    what.add_argument("--reward", help="a name, or package.module:attribute")
    found.add_argument("--variant", help="config: a YAML file of keys by stage: other hardware")
    found.add_argument("--no-model", action="store_true", help="only what needs no weights")
    found.add_argument("--memory", type=float, metavar="GIB", help="plan for such a GPU")
    found.add_argument("--processes", type=int, default=1, help="devices of the run (default 1)")
    found.add_argument("--tflops", type=float, help="the rate to plan with, TFLOP/s a device")
    found.add_argument("--count", type=int, default=16, help="reward: scenes (default 16)")
    found.add_argument("--size", type=int, help="reward: enlarge the 64-pixel scenes to this")
    found.add_argument("options", nargs="*", metavar="key=value", help="changes, or options")
    return found


def examine(args: argparse.Namespace) -> bool:
    """Every stage of a config, printed as it is found; whether all are healthy. ConfigError for a
    config that `train` would refuse to read."""
    from flowalign.config import ConfigError, TrainingStage, load
    from flowalign.config.schema import RecipeStage, Stage
    from flowalign.preflight import check_world
    from flowalign.recipe import plan

    root = load(args.config, args.options, stage=Stage, variant=args.variant)
    show(_environment())
    stages = {Path(args.config).stem: root}
    problems: list[str] = []
    try:
        if isinstance(root, RecipeStage):
            stages = plan(root, Path(args.config).parent, args.processes)
        else:
            check_world(root, args.processes)
    except ConfigError as error:
        problems = error.problems
        show([Finding("fault", text) for text in problems])
    ranks = _ranks(stages)
    sound = not problems
    for name, stage in stages.items():
        if isinstance(stage, TrainingStage):
            findings = stage_findings(name, stage, args, ranks, refused=bool(problems))
            sound &= healthy(findings)
    print("no fault was found" if sound else "faults were found")
    return sound


def stage_findings(
    name: str,
    config: TrainingStage,
    args: argparse.Namespace,
    ranks: Mapping[str, int],
    refused: bool,
) -> list[Finding]:
    """The findings of a training stage, printed: its plan, a few images of it, its memory."""
    from flowalign.doctor import budget, plan

    print(f"\n{name} ({config.stage})")
    found = [] if refused else plan.examine(config)
    show(found)
    device = budget.planned_device(config, args.memory)
    try:
        estimate = budget.predict(config, device_type=device, processes=args.processes, ranks=ranks)
    except LookupError as error:
        estimate = None
        show([Finding("note", f"memory: no prediction: {error.args[0]}")])
    reason = _not_runnable(config, args, ranks, estimate)
    if refused or not healthy(found):
        reason = "mend the faults above first"
    rate, scoring = None, 0.0
    if reason:
        show([Finding("note", f"no image was sampled: {reason}")])
    else:
        from flowalign.doctor import live

        seen = live.examine(config)
        show(seen.findings)
        found += seen.findings
        rate, scoring = seen.rate, seen.scoring
    if estimate:
        budget.show(name, estimate)
        last = [*budget.fits(config, estimate, args.memory, device, ranks),
                *budget.pace(config, estimate, args.tflops, rate, scoring)]  # fmt: skip
        show(last)
        found += last
    return found


def _not_runnable(
    config: TrainingStage,
    args: argparse.Namespace,
    ranks: Mapping[str, int],
    estimate: Estimate | None,
) -> str:
    """Why a few images cannot be sampled here; "" = they can."""
    import torch

    from flowalign.doctor.architectures import local_folder
    from flowalign.preflight import adapters

    if args.no_model:
        return "--no-model"
    if local_folder(config.model.id, config.model.revision) is None:
        return f"{config.model.id} is not on this machine (train downloads it)"
    if missing := [p for p, source in adapters(config).items() if source in ranks]:
        return f"an earlier stage writes {', '.join(missing)}"
    large = estimate and estimate.parts and estimate.resident > CPU_MODEL
    if large and not torch.cuda.is_available():
        return "the model is too large to sample from without a GPU"
    return ""


def _ranks(stages: Mapping[str, object]) -> dict[str, int]:
    """{folder: rank} of the adapters that the stages of a recipe will write."""
    from flowalign.config import TrainingStage
    from flowalign.config.schema import MergeStage
    from flowalign.doctor.estimate import rank_of
    from flowalign.preflight import ADAPTER

    found: dict[str, int] = {}
    for stage in stages.values():
        if isinstance(stage, MergeStage):
            ranks = [rank_of(source, found, 32) for source in stage.adapters]
            rank = sum(ranks) if stage.method == "concat" else stage.rank or max(ranks)
            rank = min(rank, sum(ranks)) if stage.method == "svd" else rank
        elif isinstance(stage, TrainingStage):
            init = stage.lora.init
            rank = rank_of(init, found, stage.lora.rank) if init else stage.lora.rank
        else:
            continue
        folder = Path(stage.output) / "adapter"
        if not (folder / ADAPTER).is_file():
            found[str(folder)] = rank
    return found


def _environment() -> Iterator[Finding]:
    """Versions, and the device."""
    import torch

    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package} (not installed)"

    yield Finding("ok", f"Python {platform.python_version()}, {', '.join(map(of, PACKAGES))}")
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield Finding("ok", f"device: {torch.cuda.get_device_name(0)}, {memory:.1f} GiB")
    else:
        yield Finding("note", f"device: CPU, {torch.get_num_threads()} threads; torch sees no GPU")


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """A logger of errors alone, inside the `with`."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
