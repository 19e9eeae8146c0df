"""The stages of a run, what each will need, and the sum: for `doctor` and `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flowalign.backbone.structure import local_folder
from flowalign.commands.doctor import budget
from flowalign.commands.doctor.estimate import Estimate, predict, rank_of
from flowalign.commands.doctor.findings import Finding, note, ok
from flowalign.commands.doctor.gpus import DEFAULT, GPUS, Gpu, named, present
from flowalign.commands.doctor.pace import Pace, Times, times
from flowalign.config import ADAPTER, EvalStage, MergeStage, Stage, TrainingStage


@dataclass(frozen=True)
class Device:
    """What a run is planned for: the number of GPUs, and where it is not what is here, their name
    in GPUS, their memory in GiB and their rate in TFLOP/s."""

    gpus: int
    gpu: str | None = None
    memory: float | None = None
    tflops: float | None = None


@dataclass
class Forecast:
    """A stage, and its prediction. estimate: None for a merge, and where shapes are not known."""

    name: str
    stage: Stage
    estimate: Estimate | None
    unknown: str | None = None  # why there is no estimate
    times: Times | None = None
    source: str = ""  # of the rates

    def conclude(self, device: Device, measured: Pace | None) -> Iterator[Finding]:
        """Print the table of the stage; findings about memory and time. measured: here, by this
        stage or by one before."""
        if self.estimate is None:
            if self.unknown:
                yield note(f"memory: no prediction: {self.unknown}")
            return
        budget.show(self.name, self.estimate)
        gpu, assumed = _gpu(device, self.estimate)
        memory = device.memory or (gpu.memory if gpu else None)
        nobody = gpu.title if gpu and assumed and not device.memory else ""
        yield from budget.fits(self.estimate, memory, nobody)
        self.hurry(device, measured)
        if self.times:
            yield _spoken(self.times, self.source, _unit(self.estimate), assumed)

    def hurry(self, device: Device, measured: Pace | None = None) -> None:
        """Set times and source."""
        if self.estimate is None:
            return
        gpu, assumed = _gpu(device, self.estimate)
        dtype = self.stage.model.dtype
        if device.tflops:
            pace = Pace.constant(device.tflops * 1e12, f"{device.tflops:g} TFLOP/s, --tflops")
        elif measured and (assumed or gpu is None or not device.gpu):
            pace = measured
        elif gpu:
            pace = Pace.of_gpu(gpu, dtype)
        else:
            pace = Pace.of_products(dtype, self.estimate.device_type)
        self.times, self.source = times(self.estimate, pace), pace.source


def forecast(name: str, stage: Stage, device: Device, ranks: Mapping[str, int]) -> Forecast:
    """The prediction of a stage, without its times."""
    if not isinstance(stage, TrainingStage | EvalStage):  # a merge
        return Forecast(name, stage, None)
    here = local_folder(stage.model.id, stage.model.revision) is not None
    asked = device.gpu or device.memory or device.tflops
    # for this machine's CPU only where the run itself would be on it
    kind = "cuda" if asked or torch.cuda.is_available() or not here else "cpu"
    try:
        estimate = predict(stage, device_type=kind, processes=device.gpus, ranks=ranks)
    except LookupError as error:
        return Forecast(name, stage, None, str(error.args[0]))
    return Forecast(name, stage, estimate)


def ranks(stages: Mapping[str, Stage]) -> dict[str, int]:
    """{folder: rank} of the adapters that the stages of a recipe will write."""
    written: dict[str, int] = {}
    for stage in stages.values():
        if isinstance(stage, MergeStage):
            given = [rank_of(source, written, 32) for source in stage.adapters]
            rank = sum(given) if stage.method == "concat" else stage.rank or max(given)
            rank = min(rank, sum(given)) if stage.method == "svd" else rank  # no more than exact
        elif isinstance(stage, TrainingStage):
            rank = rank_of(stage.lora.init, written, stage.lora.rank)
        else:
            continue
        folder = Path(stage.output) / "adapter"
        if not (folder / ADAPTER).is_file():
            written[str(folder)] = rank
    return written


def total(forecasts: Sequence[Forecast]) -> None:
    """Print a line for each stage, and their sum."""
    from rich.console import Console
    from rich.table import Table

    timed = [f for f in forecasts if f.times]
    if not timed:
        return
    unit = _unit(timed[0].estimate)
    columns = ("stage", "peak GiB", "s/update", "updates", "evaluations", "wall h", f"{unit}-h")
    table = Table(*columns)
    for f in forecasts:
        if f.times is None or f.estimate is None:
            why = "minutes, no GPU" if isinstance(f.stage, MergeStage) else "not predicted"
            table.add_row(f.name, "-", "-", "-", "-", why, "-")
            continue
        t = f.times
        update = f"{t.update:.3g}" if t.updates else "-"
        table.add_row(
            f.name, f"{f.estimate.peak / budget.GIB:.1f}", update, str(t.updates or "-"),
            str(t.evaluations), _hours(t.hours), _hours(t.gpu_hours),
        )  # fmt: skip
    hours = (sum(f.times.hours for f in timed if f.times),
             sum(f.times.gpu_hours for f in timed if f.times))  # fmt: skip
    table.add_section()
    table.add_row("sum", "", "", "", "", *map(_hours, hours))
    console = Console(highlight=False, width=max(100, Console().width))
    console.print(table)
    sources = dict.fromkeys(f.source for f in timed)
    processes = timed[0].times.processes if timed[0].times else 1
    console.print(f"on {processes} x {'; '.join(sources)}", soft_wrap=True)


def _gpu(device: Device, estimate: Estimate) -> tuple[Gpu | None, bool]:
    """The GPU that is planned for, and whether nobody asked for it. None: this machine's device, or
    one that only --memory and --tflops describe."""
    if device.gpu:
        return named(device.gpu), False
    if estimate.device_type == "cpu" or torch.cuda.is_available():
        return present() if estimate.device_type == "cuda" else None, False
    return GPUS[DEFAULT], True


def _spoken(t: Times, source: str, unit: str, assumed: bool) -> Finding:
    """A line about the time of a stage."""
    parts = []
    if t.updates:
        split = ", ".join(f"{kind} {s:.3g}" for kind, s in t.kinds.items() if s)
        rewards = f", rewards {t.scoring:.3g}" if t.scoring else ""
        parts.append(f"{t.update:.3g} s an update ({split}{rewards})")
    if t.evaluations:
        rewards = f" (rewards {t.judging:.3g} s)" if t.judging else ""
        taken = f"{t.evaluation:.3g} s" if t.evaluation < 3600 else f"{t.evaluation / 3600:.3g} h"
        parts.append(f"{taken} an evaluation{rewards}")
    plan = f"{t.updates} updates and {t.evaluations} evaluations" if t.updates else "the evaluation"
    wanted = "; torch sees no GPU, --gpu plans for another" if assumed else ""
    left = f"; not included: {', '.join(t.unknown)}" if t.unknown else ""
    return ok(
        f"time: {', '.join(parts)}; {_hours(t.hours)} h for {plan}, {_hours(t.gpu_hours)} "
        f"{unit}-hours on {t.processes} x {source}{wanted}{left}"
    )


def _unit(estimate: Estimate | None) -> str:
    return "CPU" if estimate and estimate.device_type == "cpu" else "GPU"


def _hours(hours: float) -> str:
    return f"{hours:.2f}" if hours < 10 else f"{hours:.0f}"
