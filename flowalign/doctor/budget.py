"""The memory and the time of a run, what to change if it does not fit, and their table."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

import torch

from flowalign.backbone import DTYPES
from flowalign.config import parse
from flowalign.config.schema import OpdStage, TrainingStage
from flowalign.doctor.architectures import local_folder
from flowalign.doctor.estimate import Estimate, predict
from flowalign.doctor.findings import Finding

GIB = 2**30
ROOM = 0.92  # the share of a device that tensors can fill: its context, and gaps between blocks
CONTEXT = 0.6 * GIB  # of CUDA, cuDNN and cuBLAS
EFFICIENCY = 0.4  # of the rate of large matrix products that a training step reaches
RATE = 1e14  # FLOP/s where there is nothing to measure: 100 TFLOP/s
MOST = 12  # changes that are tried


def device_memory(device_type: str) -> int:
    """Bytes of the GPU, or of this machine."""
    if device_type == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable(memory: float, device_type: str) -> float:
    """Bytes that tensors can have of a device with `memory`."""
    return memory * ROOM - (CONTEXT if device_type == "cuda" else 0)


def planned_device(config: TrainingStage, memory: float | None) -> str:
    """What the prediction is for: a GPU where there is one, where its memory is given, and where
    the model is not on this machine; else this machine's CPU."""
    if memory or torch.cuda.is_available():
        return "cuda"
    return "cpu" if local_folder(config.model.id, config.model.revision) else "cuda"


def fits(
    config: TrainingStage,
    estimate: Estimate,
    memory: float | None,
    device_type: str,
    ranks: Mapping[str, int],
) -> Iterator[Finding]:
    """Does the peak fit, and what change by change would make it? memory: GiB, None = this
    machine's."""
    what = f"{estimate.peak / GIB:.3g} GiB in {estimate.worst.name}"
    if memory is None and device_type == "cuda" and not torch.cuda.is_available():
        yield Finding("note", f"memory: {what}; --memory GIB tells what to change for such a GPU")
        return
    size = memory * GIB if memory else device_memory(device_type)
    room = usable(size, device_type)
    have = f"{size / GIB:.3g} GiB, of which tensors can have {room / GIB:.3g}"
    if estimate.peak <= room:
        yield Finding("ok", f"memory: at most {what}; the device has {have}")
        return
    yield Finding("fault", f"memory: does not fit: {what}, and the device has {have}. Change")
    for change, after in advice(config, estimate, room, device_type, ranks):
        end = "fits" if after.peak <= room else f"still too much, in {after.worst.name}"
        yield Finding("note", f"  {change}: {after.peak / GIB:.3g} GiB, {end}")
        estimate = after
    if estimate.peak > room:
        yield Finding("note", "  no setting is left: take a larger device, or a smaller lora.rank.")


def advice(
    config: TrainingStage,
    estimate: Estimate,
    room: float,
    device_type: str,
    ranks: Mapping[str, int],
) -> Iterator[tuple[str, Estimate]]:
    """(a change, the estimate after it and all before), until it fits or nothing is left. What is
    learnt stays the same, but for the last resorts: the dtype and quantization of the base."""
    for _ in range(MOST):
        if estimate.peak <= room:
            return
        change = next(_changes(config, estimate, room), None)
        if change is None:
            return
        config = parse(config.model_dump(mode="json"), [change])
        estimate = predict(
            config, device_type=device_type, processes=estimate.processes, ranks=ranks
        )
        yield change, estimate


def _changes(config: TrainingStage, estimate: Estimate, room: float) -> Iterator[str]:
    """What can be changed now, the cheapest first: of the worst phase, then of what lies there."""
    model, worst = config.model, estimate.worst
    left = (room - estimate.resident) / worst.bytes  # the share of its memory that the phase has
    if worst.name == "update" and not model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    if left > 0.05:  # smaller batches can do it
        sizes = _batches(config, worst.name)
        for key, size in sizes.items():
            if size > 1:
                yield f"{key}={max(1, min(size - 1, int(size * left * 0.9)))}"
    if not model.offload_text_encoders:
        yield "model.offload_text_encoders=true"
    if model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if model.quantization is None:
        yield "model.quantization=fp8"
    for key, size in _batches(config, worst.name).items():
        if size > 1:
            yield f"{key}=1"


def _batches(config: TrainingStage, phase: str) -> dict[str, int]:
    """The batch sizes that a phase's memory hangs on: how work is cut, not what is learnt."""
    rollout, model = config.rollout, config.model
    decode = {"model.decode_batch": model.decode_batch or rollout.batch_size}
    own = config.evaluation.batch_size if config.evaluation else None
    return {
        "rollout": {"rollout.batch_size": rollout.batch_size},
        "VAE decode": decode,
        "labels": {"student.label_batch": config.student.label_batch}
        if isinstance(config, OpdStage) else {},
        "update": {"optimizer.micro_batch": config.optimizer.micro_batch},
        "evaluation": decode | {"evaluation.batch_size": own or rollout.batch_size},
    }.get(phase, {})  # fmt: skip


# Time ------------------------------------------------------------------------------------------


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
    return 2 * size**3 * repeats / run()


def pace(
    config: TrainingStage,
    estimate: Estimate,
    tflops: float | None = None,
    measured: float | None = None,
    scoring: float = 0.0,
) -> Iterator[Finding]:
    """Seconds an update and device-hours to the end, at `tflops` if given, else at the measured
    FLOP/s, else at a share of this GPU's matrix products. scoring: seconds an image of rewards."""
    if tflops:
        rate, source = tflops * 1e12, "--tflops"
    elif measured:
        rate, source = measured, "measured on a small update here"
    elif torch.cuda.is_available():
        rate = matmul_rate(DTYPES[config.model.dtype]) * EFFICIENCY
        source = f"{EFFICIENCY:.0%} of what large matrix products reach here"
    else:
        rate, source = RATE, "assumed; --tflops gives another"
    rewards = scoring * config.rollout.prompts * config.rollout.copies / estimate.processes
    seconds = estimate.flops / rate + rewards
    hours = estimate.hours(rate) + estimate.updates * rewards / 3600 * estimate.processes
    part = f", {rewards:.1f} of them for rewards" if scoring else ""
    yield Finding(
        "ok",
        f"time: {estimate.flops / 1e12:.4g} TFLOP an update; at {rate / 1e12:.3g} TFLOP/s "
        f"({source}) {seconds:.3g} s an update{part}, and {hours:.3g} device-hours for "
        f"{estimate.updates} updates and {estimate.evaluations} evaluations on "
        f"{estimate.processes} device(s)",
    )


def show(name: str, estimate: Estimate) -> None:
    """Print what lies there, and what each phase holds and computes."""
    from rich.console import Console
    from rich.table import Table

    unit, name_of_it = (GIB, "GiB") if estimate.peak > GIB else (2**20, "MiB")
    table = Table("memory of a process", name_of_it, "TFLOP", title=f"prediction for {name}")
    for part, count in estimate.parts.items():
        table.add_row(part, f"{count / unit:.2f}", "")
    table.add_section()
    for phase in [*estimate.phases, *([estimate.evaluation] if estimate.evaluation else [])]:
        total = f"{(estimate.resident + phase.bytes) / unit:.2f}"
        table.add_row(f"all that and {phase.name}", total, f"{phase.flops / 1e12:.4g}")
    console = Console(highlight=False)
    console.print(table)
    for note in estimate.notes:
        console.print(note, markup=False)
