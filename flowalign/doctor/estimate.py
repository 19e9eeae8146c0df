"""What a config will hold in memory and compute, before any weight is loaded.

The library's own forward and backward passes run on a model of shapes alone (`meter`), once for
each kind of work of an update; counts of images and steps do the rest. Of one process, in bytes and
floating-point operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowalign.adapters.files import AdapterError, read_lora
from flowalign.backbone import DTYPES, Backbone
from flowalign.config.schema import (
    GrpoStage,
    OpdStage,
    SftStage,
    TeacherConfig,
    TrainingStage,
    routing,
)
from flowalign.doctor.architectures import Architecture, build, find
from flowalign.doctor.meter import DeviceAttention, Meter, measure, rounded, size, size_of
from flowalign.loop import STUDENT
from flowalign.student.opd import chosen
from flowalign.text import BATCH as TEXTS
from flowalign.types import Conditioning, Source

NF4 = 0.5 + 4 / 64  # bytes a weight: four bits, and a float32 scale for each block of 64
DRAWS = 64  # of the states that an update trains, for their mean cost
PROMPTS_OF_BENCHMARK = 512  # where a benchmark has no limit


@dataclass(frozen=True)
class Phase:
    """A kind of work. bytes: held at most while it goes on, beyond what lies there all the time;
    flops: of an update (of the evaluation: of one evaluation)."""

    name: str
    bytes: int
    flops: float


@dataclass(frozen=True)
class Estimate:
    """Of one process: bytes that lie there all the time by what they are, the phases of an update,
    an evaluation (None = there is none), and how often both come."""

    parts: Mapping[str, int]
    phases: list[Phase]
    evaluation: Phase | None
    updates: int
    evaluations: int
    processes: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def resident(self) -> int:
        """Bytes that lie there all the time."""
        return sum(self.parts.values())

    @property
    def worst(self) -> Phase:
        """The phase that holds most."""
        every = [*self.phases, *([self.evaluation] if self.evaluation else [])]
        return max(every, key=lambda phase: phase.bytes)

    @property
    def peak(self) -> int:
        """Bytes at most, as torch.cuda.max_memory_allocated counts them."""
        return self.resident + self.worst.bytes

    @property
    def flops(self) -> float:
        """Of one update."""
        return sum(phase.flops for phase in self.phases)

    def hours(self, rate: float) -> float:
        """Device-hours of the whole run, all processes, at `rate` FLOP/s each; rewards aside."""
        evaluation = self.evaluation.flops if self.evaluation else 0.0
        total = self.updates * self.flops + self.evaluations * evaluation
        return total / rate / 3600 * self.processes


def predict(
    config: TrainingStage,
    *,
    device_type: str = "cuda",
    processes: int = 1,
    ranks: Mapping[str, int] | None = None,
) -> Estimate:
    """The estimate of a training stage.

    ranks: of adapters that are not there yet (an earlier stage of a recipe writes them), by
    folder. LookupError where the shapes of model.id are not known. Not in it: what rewards hold,
    what kernels take for themselves (cuDNN, GEMM scratch), the device's own context.
    """
    shapes = _Shapes(config, find(config.model.id, config.model.revision), device_type, ranks or {})
    work = _Work(config, shapes, processes)
    phases = [work.text(), work.rollout()]
    phases += [work.decode()] if work.decodes else []
    phases += [work.labels()] if isinstance(config, OpdStage) else []
    phases += [work.update()]
    every = config.evaluation.every if config.evaluation else 0
    count = len({*range(0, config.train.updates, every), config.train.updates}) if every else 0
    return Estimate(
        shapes.parts(processes),
        phases,
        work.evaluation() if every else None,
        config.train.updates,
        count,
        processes,
        ["torch.compile is not in the prediction."] if config.model.compile else [],
    )


def rank_of(source: str, ranks: Mapping[str, int], otherwise: int) -> int:
    """The largest rank of an adapter: of its file, else as an earlier stage will write it."""
    if source in ranks:
        return ranks[source]
    try:
        weights, _ = read_lora(source)
    except (AdapterError, OSError):  # it is not here, and the Hub cannot be asked
        return otherwise
    return max(min(weight.shape) for weight in weights.values())


class _Shapes:
    """The model of a config on the meta device, with every adapter of the stage."""

    def __init__(
        self, config: TrainingStage, found: Architecture, device_type: str, ranks: Mapping[str, int]
    ) -> None:
        self.config, self.device_type = config, device_type
        model, self.dtype = config.model, DTYPES[config.model.dtype]
        with torch.device("meta"):
            pipe = build(found, self.dtype)
            nn.Module.to(pipe.vae, DTYPES[model.vae_dtype])
            if model.quantization == "fp8":
                kinds = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": self.dtype}
                pipe.transformer.enable_layerwise_casting(**kinds)
            parts = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
            self.encoders = [part for part in parts if part is not None]
            self.base = size_of(pipe.transformer)
            here = {"text_cache": None, "offload_text_encoders": False}  # shapes have no values
            self.backbone = Backbone.of(pipe, model.model_copy(update=here), "meta")
            self.student, self.teachers, self.anchor = self._adapters(ranks)
        if model.quantization == "nf4":
            weights = [layer.weight for layer in self._linear(pipe.transformer)]
            self.base += round(sum(w.numel() for w in weights) * NF4) - size(weights)
        if model.gradient_checkpointing:
            self.backbone.core.enable_gradient_checkpointing(self._checkpoint)

    def _adapters(
        self, ranks: Mapping[str, int]
    ) -> tuple[list[nn.Parameter], dict[str, Source], Source | None]:
        """The student's parameters, and who labels: the teachers and the anchor."""
        config, lora, backbone = self.config, self.config.lora, self.backbone
        rank = rank_of(lora.init, ranks, lora.rank) if lora.init else lora.rank
        backbone.add_adapter(STUDENT, rank=rank, alpha=lora.alpha, targets=lora.targets)
        members = dict(config.teachers) if isinstance(config, OpdStage | SftStage) else {}
        anchor = config.anchor if isinstance(config, OpdStage) else None

        def source(name: str, member: TeacherConfig) -> Source:
            if member.adapter is None:
                return Source(None, config.guidance_of(member))
            own = rank_of(member.adapter, ranks, lora.rank)
            backbone.add_adapter(name, rank=own, alpha=1.0, targets=lora.targets)
            for parameter in backbone.adapter_parameters(name):
                parameter.data = parameter.data.to(self.dtype)  # as frozen ones are loaded
            return Source(name, config.guidance_of(member))

        taught = {name: source(f"teacher_{name}", member) for name, member in members.items()}
        anchored = source("teacher_anchor_of_all", anchor) if anchor else None
        backbone.activate(STUDENT)
        return backbone.adapter_parameters(STUDENT), taught, anchored

    def parts(self, processes: int) -> dict[str, int]:
        """What lies there all the time."""
        config, lora = self.config, size(self.student)
        moments = 0.26 if config.optimizer.name == "adamw8bit" else 1  # blockwise scales
        sources = [*self.teachers.values(), *([self.anchor] if self.anchor else [])]
        taught = [source.adapter for source in sources if source.adapter]
        encoders = 0 if config.model.offload_text_encoders else size_of(*self.encoders)
        found = {
            f"transformer ({config.model.quantization or config.model.dtype})": self.base,
            f"VAE ({config.model.vae_dtype})": size_of(self.backbone.pipe.vae),
            f"text encoders ({config.model.dtype})": encoders,
            "student's LoRA (float32)": lora,
            "its Adam moments": round(2 * lora * moments),
            "its moving average": lora if config.ema else 0,
            f"LoRAs of {len(taught)} teachers": sum(
                size(self.backbone.adapter_parameters(n)) for n in taught
            ),
            "gradient buckets of DDP": lora if processes > 1 else 0,
        }
        return {name: count for name, count in found.items() if count}

    def measure(self, call: Callable[[], object]) -> Meter:
        """What `call` holds and computes on the device that is predicted for."""
        return measure(call, self.device_type)

    def conditioning(self, rows: int) -> Conditioning:
        """Of as many images, each with a prompt of its own."""
        config, dtype = self.backbone.core.config, self.dtype
        length = self.config.model.max_sequence_length + _clip_length(self.encoders)

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, device="meta", dtype=dtype)

        wide, pooled = config.joint_attention_dim, config.pooled_projection_dim
        index = torch.empty(rows, device="meta", dtype=torch.long)
        return Conditioning(
            empty(rows, length, wide), empty(rows, pooled), index,
            empty(1, length, wide), empty(1, pooled),
        )  # fmt: skip

    def latents(self, rows: int) -> Tensor:
        """As many latents [rows,C,h,w], float32."""
        return torch.empty(rows, *self.backbone.latent_shape, device="meta")

    def _checkpoint(self, module: Any, *args: Any) -> Any:
        """Recomputation happens inside the backward pass, which modes of PyTorch do not reach."""

        def run(*again: Any) -> Any:
            with DeviceAttention(self.device_type):
                return module(*again)

        return checkpoint(run, *args, use_reentrant=False)

    @staticmethod
    def _linear(module: nn.Module) -> list[nn.Linear]:
        """The base's linear layers, without the adapters' own."""
        return [
            layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and ".lora_" not in name
        ]


class _Work:
    """The phases of a run: what one pass of each holds, and how many rows go through it."""

    def __init__(self, config: TrainingStage, shapes: _Shapes, processes: int) -> None:
        self.config, self.shapes, self.backbone = config, shapes, shapes.backbone
        rollout = config.rollout
        self.images = max(1, rollout.prompts * rollout.copies // processes)
        self.prompts = math.ceil(self.images / rollout.copies)
        self.processes = processes
        rewarded = isinstance(config, OpdStage) and config.student.reward_weight > 0
        self.decodes = isinstance(config, GrpoStage) or rewarded
        self.acts = self.decodes or (
            isinstance(config, OpdStage) and config.student.gradient != "pathwise"
        )
        self.states, self.forwards = self._steps()
        self.latent = rounded(4 * math.prod(self.backbone.latent_shape))
        self.pixels = 4 * 3 * config.model.height * config.model.width
        self.drift = 0  # FLOPs of a micro-batch of the base, whose distance grpo measures

    def _steps(self) -> tuple[int, float]:
        """Trained states of an image, and forward passes of its rollout (their mean)."""
        config, window = self.config, list(range(*self.config.rollout.trained))
        if isinstance(config, SftStage):
            return config.sft.states, config.rollout.steps
        if not isinstance(config, OpdStage):
            return len(window), config.rollout.steps
        draws = [chosen(config.student.states, window, (config.seed, u)) for u in range(DRAWS)]
        last = sum(draw[-1] + self.acts for draw in draws) / DRAWS
        return len(draws[0]), config.rollout.steps if self.decodes else last

    # What an update leaves in memory while it goes on ------------------------------------------

    @property
    def stored(self) -> int:
        """The rollout: states, their successors, the last latents, images and text."""
        states = self.states * (2 if self.acts else 1)
        ends = 1 if self.decodes or isinstance(self.config, SftStage) else 0
        pixels = self.pixels if self.decodes else 0
        return self.images * ((states + ends) * self.latent + pixels) + self.text_bytes

    @property
    def text_bytes(self) -> int:
        cond = self.shapes.conditioning(1)
        return (self.prompts + 1) * size([cond.embeds, cond.pooled])

    @property
    def label_bytes(self) -> int:
        """Labels of teachers and anchor, as they are kept from rollout to rollout."""
        if isinstance(self.config, SftStage):
            return self.images * self.states * self.latent
        if not isinstance(self.config, OpdStage):
            return 0
        each = 2 if self.config.student.label_dtype == "bfloat16" else 4
        fields = 2 if self.config.anchor else 1
        return self.images * self.states * self.latent * each // 4 * fields

    # The phases --------------------------------------------------------------------------------

    def text(self, prompts: int | None = None) -> Phase:
        """The prompts of an update (with a cache one by one)."""
        model, rows = self.config.model, prompts or self.prompts
        batch = 1 if model.text_cache else min(rows, TEXTS)

        def encode() -> None:
            for encoder, length in zip(self.shapes.encoders, self._lengths(), strict=True):
                ids = torch.empty(batch, length, dtype=torch.long, device="meta")
                with torch.no_grad():
                    encoder(ids, output_hidden_states=True)

        found = self.shapes.measure(encode)
        visiting = size_of(*self.shapes.encoders) if model.offload_text_encoders else 0
        flops = found.flops / batch * rows * (0 if model.text_cache else 1)
        return Phase("text", self.text_bytes + visiting + found.peak, flops)

    def _lengths(self) -> list[int]:
        clip, model = _clip_length(self.shapes.encoders), self.config.model
        return [clip, clip, model.max_sequence_length][: len(self.shapes.encoders)]

    def rollout(self) -> Phase:
        """Forward passes without gradient; the stored states are copied once at the end."""
        rollout = self.config.rollout
        batch = min(rollout.batch_size, self.images)
        if isinstance(self.config, SftStage):
            found = self._taught(batch)
        else:
            found = self._forward(batch, rollout.guidance)
        states = self.images * self.states * (2 if self.acts else 1) * self.latent
        noise = batch * (1 + self.states) * self.latent
        held = self.stored + max(found.peak + noise, states)
        return Phase("rollout", held, found.flops / batch * self.images * self.forwards)

    def decode(self) -> Phase:
        """The VAE on a batch, while all images of the rollout are kept."""
        batch = min(self.config.rollout.batch_size, self.images)
        found = self._decode(batch)
        held = self.stored + max(found.peak - batch * self.pixels, self.images * self.pixels)
        return Phase("VAE decode", held, found.flops / batch * self.images)

    def labels(self) -> Phase:
        """Each pair by its teacher, and by the anchor."""
        config, anchor = self.config, self.shapes.anchor
        assert isinstance(config, OpdStage)
        pairs = self.images * self.states
        batch = min(config.student.label_batch, pairs)
        found = [self._taught(batch)]
        if anchor:
            found.append(self._forward(batch, anchor.guidance, anchor.adapter))
        flops = sum(each.flops for each in found) / batch * pairs
        held = self.stored + self.label_bytes + max(each.peak for each in found)
        return Phase("labels", held, flops)

    def update(self) -> Phase:
        """Forward and backward pass of a micro-batch, and the optimizer's step."""
        config, lora = self.config, size(self.shapes.student)
        pairs = self.images * self.states
        batch = min(config.optimizer.micro_batch, pairs // config.optimizer.updates_per_rollout)
        x, cond = self.shapes.latents(batch), self.shapes.conditioning(batch)
        found = self.shapes.measure(partial(self._learn, x, cond))
        tasks = len(config.tasks) if isinstance(config, OpdStage) else 1
        cosines = (tasks - 1) * lora  # the tasks' gradients, side by side
        step = 3 * lora if self.shapes.device_type == "cuda" else lora  # gradients, and torch's
        held = self.stored + self.label_bytes + max(found.peak + cosines, step)  # foreach copies
        kept = isinstance(config, GrpoStage | OpdStage) and config.grpo.kl_weight > 0
        flops = found.flops - (0 if kept else self.drift)
        return Phase("update", held, flops / batch * pairs)

    def evaluation(self) -> Phase:
        """Sampling and decoding held-out prompts, by Euler steps."""
        e, rollout = self.config.evaluation, self.config.rollout
        assert e
        batch = e.batch_size or rollout.batch_size
        found = self._forward(batch, rollout.guidance if e.guidance is None else e.guidance)
        decoded = self._decode(batch)
        watched = sum((m.limit or PROMPTS_OF_BENCHMARK) * m.images for m in e.watch)
        images = (e.prompts * len(self.config.tasks) + watched) / self.processes
        flops = (found.flops * (e.steps or rollout.steps) + decoded.flops) / batch * images
        text = size([self.shapes.conditioning(batch + 1).embeds])
        noise = batch * self.latent
        held = self.label_bytes + text + max(found.peak, decoded.peak) + noise
        return Phase("evaluation", held, flops)

    # One pass ----------------------------------------------------------------------------------

    # What goes in is part of the stored rollout, and made before it is measured.

    def _taught(self, batch: int) -> Meter:
        """A batch of the teacher that holds most; its operations are the mean of all tasks'."""
        config, every = self.config, self.shapes.teachers
        assert isinstance(config, OpdStage | SftStage)
        found = {name: self._forward(batch, of.guidance, of.adapter) for name, of in every.items()}
        worst = max(found.values(), key=lambda each: each.peak)
        routed, total = routing(config), sum(task.weight for task in config.tasks)
        weighted = (found[routed[task.name]].flops * task.weight for task in config.tasks)
        worst.flops = round(sum(weighted) / total)
        return worst

    def _forward(self, batch: int, guidance: float, adapter: str | None = STUDENT) -> Meter:
        x, cond = self.shapes.latents(batch), self.shapes.conditioning(batch)

        def forward() -> None:
            with torch.no_grad(), self.backbone.adapter(adapter):
                self.backbone.velocity(x, 0.5, cond, guidance=guidance)

        return self.shapes.measure(forward)

    def _decode(self, batch: int) -> Meter:
        latents = self.shapes.latents(batch)
        return self.shapes.measure(lambda: self.backbone.decode(latents, batch))

    def _learn(self, target: Tensor, cond: Conditioning) -> None:
        """A micro-batch: the student, the base where a KL to it is taken, and the gradients."""
        config, backbone = self.config, self.backbone
        guidance = config.guidance
        velocity = backbone.velocity(target, 0.5, cond, guidance=guidance)
        if self.decodes:  # at least on one micro-batch
            with torch.no_grad(), backbone.base(), Meter() as reference:
                target = backbone.velocity(target, 0.5, cond, guidance=guidance)
            self.drift = reference.flops
        ((velocity - target) ** 2).mean().backward()
        for parameter in self.shapes.student:
            parameter.grad = None


def _clip_length(encoders: list[Any]) -> int:
    """Tokens of a CLIP text encoder."""
    return encoders[0].config.max_position_embeddings
