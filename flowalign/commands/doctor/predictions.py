"""What each stage of a run downloads, holds and takes, and the sum: `doctor` and `--dry-run`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flowalign import rewards
from flowalign.backbone.structure import local_folder
from flowalign.commands.doctor.estimate import Estimate, predict, rank_of
from flowalign.commands.doctor.findings import Finding, fault, note, ok, show
from flowalign.commands.doctor.pace import DEFAULT_GPU, GPUS, Gpu, Pace, Times, present_gpu, times
from flowalign.config import ADAPTER, Stage

GB, GIB = 10**9, 2**30
SHARE = 0.92  # of a device's memory that tensors can use; the rest is lost between blocks
CONTEXT = 0.6 * GIB  # of CUDA, cuDNN and cuBLAS
CHANGES = 12  # that are tried


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
    device: Device
    estimate: Estimate | None = None
    unknown: str = ""  # why there is no estimate
    times: Times | None = None
    source: str = ""  # of the rates

    def conclude(self, measured: Pace | None) -> Iterator[Finding]:
        """Print the table of the stage; findings about memory and time. measured: the rates here,
        of this stage or of one before."""
        if self.unknown:
            yield note(f"memory: no prediction: {self.unknown}")
        if self.estimate is None:
            return
        _show_memory(self.name, self.estimate)
        gpu, assumed = self._gpu(self.estimate)
        memory, title = self.device.memory, ""
        if gpu and not memory:
            memory, title = gpu.memory, gpu.title if assumed else ""
        yield from fits(self.estimate, memory, title)
        wanted = "; torch sees no GPU, --gpu plans for another" if assumed else ""
        yield ok(f"time: {self._spoken(self.time(self.estimate, measured))}{wanted}")

    def time(self, estimate: Estimate, measured: Pace | None = None) -> Times:
        """Set times and source, by the rate that is asked for, measured or in the table."""
        gpu, dtype, tflops = self._gpu(estimate)[0], self.stage.model.dtype, self.device.tflops
        if tflops:
            pace = Pace.constant(tflops * 1e12, f"{tflops:g} TFLOP/s, --tflops")
        elif measured and not self.device.gpu:
            pace = measured
        elif gpu:
            pace = Pace.of_gpu(gpu, dtype)
        else:
            pace = Pace.of_products(dtype, estimate.device_type)
        self.times, self.source = times(estimate, pace), pace.source
        return self.times

    def _gpu(self, estimate: Estimate) -> tuple[Gpu | None, bool]:
        """The GPU that is planned for, and whether it is neither here nor asked for. None: this
        machine's device, or one that only --memory and --tflops describe."""
        if self.device.gpu:
            return GPUS[self.device.gpu], False
        if estimate.device_type == "cpu" or torch.cuda.is_available():
            return present_gpu() if estimate.device_type == "cuda" else None, False
        return GPUS[DEFAULT_GPU], True

    def _spoken(self, t: Times) -> str:
        parts = []
        if t.updates:
            split = ", ".join(f"{kind} {s:.3g}" for kind, s in t.kinds.items() if s)
            scoring = f", rewards {t.scoring:.3g}" if t.scoring else ""
            parts.append(f"{t.update:.3g} s an update ({split}{scoring})")
        if t.evaluations:
            judging = f" (rewards {t.judging:.3g} s)" if t.judging else ""
            hours = t.evaluation / 3600
            taken = f"{t.evaluation:.3g} s" if hours < 1 else f"{hours:.3g} h"
            parts.append(f"{taken} an evaluation{judging}")
        plan = f"{t.updates} updates and {t.evaluations} evaluations"
        plan = plan if t.updates else "the evaluation"
        left = f"; not included: {', '.join(t.unknown)}" if t.unknown else ""
        return (
            f"{', '.join(parts)}; {_hours(t.hours)} h for {plan}, {_hours(t.gpu_hours)} "
            f"{_unit(self)}-hours on {t.processes} x {self.source}{left}"
        )


def forecasts(stages: Mapping[str, Stage], device: Device) -> list[Forecast]:
    """The prediction of each stage, without its times. Prints what all of them need together."""
    ranks, listed = _ranks(stages), []
    for name, stage in stages.items():
        one = Forecast(name, stage, device)
        listed.append(one)
        if not stage.samples:  # a merge
            continue
        asked = device.gpu or device.memory or device.tflops
        # for this machine's CPU only where the run itself would be on it
        elsewhere = asked or torch.cuda.is_available() or not is_here(stage)
        kind = "cuda" if elsewhere else "cpu"
        try:
            one.estimate = predict(stage, device_type=kind, processes=device.gpus, ranks=ranks)
        except LookupError as error:
            one.unknown = str(error.args[0])
    show(_needs(listed))
    return listed


def is_here(stage: Stage) -> bool:
    """Whether the model of a stage is on this machine."""
    return local_folder(stage.model.id, stage.model.revision) is not None


def _ranks(stages: Mapping[str, Stage]) -> dict[str, int]:
    """{folder: rank} of the adapters that the stages of a recipe will write."""
    written: dict[str, int] = {}
    for stage in stages.values():
        ranks, folder = partial(rank_of, ranks=written, model=stage.model), Path(stage.output)
        rank = stage.output_rank(ranks)
        if rank is not None and not (folder / "adapter" / ADAPTER).is_file():
            written[str(folder / "adapter")] = rank
    return written


def _needs(listed: Sequence[Forecast]) -> Iterator[Finding]:
    """Findings about downloads and host memory of all stages together.

    Adapters are not among them: the checks before this have read them. For rewards a cache is not
    looked at, since their libraries have caches of their own.
    """
    sizes: dict[str, float] = {}  # GB
    unknown: dict[str, None] = {}
    estimates = [forecast.estimate for forecast in listed if forecast.estimate]
    largest = max(estimates, key=lambda estimate: estimate.host, default=None)
    for stage in (forecast.stage for forecast in listed):
        if not is_here(stage) and largest:
            sizes[stage.model.id] = largest.download / GB
        elif not is_here(stage):
            unknown[stage.model.id] = None
        for reward in (r for judged in stage.judged for r in judged.rewards.values()):
            for name, options in rewards.leaves(reward.name, reward.options, imports=False):
                files = rewards.declared(name, imports=False).files(**options)
                if files is None:
                    unknown[f"reward {name}"] = None
                sizes |= files or {}
    if sizes:
        each = ", ".join(f"{name} ({size:.2g} GB)" for name, size in sizes.items())
        total = sum(sizes.values())
        yield note(f"downloads: about {total:.3g} GB unless they are cached: {each}")
    if unknown:
        yield note(f"downloads of unknown size: {', '.join(unknown)}")
    if not sizes and not unknown:
        yield ok("downloads: none")
    if largest:
        text = f"host memory: {largest.host / GIB:.3g} GiB a process while the model loads"
        stay = any(forecast.stage.model.offload_text_encoders for forecast in listed)
        yield ok(text + (", of which the text encoders stay there" if stay else ""))


# Memory ------------------------------------------------------------------------------------------


def usable(memory: float, device_type: str) -> float:
    """Bytes that tensors can use on a device with `memory` bytes."""
    return memory * SHARE - (CONTEXT if device_type == "cuda" else 0)


def fits(estimate: Estimate, memory: float | None, assumed: str = "") -> Iterator[Finding]:
    """Whether the peak fits in `memory` GiB (None = this machine's), and what would make it fit.

    assumed: the name of a GPU that was not asked for; a run that does not fit there has no fault.
    """
    need = f"{estimate.peak / GIB:.3g} GiB in {estimate.worst.name}"
    if memory:
        size = memory * GIB
    elif estimate.device_type == "cpu":
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        size = torch.cuda.get_device_properties(0).total_memory
    limit = usable(size, estimate.device_type)
    have = f"{assumed or 'the device'} has {size / GIB:.3g} GiB, of which tensors can use "
    have += f"{limit / GIB:.3g}"
    if estimate.peak <= limit:
        yield ok(f"memory: at most {need}; {have}")
        return
    yield (note if assumed else fault)(f"memory: does not fit: {need}; {have}. Changes:")
    for change, after in advice(estimate, limit):
        end = "fits" if after.peak <= limit else f"still too much, in {after.worst.name}"
        yield note(f"  {change}: {after.peak / GIB:.3g} GiB, {end}")
        estimate = after
    if estimate.peak > limit:
        yield note("  no other setting helps; use a larger device, or a smaller lora.rank.")


def advice(estimate: Estimate, limit: float) -> Iterator[tuple[str, Estimate]]:
    """(a change, the estimate after it and all before), until `limit` bytes suffice."""
    for _ in range(CHANGES):
        change = next(_changes(estimate, limit), None) if estimate.peak > limit else None
        if change is None:
            return
        estimate = estimate.after(change)
        yield change, estimate


def _changes(estimate: Estimate, limit: float) -> Iterator[str]:
    """What can be changed now, the cheapest first: the worst phase, then what is resident."""
    model, worst = estimate.config.model, estimate.worst
    sizes = {key: size for key, size in worst.sizes.items() if size > 1}
    share = (limit - estimate.resident) / worst.bytes  # of the phase's memory that is available
    if worst.name == "update" and not model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    if share > 0.05:  # smaller batches can suffice
        for key, size in sizes.items():
            yield f"{key}={max(1, min(size - 1, int(size * share * 0.9)))}"  # 0.9: not to the brim
    if not model.offload_text_encoders:
        yield "model.offload_text_encoders=true"
    if model.dtype == "float32":  # only from here on is something else learned
        yield "model.dtype=bfloat16"
    if model.quantization is None:
        yield "model.quantization=fp8"
    for key in sizes:
        yield f"{key}=1"


def _show_memory(name: str, estimate: Estimate) -> None:
    """Print what is resident, and the peak and the FLOPs of each phase."""
    unit, label = (GIB, "GiB") if estimate.peak > GIB else (2**20, "MiB")
    table = Table("memory of a process", label, "TFLOP", title=f"prediction for {name}")
    for part, count in estimate.parts.items():
        table.add_row(part, f"{count / unit:.2f}", "")
    table.add_section()
    for phase in estimate.all_phases:
        total = f"{(estimate.resident + phase.bytes) / unit:.2f}"
        table.add_row(f"peak in {phase.name}", total, f"{phase.flops / 1e12:.4g}")
    console = Console(highlight=False)
    console.print(table)
    if estimate.config.model.compile:
        console.print("torch.compile is not in the prediction.")


# Time --------------------------------------------------------------------------------------------


def show_total(listed: Sequence[Forecast]) -> None:
    """Print a line for each stage, and their sum."""
    timed = [forecast for forecast in listed if forecast.times]
    if not timed:
        return
    columns = ("stage", "peak GiB", "s/update", "updates", "evaluations", "wall h")
    table = Table(*columns, f"{_unit(timed[0])}-h")
    wall = total = 0.0
    for f in listed:
        if f.times is None or f.estimate is None:
            why = "not predicted" if f.stage.samples else "minutes, no GPU"
            table.add_row(f.name, "-", "-", "-", "-", why, "-")
            continue
        t = f.times
        wall, total = wall + t.hours, total + t.gpu_hours
        table.add_row(
            f.name, f"{f.estimate.peak / GIB:.1f}", f"{t.update:.3g}" if t.updates else "-",
            str(t.updates or "-"), str(t.evaluations), _hours(t.hours), _hours(t.gpu_hours),
        )  # fmt: skip
    table.add_section()
    table.add_row("sum", "", "", "", "", _hours(wall), _hours(total))
    console = Console(highlight=False, width=max(100, Console().width))
    console.print(table)
    sources = "; ".join(dict.fromkeys(f.source for f in timed))
    console.print(f"on {listed[0].device.gpus} x {sources}", soft_wrap=True)


def _unit(forecast: Forecast) -> str:
    return "CPU" if forecast.estimate and forecast.estimate.device_type == "cpu" else "GPU"


def _hours(hours: float) -> str:
    return f"{hours:.2f}" if hours < 10 else f"{hours:.0f}"
