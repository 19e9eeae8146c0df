"""Does a run fit its device, what to change if not, and how long does it take?"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from flowalign.commands.doctor.estimate import Estimate
from flowalign.commands.doctor.findings import Finding, fault, note, ok
from flowalign.config import EvalStage, OpdStage

GIB = 2**30
SHARE = 0.92  # of a device's memory that tensors can use; the rest is lost between blocks
CONTEXT = 0.6 * GIB  # of CUDA, cuDNN and cuBLAS
MOST = 12  # changes that are tried


def usable(memory: float, device_type: str) -> float:
    """Bytes that tensors can use on a device with `memory` bytes."""
    return memory * SHARE - (CONTEXT if device_type == "cuda" else 0)


def fits(estimate: Estimate, memory: float | None, assumed: str = "") -> Iterator[Finding]:
    """Whether the peak fits in `memory` GiB (None = this machine's), and what would make it fit.

    assumed: the name of a GPU that nobody asked for; a run that does not fit there has no fault.
    """
    need = f"{estimate.peak / GIB:.3g} GiB in {estimate.worst.name}"
    if memory:
        size = memory * GIB
    elif estimate.device_type == "cpu":
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        size = torch.cuda.get_device_properties(0).total_memory
    room = usable(size, estimate.device_type)
    have = f"{assumed or 'the device'} has {size / GIB:.3g} GiB, of which tensors can use "
    have += f"{room / GIB:.3g}"
    if estimate.peak <= room:
        yield ok(f"memory: at most {need}; {have}")
        return
    yield (note if assumed else fault)(f"memory: does not fit: {need}; {have}. Changes:")
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
    sizes = {}  # the batch sizes that the phase's peak depends on
    if isinstance(config, EvalStage):
        sizes["model.decode_batch"] = model.decode_batch or config.sampling.batch_size
        sizes["sampling.batch_size"] = config.sampling.batch_size
    elif worst.name in ("VAE decode", "evaluation"):
        sizes["model.decode_batch"] = model.decode_batch or config.rollout.batch_size
        if worst.name == "evaluation":
            sizes["evaluation.batch_size"] = config.evaluation_sampling.batch_size
    elif worst.name == "rollout":
        sizes["rollout.batch_size"] = config.rollout.batch_size
    elif worst.name == "labels" and isinstance(config, OpdStage):
        sizes["student.label_batch"] = config.student.label_batch
    elif worst.name == "update":
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
