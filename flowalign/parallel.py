"""How the processes of a run share it: alone, DDP, FSDP2 or DeepSpeed ZeRO-2.

Which of them is said by accelerate's own config file (configs/accelerate/), and accelerate does the
work; here is what it leaves to its caller. In all of them every process holds every adapter whole
and in float32, so that EMA, checkpoints and saved adapters are those of a single process. FSDP2
shards the frozen base, ZeRO-2 the optimizer's state; docs/scaling.md says when either pays.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedType,
    ProjectConfiguration,
    gather_object,
)
from accelerate.utils.memory import clear_device_cache
from packaging.version import Version
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flowalign.backbone import Backbone
from flowalign.config import ConfigError, Stage, TrainingStage
from flowalign.patience import patience

log = logging.getLogger("flowalign")

ADAPTERS = r".*\.lora_[AB]\..*"  # what peft calls the modules of all adapters
ASKED = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED"}


def state(*configs: Stage) -> PartialState:
    """What accelerate knows of the processes. To be asked before an Accelerator is made: several
    on a machine without a GPU would each believe that they are alone.

    The first call makes their group, which waits as patiently as the stages of these configs need
    (`flowalign.patience`); later ones find it made.
    """
    longest = max((patience(config, _launched()) for config in configs), default=None)
    given = {} if longest is None else {"timeout": timedelta(seconds=longest)}
    return PartialState(cpu=not torch.accelerator.is_available(), **given)


def _launched() -> int:
    """How many processes a launcher says that there are."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def accelerator(config: Stage, **options: Any) -> Accelerator:
    """The one way to make an Accelerator: on the processes that `state` finds."""
    state(config)
    return Accelerator(**options)


def start(config: TrainingStage) -> Accelerator:
    """The accelerator of a run, before any model is loaded; ConfigError for a strategy that is not
    one of ours. model.dtype decides on the precision, whatever accelerate's config file says.

    The backbone computes in that dtype by itself, so there is no autocast. float16 takes from
    accelerate the scaling of the loss, without which small gradients become 0.
    """
    told = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    asked = [kind for key, kind in ASKED.items() if os.environ.get(key, "").lower() == "true"]
    found = accelerator(
        config,
        mixed_precision="fp16" if config.model.dtype == "float16" and not asked else "no",
        kwargs_handlers=[AutocastKwargs(enabled=False)],
        log_with=list(config.train.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=config.output, logging_dir=str(Path(config.output) / "tensorboard")
        ),
    )
    if problems := list(_problems(config, found, asked)):
        raise ConfigError(problems, "accelerate")
    if told != "no" and found.is_main_process:
        log.warning(
            "accelerate's config says mixed_precision: %s, and model.dtype is %s: the latter "
            "counts. Leave it out of accelerate's config.", told, config.model.dtype,
        )  # fmt: skip
    return found


def finish(accelerator: Accelerator) -> None:
    """After a run: only its trackers end. (accelerate's end_training would part the processes, and
    a recipe has more stages.)"""
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        tracker.finish()


def release() -> None:
    """Between the stages of a recipe: the last one's models go before the next one's come. Their
    parts refer to one another, so that only the collector of garbage frees them; a GPU's memory of
    them is given back, too."""
    clear_device_cache(garbage_collection=True)


def part() -> None:
    """At the end of everything: the processes part."""
    if torch.distributed.is_initialized():
        state().destroy_process_group()


def _problems(
    config: TrainingStage, accelerator: Accelerator, asked: Sequence[str]
) -> Iterator[str]:
    kind, plugins = accelerator.distributed_type, _plugins(accelerator)
    if asked and kind.value not in asked:
        yield (
            f"asked for {asked[0]}, and accelerate started {kind.value}: it runs {asked[0]} on "
            "GPUs only. Use configs/accelerate/ddp_2cpu.yaml on CPUs."
        )
    elif kind == DistributedType.FSDP:
        yield from _fsdp_problems(config, plugins.fsdp_plugin)
    elif kind == DistributedType.DEEPSPEED:
        yield from _deepspeed_problems(config, plugins.deepspeed_plugin.deepspeed_config)
    elif kind == DistributedType.MEGATRON_LM:
        yield "Megatron-LM is not supported. Use DDP, FSDP2 or DeepSpeed ZeRO-2."


def _plugins(accelerator: Accelerator) -> Any:
    """Where accelerate keeps the settings of its strategies, typed as if each might be missing."""
    return accelerator.state


def _fsdp_problems(config: TrainingStage, plugin: Any) -> Iterator[str]:
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
    if Version(torch.__version__) < Version("2.7"):
        yield f"FSDP2 needs torch 2.7 or newer to leave adapters out; this is {torch.__version__}."
    yield from _half_problems(config, "FSDP2")


def _deepspeed_problems(config: TrainingStage, settings: Any) -> Iterator[str]:
    stage = settings["zero_optimization"].get("stage")
    if stage != 2:
        yield (
            f"deepspeed_config.zero_stage: got {stage}; only 2 is supported. Use 2, or FSDP2 to "
            "shard the base."
        )
    for half in ("bf16", "fp16"):
        if settings.get(half, {}).get("enabled"):
            yield (
                f"DeepSpeed's {half}.enabled would cast the adapters to {half}. Set it to false, "
                "and say model.dtype: bfloat16."
            )
    offload = settings["zero_optimization"].get("offload_optimizer", {}).get("device")
    if offload not in (None, "none"):
        yield (
            f"deepspeed_config.offload_optimizer_device: got {offload!r}, which is not supported "
            "(an adapter's state is small). Set it to none."
        )
    if config.optimizer.name != "adamw":
        yield f"optimizer.name: {config.optimizer.name!r} does not go with DeepSpeed. Use 'adamw'."
    yield from _half_problems(config, "DeepSpeed")


def _half_problems(config: TrainingStage, name: str) -> Iterator[str]:
    if config.model.dtype == "float16":
        yield f"model.dtype: 'float16' does not go with {name}. Use another dtype, or DDP."


def of(accelerator: Accelerator) -> Parallel:
    """The strategy of an accelerator."""
    kinds = {DistributedType.FSDP: Fsdp2, DistributedType.DEEPSPEED: Zero2}
    return kinds.get(accelerator.distributed_type, Parallel)(accelerator)


class Parallel:
    """One process, or DDP: every process holds the whole model, and gradients are averaged in the
    backward pass of an optimizer step's last micro-batch.

    lockstep: processes must go through equally many micro-batches.
    """

    lockstep = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def prepare(
        self, config: TrainingStage, backbone: Backbone, optimizer: torch.optim.Optimizer
    ) -> Any:
        """Wrap the backbone's transformer; returns accelerate's optimizer."""
        model, optimizer = self.accelerator.prepare(backbone.core, optimizer)
        backbone.transformer = model
        if isinstance(model, DistributedDataParallel):
            # the base's buffers are constants, and their broadcast, at the forward after a
            # reduction, would meet other collectives where processes differ in micro-batches
            model.broadcast_buffers = False
        return optimizer

    def most(self, count: int) -> int:
        """The micro-batches of this process's next optimizer step, which wants `count`."""
        return max(gather_object([count])) if self.lockstep else count

    def learning(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward pass of a micro-batch."""
        return nullcontext() if last else self.accelerator.no_sync(model)

    @contextmanager
    def aside(self, backbone: Backbone) -> Iterator[None]:
        """Around torch.autograd.grad: inside, a gradient is this process's own affair. It goes past
        the wrapper, which in DDP takes every forward pass for one of all processes."""
        wrapped, backbone.transformer = backbone.transformer, backbone.core
        try:
            yield
        finally:
            backbone.transformer = wrapped

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the gradients those of all processes, where the backward pass has not."""

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole optimizer's state_dict, the same on every process; all must ask for it."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Put back what `optimizer_state` gave, after the parameters have been put back."""
        _check_groups(state, optimizer.optimizer)
        optimizer.load_state_dict(state)


class Fsdp2(Parallel):
    """torch's fully_shard of the frozen base; a forward pass of one process is one of all.

    The adapters are left out of it: sharded, they would be DTensors in groups of mixed dtype (bf16
    base, float32 adapter), all for 1 % of the weights. Their gradients are averaged as DDP would.
    """

    lockstep = True

    def prepare(
        self, config: TrainingStage, backbone: Backbone, optimizer: torch.optim.Optimizer
    ) -> Any:
        """As everywhere, without accelerate's cast of inputs and weights under FSDP2: it would
        round the timesteps to bf16."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = _plugins(self.accelerator).fsdp_plugin
        plugin.ignored_modules = ADAPTERS
        plugin.mixed_precision_policy = MixedPrecisionPolicy()
        backbone.sharded = True
        return super().prepare(config, backbone, optimizer)

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """One reduction of all gradients."""
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        mean: Any = self.accelerator.reduce(flat, "mean")
        for grad, part in zip(grads, mean.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))


class Zero2(Parallel):
    """DeepSpeed ZeRO-2 in float32: the adapter's gradients and optimizer state are sharded.

    Every backward pass reduces, and the last one steps. What is float32 (the adapters) is
    DeepSpeed's master copy too; the base stays in model.dtype, for DeepSpeed is not told of it.
    """

    lockstep = True

    def prepare(
        self, config: TrainingStage, backbone: Backbone, optimizer: torch.optim.Optimizer
    ) -> Any:
        """As everywhere; what DeepSpeed wants to know comes from the config of the run."""
        micro = config.optimizer.micro_batch
        _plugins(self.accelerator).deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": micro,  # a name for its logs: no data goes by it
            "train_batch_size": micro * self.accelerator.num_processes,
            "gradient_accumulation_steps": 1,  # losses come divided
            "gradient_clipping": config.optimizer.max_grad_norm,
        }
        return super().prepare(config, backbone, optimizer)

    @contextmanager
    def learning(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """accelerate's backward asks this flag whether DeepSpeed is to step."""
        self.accelerator.sync_gradients = last
        try:
            yield
        finally:
            self.accelerator.sync_gradients = True

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As of one flat parameter: each process has an equal piece of it. (DeepSpeed's own
        checkpoints are pickles.)"""
        found = copy.copy(optimizer.optimizer.optimizer.state_dict())
        found["state"] = {
            key: {k: self.accelerator.gather(v) if v.dim() else v for k, v in part.items()}
            for key, part in found["state"].items()
        }
        return found

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """The pieces of this process; and the adapter once more, into the master copy."""
        zero = optimizer.optimizer
        _check_groups(state, zero.optimizer)
        zero.refresh_fp32_params()
        (piece,) = (p for group in zero.optimizer.param_groups for p in group["params"])
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        for part in state["state"].values():
            for key, value in part.items():
                if value.dim() and value.numel() != piece.numel() * world:
                    raise ValueError(
                        "the checkpoint's optimizer state is of another number of processes. Under "
                        "DeepSpeed a run is resumed with as many processes as it had."
                    )
                part[key] = value.chunk(world)[rank] if value.dim() else value
        zero.optimizer.load_state_dict(state)


def _check_groups(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of another strategy: DeepSpeed's is of one flat parameter."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if saved != mine:
        raise ValueError(
            f"the checkpoint's optimizer state is of {saved} parameters, this run's of {mine}: a "
            "run that began under DeepSpeed goes on under DeepSpeed, any other under DDP or FSDP2. "
            "Use the accelerate config that it began with."
        )
