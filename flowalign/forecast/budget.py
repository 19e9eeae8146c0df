"""Does a run fit its device, what to change if not, and how long does it take?"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from flowalign.backbone import DTYPES
from flowalign.config.schema import OpdStage
from flowalign.forecast.estimate import Estimate
from flowalign.forecast.findings import Finding, fault, note, ok

GIB = 2**30
SHARE = 0.92  # of a device's memory that tensors can use; the rest is lost between blocks
CONTEXT = 0.6 * GIB  # of CUDA, cuDNN and cuBLAS
EFFICIENCY = 0.4  # of the rate of large matrix products that a training step reaches
RATE = 1e14  # FLOP/s, assumed where nothing can be measured
MOST = 12  # changes that are tried


def usable(memory: float, device_type: str) -> float:
    """Bytes that tensors can use on a device with `memory` bytes."""
    return memory * SHARE - (CONTEXT if device_type == "cuda" else 0)


def fits(estimate: Estimate, memory: float | None) -> Iterator[Finding]:
    """Whether the peak fits in `memory` GiB (None = this machine's), and what would make it fit."""
    need = f"{estimate.peak / GIB:.3g} GiB in {estimate.worst.name}"
    if memory:
        size = memory * GIB
    elif estimate.device_type == "cpu":
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    elif torch.cuda.is_available():
        size = torch.cuda.get_device_properties(0).total_memory
    else:
        yield note(f"memory: {need}; --memory GIB tells what to change for such a GPU")
        return
    room = usable(size, estimate.device_type)
    have = f"the device has {size / GIB:.3g} GiB, of which tensors can use {room / GIB:.3g}"
    if estimate.peak <= room:
        yield ok(f"memory: at most {need}; {have}")
        return
    yield fault(f"memory: does not fit: {need}; {have}. Changes:")
    for change, after in advice(estimate, room):
        end = "fits" if after.peak <= room else f"still too much, in {after.worst.name}"
        yield note(f"  {change}: {after.peak / GIB:.3g} GiB, {end}")
        estimate = after
    if estimate.peak > room:
        yield note("  no other setting helps; use a larger device, or a smaller lora.rank.")


def advice(estimate: Estimate, room: float) -> Iterator[tuple[str, Estimate]]:
    """(a change, the estimate after it and all before), until `room` bytes suffice."""
    for _ in range(MOST):
        change = next(_changes(estimate, room), None) if estimate.peak > room else None
        if change is None:
            return
        estimate = estimate.after(change)
        yield change, estimate


def _changes(estimate: Estimate, room: float) -> Iterator[str]:
    """What can be changed now, the cheapest first: the worst phase, then what is resident."""
    config, model, worst = estimate.config, estimate.config.model, estimate.worst
    rollout, sampling = config.rollout, config.evaluation_sampling
    sizes = {}  # the batch sizes that the phase's peak depends on
    if worst.name in ("VAE decode", "evaluation"):
        sizes["model.decode_batch"] = model.decode_batch or rollout.batch_size
    if worst.name == "evaluation":
        sizes["evaluation.batch_size"] = sampling.batch_size
    if worst.name == "rollout":
        sizes["rollout.batch_size"] = rollout.batch_size
    if worst.name == "labels" and isinstance(config, OpdStage):
        sizes["student.label_batch"] = config.student.label_batch
    if worst.name == "update":
        sizes["optimizer.micro_batch"] = config.optimizer.micro_batch
    sizes = {key: size for key, size in sizes.items() if size > 1}

    share = (room - estimate.resident) / worst.bytes  # of the phase's memory that is available
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


def pace(
    estimate: Estimate, tflops: float | None, measured: float | None, scoring: float
) -> Finding:
    """Seconds an update, and device-hours of the run.

    tflops: the rate, if it is known; measured: FLOP/s. scoring: seconds of rewards for an image.
    """
    config, processes = estimate.config, estimate.processes
    if tflops:
        rate, source = tflops * 1e12, "--tflops"
    elif measured:
        rate, source = measured, "measured on a small update here"
    elif torch.cuda.is_available():
        rate = matmul_rate(DTYPES[config.model.dtype]) * EFFICIENCY
        source = f"{EFFICIENCY:.0%} of what large matrix products reach here"
    else:
        rate, source = RATE, "assumed; --tflops gives another"
    updates = config.train.updates
    rewards = scoring * config.rollout.images / processes
    hours = estimate.hours(rate) + updates * rewards / 3600 * processes
    part = f", {rewards:.1f} of them for rewards" if scoring else ""
    return ok(
        f"time: {estimate.flops / 1e12:.4g} TFLOP an update; at {rate / 1e12:.3g} TFLOP/s "
        f"({source}) {estimate.flops / rate + rewards:.3g} s an update{part}, and {hours:.3g} "
        f"device-hours for {updates} updates and {estimate.evaluations} evaluations on "
        f"{processes} device(s)"
    )


def matmul_rate(dtype: torch.dtype, device_type: str = "cuda", repeats: int = 8) -> float:
    """FLOP/s of large matrix products on a device."""
    size = 8192 if device_type == "cuda" else 1024
    a = torch.randn(size, size, device=device_type, dtype=dtype)

    def run() -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, a)
        if device_type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    run()  # the first product loads its library
    return 2 * size**3 * repeats / run()  # a multiplication and an addition each


def show(name: str, estimate: Estimate) -> None:
    """Print what is resident, and the peak and the FLOPs of each phase."""
    from rich.console import Console
    from rich.table import Table

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
