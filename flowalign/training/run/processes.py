"""How the processes of a run share the work: one alone, DDP or FSDP2.

accelerate's config file (configs/accelerate/) chooses, and accelerate does most of the work; this
file does what it leaves to its caller. Every process holds every adapter unsharded and in float32,
so that EMA, checkpoints and saved adapters equal a single process's. FSDP2 shards the frozen
base; docs/before-you-spend.md says when that pays.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedType,
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
    patch_environment,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from flowalign.backbone import Backbone
from flowalign.config import ConfigError, Stage, TrainingStage
from flowalign.system import files
from flowalign.system.escape import harmless
from flowalign.system.signals import Interrupted

T = TypeVar("T")

TIMEOUT = 7200.0  # seconds that a rank waits for another, if `timeout_seconds` is not set

UNSUPPORTED = (  # variables that request unsupported strategies from accelerate
    "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_FP8_BACKEND",
)  # fmt: skip
OFF = ("NO", "0", "false", "False")  # their values that request nothing
DECIDED = {  # accelerate's variables for what the config decides
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",  # optimizer.micro_batch
    "ACCELERATE_MIXED_PRECISION": "no",  # model.dtype
    "ACCELERATE_DYNAMO_BACKEND": "no",  # model.compile
}

ADAPTERS = r".*\.lora_[AB]\..*"  # what peft calls the modules of all adapters


def state(*configs: Stage) -> PartialState:
    """accelerate's state of the processes. Call it before an Accelerator is made: otherwise several
    processes without a GPU would not form a group.

    The first call creates the group, with the longest timeout of these configs. Later calls return
    it. Raises ConfigError for a strategy that is not supported, and for processes that are not in
    one group: each would do all of the work, in one folder.
    """
    values = {key: os.environ.get(key, "NO") for key in UNSUPPORTED}
    if strategies := [f"{key}={value}" for key, value in values.items() if value not in OFF]:
        text = f"{', '.join(strategies)}: not supported. Unset it; DDP and FSDP2 share the work."
        raise ConfigError([text], "accelerate")
    timeouts = [
        getattr(getattr(c, "train", c), "timeout_seconds", None) or TIMEOUT for c in configs
    ]
    timeout = timedelta(seconds=max(timeouts, default=TIMEOUT))
    made = PartialState(cpu=not torch.accelerator.is_available(), timeout=timeout)
    if made.num_processes == 1 < (started := int(os.environ.get("WORLD_SIZE") or 1)):
        text = (
            f"{started} processes were started, and this one sees no other. Without GPUs, say "
            "`accelerate launch --config_file configs/accelerate/ddp_2cpu.yaml ...`."
        )
        raise ConfigError([text], "launcher")
    return made


def accelerator(config: Stage, **options: Any) -> Accelerator:
    """The Accelerator on the processes of `state`. All Accelerators are made here. The config sets
    its precision; the environment does not."""
    state(config)
    with patch_environment(**DECIDED):
        return Accelerator(**options)


def start(config: TrainingStage) -> Accelerator:
    """The accelerator of a run, made before any model is loaded. Raises ConfigError for a strategy
    that is not supported.

    model.dtype sets the precision, not accelerate's config file: the backbone computes in that
    dtype, without autocast.
    """
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    started = accelerator(
        config,
        # fp16: for accelerate's scaling of the loss, without which small gradients become 0
        mixed_precision="fp16" if config.model.dtype == "float16" and not sharded else "no",
        kwargs_handlers=[AutocastKwargs(enabled=False)],
        log_with=list(config.train.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=config.output, logging_dir=str(config.folder.tensorboard)
        ),
    )
    if sharded and (problems := list(_fsdp_problems(config, started.state))):
        raise ConfigError(problems, "accelerate")
    return started


def finish(accelerator: Accelerator) -> None:
    # not end_training(): it also ends the process group, which the next stage of a recipe needs
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        tracker.finish()


def part() -> None:
    if torch.distributed.is_initialized():
        PartialState().destroy_process_group()


@dataclass
class ExitStatus:
    """Around the work of a command; `code`: 0 done, 1 it had to stop, 2 it was refused, 130, 143 or
    75 interrupted (`flowalign.system.signals`).

    refused, stopped: the errors of which only the text is printed; any other is raised on.
    interrupted: how to continue after an interrupt, unless the work itself says.
    """

    refused: tuple[type[Exception], ...]
    stopped: tuple[type[Exception], ...]
    interrupted: str
    code: int = 0

    def __enter__(self) -> ExitStatus:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            part()
            return True
        text = f"stopped: {error}"
        if isinstance(error, KeyboardInterrupt):
            ours = error if isinstance(error, Interrupted) else Interrupted.by(signal.SIGINT)
            note = self.interrupted if ours.note is None else ours.note
            self.code = ours.code
            text = note and f"interrupted ({ours}): {note}"
        elif _of_another(error):
            seen = f"another process died or hangs ({str(error).splitlines()[0]})"
            text = f"stopped: {seen}. It says why, or its launcher does. To continue, give the "
            text += "same command again, for training with --resume."
            self.code = 1
        elif isinstance(error, self.refused):
            self.code = 2
            text = str(error)
        elif isinstance(error, self.stopped):
            self.code = 1
        elif files.is_disk_full(error):
            text = f"stopped: the disk is full ({error}). What was finished is kept. Free some "
            text += "space, and run the same command again, `train` with --resume."
            self.code = 1
        if self.code and text:
            print(harmless(text), file=sys.stderr)
        return self.code != 0


def _of_another(error: BaseException) -> bool:
    """Whether the error is torch's, from a collective operation that another process did not
    join."""
    text = str(error) if isinstance(error, RuntimeError) else ""  # gloo's errors have no type
    shared = isinstance(error, torch.distributed.DistError) or "gloo" in text or "NCCL" in text
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return shared and not alone


def _fsdp_problems(config: TrainingStage, state: Any) -> Iterator[str]:
    if (kind := state.distributed_type) != DistributedType.FSDP:
        yield f"asked for FSDP, and accelerate started {kind.value}: it needs GPUs."
        return
    plugin = state.fsdp_plugin
    if config.model.dtype == "float16":
        yield "model.dtype: 'float16' does not go with FSDP2. Use another dtype, or DDP."
    if plugin.fsdp_version != 2:
        yield "fsdp_config.fsdp_version: got 1; only 2 keeps adapters and base apart. Set it to 2."
    if plugin.cpu_ram_efficient_loading:
        yield (
            "fsdp_config.fsdp_cpu_ram_efficient_loading: true leaves the adapters, which are not "
            "sharded, without weights on all processes but one. Set it to false."
        )
    if config.model.quantization:
        yield (
            f"model.quantization: {config.model.quantization!r} is not sharded by FSDP2. Set it "
            "to null, or use DDP: a quantised base is small."
        )


def from_main(function: Callable[[], T]) -> T:
    """The result of a function that only the main process runs, on every process; all must call it.
    An error there is raised on all processes: an OSError (such as a full disk) as it is, another
    error as a RuntimeError on the others."""
    outcome: list[Any] = [None, None]  # result, error
    raised: Exception | None = None  # on this process
    if PartialState().is_main_process:
        try:
            outcome[0] = function()
        except Exception as error:
            raised = error
            elsewhere = RuntimeError(f"on the main process: {error}")
            outcome[1] = error if isinstance(error, OSError) else elsewhere
    broadcast_object_list(outcome)
    if error := raised or outcome[1]:
        raise error
    return outcome[0]


def missing_steps(count: int, sharded: bool) -> int:
    """The number of zero-weight batches that this rank adds to its `count`, so that all ranks run
    the same number of steps. 0 unless the base is sharded. Then it is a collective operation: all
    ranks must call it, in the same order, before their first step."""
    return max(gather_object([count])) - count if sharded else 0


class Means:
    """Means of measurements, by name, over all processes."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, value: float, count: int = 1) -> None:
        """Add a mean over `count` values. A plugin may give a one-element tensor."""
        self.add_sum(name, float(value) * count, count)

    def add_sum(self, name: str, total: float, count: int) -> None:
        before, number = self.sums.get(name, (0, 0))
        self.sums[name] = before + total, number + count

    def over_processes(self) -> dict[str, float]:
        """Means over the processes that have the name; NaN without values. All processes must call
        it."""
        everyone: list[dict[str, tuple[float, int]]] = gather_object([self.sums])
        means = {}
        for name in dict.fromkeys(name for sums in everyone for name in sums):
            totals, counts = zip(*(sums[name] for sums in everyone if name in sums), strict=True)
            means[name] = sum(totals) / sum(counts) if sum(counts) else math.nan
        return means


def of(accelerator: Accelerator) -> Parallel:
    sharded = accelerator.distributed_type == DistributedType.FSDP
    return (Fsdp2 if sharded else Parallel)(accelerator)


class Parallel:
    """One process, or DDP: every process holds the full model. The backward pass of an optimizer
    step's last micro-batch averages the gradients."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def prepare(self, backbone: Backbone, optimizer: torch.optim.Optimizer) -> Any:
        """Wrap the backbone's transformer; returns accelerate's optimizer."""
        backbone.transformer, optimizer = self.accelerator.prepare(backbone.core, optimizer)
        if isinstance(backbone.transformer, DistributedDataParallel):
            # the base's buffers are constants; DDP would broadcast them at the forward pass after
            # a reduction, where ranks with fewer micro-batches are in another collective
            backbone.transformer.broadcast_buffers = False
        return optimizer

    def learning(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.accelerator.no_sync(model)

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients over all processes, unless the backward pass did."""


class Fsdp2(Parallel):
    """FSDP2: torch's fully_shard of the frozen base. A forward pass needs all processes.

    The adapters are not sharded: as DTensors they would be in groups of mixed dtype (bf16 base,
    float32 adapter), for 1 % of the weights. Their gradients are averaged as in DDP.
    """

    def prepare(self, backbone: Backbone, optimizer: torch.optim.Optimizer) -> Any:
        """Wrap without accelerate's cast of inputs and weights, which rounds timesteps to bf16."""
        plugin: Any = self.accelerator.state.fsdp_plugin
        plugin.ignored_modules = ADAPTERS
        plugin.mixed_precision_policy = MixedPrecisionPolicy()  # no cast
        plugin.transformer_cls_names_to_wrap = sorted({type(b).__name__ for b in backbone.blocks})
        backbone.sharded = True
        return super().prepare(backbone, optimizer)

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        mean: Any = self.accelerator.reduce(flat, "mean")
        for grad, part in zip(grads, mean.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
