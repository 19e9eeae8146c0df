"""What each stage of a run downloads, holds and takes, and the sum: `doctor` and `--dry-run`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flowalign import rewards
from flowalign.backbone.structure import local_folder
from flowalign.commands.doctor.estimate import Estimate, predict, ranks_of
from flowalign.commands.doctor.findings import Finding, fault, note, ok, show
from flowalign.commands.doctor.pace import DEFAULT_GPU, GPUS, Gpu, Pace, Times, present_gpu, times
from flowalign.config import ADAPTER, ConfigError, ModelConfig, Stage, read

GB, GIB = 10**9, 2**30
SHARE = 0.92  # of a device's memory that tensors can use; the rest is lost between blocks
CONTEXT = 0.6 * GIB  # of CUDA, cuDNN and cuBLAS
CHANGES = 12  # that are tried
VARIANTS = Path(__file__).parents[1] / "configs" / "variants"


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
    times: Times | None = None  # None: no rate is known, or `conclude` was not called
    pace: Pace | None = None  # that they were computed with

    def conclude(self, measured: Pace | None) -> Iterator[Finding]:
        """Print the table of the stage; findings about memory and time. measured: the rates here,
        of this stage or of one before."""
        if self.unknown:
            yield note(f"memory: no prediction: {self.unknown}")
        if self.estimate is None:
            return
        self.time(measured)
        self._show(self.estimate)
        gpu, memory = self._gpu(), self.device.memory
        assumed = gpu is not None and not self.device.gpu and not torch.cuda.is_available()
        title = gpu.title if gpu and assumed and not memory else ""
        yield from fits(self.estimate, memory or (gpu and gpu.memory), title)
        if self.times is None:
            yield note("time: the rate of this device is not known; --gpu or --tflops says it")
        elif self.times.unknown:
            yield note(f"time: not included: {', '.join(self.times.unknown)}")

    def time(self, measured: Pace | None = None) -> None:
        """Set pace and times, by the rate that is asked for, measured or in the table."""
        gpu, tflops = self._gpu(), self.device.tflops
        if tflops:
            self.pace = Pace.constant(tflops * 1e12, f"{tflops:g} TFLOP/s, --tflops")
        elif measured and not self.device.gpu:
            self.pace = measured
        elif gpu and self.estimate:
            self.pace = Pace.of_gpu(gpu, self.estimate)
        if self.estimate and self.pace:
            self.times = times(self.estimate, self.pace)

    @property
    def hours(self) -> float:
        """Of the stage, as far as they are known."""
        return self.times.hours if self.times else 0.0

    def after(self, changes: Sequence[str]) -> Forecast:
        """The forecast after these changes of the config, at the same pace."""
        assert self.estimate and self.pace
        after = reduce(Estimate.after, changes, self.estimate)
        return replace(self, stage=after.config, estimate=after, times=times(after, self.pace))

    def _gpu(self) -> Gpu | None:
        """The GPU of the table that is planned for: the one that is asked for or here; where torch
        sees none, DEFAULT_GPU. None: a CPU, or a GPU that is not in the table."""
        if self.device.gpu:
            return GPUS[self.device.gpu]
        if self.estimate is None or self.estimate.device_type == "cpu":
            return None
        return present_gpu() if torch.cuda.is_available() else GPUS[DEFAULT_GPU]

    def _show(self, estimate: Estimate) -> None:
        """Print what is resident, and the peak, FLOPs and seconds of each phase."""
        unit, label = (GIB, "GiB") if estimate.peak > GIB else (2**20, "MiB")
        title = f"prediction for a process of {self.name}"
        table = Table("memory", label, "TFLOP", "seconds", title=title)
        for part, count in estimate.parts.items():
            table.add_row(part, f"{count / unit:.2f}")
        table.add_section()
        seconds = dict(self.times.seconds, evaluation=self.times.evaluation) if self.times else {}
        for phase in estimate.all_phases:
            total = f"{(estimate.resident + phase.bytes) / unit:.2f}"
            taken = f"{seconds.pop(phase.name):.3g}" if seconds else ""
            table.add_row(f"peak in {phase.name}", total, f"{phase.flops / 1e12:.4g}", taken)
        if waited := seconds.get("rewards"):
            table.add_row("waiting for rewards", "", "", f"{waited:.3g}")
        console = Console(highlight=False)
        console.print(table)
        if estimate.config.model.compile:
            console.print("torch.compile is not in the prediction.")


def forecasts(stages: Mapping[str, Stage], device: Device) -> list[Forecast]:
    """The prediction of each stage, without its times. Prints what all of them need together."""
    ranks: dict[str, Mapping[str, int]] = {}  # {folder: {layer: rank}} that the stages will write
    listed = [Forecast(name, stage, device) for name, stage in stages.items()]
    asked = device.gpu or device.memory or device.tflops or torch.cuda.is_available()
    for one in listed:
        stage, adapter = one.stage, Path(one.stage.output) / "adapter"
        # for this machine's CPU only where the run itself would be on it
        kind = "cuda" if asked or not is_here(stage.model) else "cpu"
        try:
            if stage.makes_adapter and not (adapter / ADAPTER).is_file():
                of = partial(ranks_of, ranks=ranks, model=stage.model)
                ranks[str(adapter)] = stage.output_ranks(of)
            if stage.samples:
                one.estimate = predict(stage, device_type=kind, processes=device.gpus, ranks=ranks)
        except LookupError as error:
            one.unknown = str(error.args[0])
    show(_needs(listed))
    return listed


def is_here(model: ModelConfig) -> bool:
    """Whether a model is on this machine."""
    return local_folder(model.id, model.revision) is not None


def _needs(listed: Sequence[Forecast]) -> Iterator[Finding]:
    """Findings about downloads and host memory of all stages together.

    Adapters are not among them: the checks before this have read them. For rewards a cache is not
    looked at, since their libraries have caches of their own.
    """
    sizes: dict[str, float | None] = {}  # GB; None = not known
    estimates = [forecast.estimate for forecast in listed if forecast.estimate]
    largest = max(estimates, key=lambda estimate: estimate.shapes.host, default=None)
    for stage in (forecast.stage for forecast in listed):
        needed = [stage.model] if stage.samples or stage.makes_adapter else []
        for model in (m for m in (*needed, *stage.bases.values()) if not is_here(m)):
            size = largest and largest.shapes.downloads.get(model.id)
            sizes[model.id] = size and size / GB
        for reward in (r for judged in stage.judged for r in judged.rewards.values()):
            for name, options in rewards.leaves(reward.name, reward.options, imports=False):
                files = rewards.declared(name, imports=False).files(**options)
                sizes |= {f"reward {name}": None} if files is None else files
    if sizes:
        each = [f"{name} ({size:.2g} GB)" if size else name for name, size in sizes.items()]
        total = sum(size or 0 for size in sizes.values())
        yield note(f"downloads: about {total:.3g} GB unless cached: {', '.join(each)}")
    if largest:
        yield ok(
            f"host memory: {largest.shapes.host / GIB:.3g} GiB a process while the model loads"
        )


# Memory ------------------------------------------------------------------------------------------


def usable(memory: float, device_type: str) -> float:
    """Bytes that tensors can use on a device with `memory` bytes."""
    return memory * SHARE - (CONTEXT if device_type == "cuda" else 0)


def fits(estimate: Estimate, memory: float | None, assumed: str = "") -> Iterator[Finding]:
    """Whether the peak fits in `memory` GiB (None = this machine's), and what would make it fit.

    assumed: the name of a GPU that was not asked for; a run that does not fit there has no fault.
    """
    if memory:
        size = memory * GIB
    elif estimate.device_type == "cpu":
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        size = torch.cuda.get_device_properties(0).total_memory
    limit = usable(size, estimate.device_type)
    text = f"{estimate.peak / GIB:.3g} GiB in {estimate.worst.name}; {assumed or 'the device'} has "
    text += f"{size / GIB:.3g} GiB, of which tensors can use {limit / GIB:.3g}"
    if estimate.peak <= limit:
        yield ok(f"memory: at most {text}")
        return
    yield (note if assumed else fault)(f"memory: does not fit: {text}. Changes:")
    reached = estimate
    for change, reached in advice(estimate, limit):
        end = "fits" if reached.peak <= limit else f"still too much, in {reached.worst.name}"
        yield note(f"  {change}: {reached.peak / GIB:.3g} GiB, {end}")
    variants = {name: e for name, e in _variants(estimate, size) if e.peak <= limit}
    for name, after in list(variants.items())[:1]:
        yield note(f"  or --variant {name}: {after.peak / GIB:.3g} GiB, fits")
    if reached.peak > limit and not variants:
        yield note("  no other setting helps; use a larger device, or a smaller lora.rank.")


def advice(estimate: Estimate, limit: float) -> Iterator[tuple[str, Estimate]]:
    """(a change that helps, the estimate after it and all before), until `limit` bytes suffice."""
    for _ in range(CHANGES):
        if estimate.peak <= limit:
            return
        tried = ((change, estimate.after(change)) for change in _changes(estimate, limit))
        change, after = next(((c, e) for c, e in tried if e.peak < estimate.peak), (None, estimate))
        if change is None:
            return
        estimate = after
        yield change, after


def _variants(estimate: Estimate, memory: float) -> Iterator[tuple[str, Estimate]]:
    """The shipped variants for a GPU of at most this memory, the largest first."""
    sizes = {file: int(file.name[2:4]) for file in VARIANTS.glob(f"{estimate.processes}x*.yaml")}
    for file, size in sorted(sizes.items(), key=lambda item: -item[1]):
        keys = read(file).get(estimate.config.stage)
        if keys and size * 0.95 <= memory / GIB:
            with suppress(ConfigError):  # keys that this stage does not have
                yield f"configs/variants/{file.name}", estimate.after(keys)


def _changes(estimate: Estimate, limit: float) -> Iterator[str]:
    """What can be changed now, the cheapest first: the worst phase, then what is resident, then
    what a run can do without."""
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
        yield f"model.quantization={'nf4' if estimate.device_type == 'cuda' else 'fp8'}"
    if worst.name == "text" and model.text_cache is None:
        yield "model.text_cache=outputs/text_cache"
    for key in sizes:
        yield f"{key}=1"
    if worst.name == "image drift":
        yield "alarm=null"


# Time --------------------------------------------------------------------------------------------


def show_total(listed: Sequence[Forecast]) -> None:
    """Print a line for each stage, and their sum."""
    table = Table("stage", "peak GiB", "updates", "s/update", "evaluations", "hours", "GPU-hours")
    for f in listed:
        peak = f"{f.estimate.peak / GIB:.1f}" if f.estimate else "-"
        if t := f.times:
            numbers = [str(t.updates), f"{t.update:.3g}", str(t.evaluations)]
            table.add_row(f.name, peak, *numbers, shown_hours(t.hours), shown_hours(t.gpu_hours))
        else:
            why = "not predicted" if f.stage.samples else "minutes, no GPU"
            table.add_row(f.name, peak, "-", "-", "-", why, "-")
    timed = [f.times for f in listed if f.times]
    if len(listed) > 1:
        table.add_section()
        sums = sum(t.hours for t in timed), sum(t.gpu_hours for t in timed)
        total = [*map(shown_hours, sums)] if timed else ["not predicted", "-"]
        table.add_row("sum", "", "", "", "", *total)
    console = Console(highlight=False, width=max(100, Console().width))
    console.print(table)
    for source in dict.fromkeys(f.pace.source for f in listed if f.times and f.pace):
        console.print(f"on {listed[0].device.gpus} x {source}", soft_wrap=True)


def shown_hours(hours: float) -> str:
    """Hours as the tables have them."""
    return f"{hours:.2f}" if hours < 10 else f"{hours:.0f}"
