"""Memory and FLOPs of a run, predicted before any weight is loaded.

The library's own forward and backward passes run on a model without data (`meter`), once for each
phase of an update. Counts of images and steps give the rest. All numbers are of one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowalign.backbone import DTYPES
from flowalign.backbone.adapters import AdapterError, read_lora
from flowalign.backbone.structure import without_data
from flowalign.backbone.text import BATCH as TEXT_BATCH
from flowalign.commands.doctor.meter import DeviceAttention, Meter, measure, rounded, size, size_of
from flowalign.config import BenchmarkConfig, EvalStage, SamplingConfig, TrainingStage, parse
from flowalign.config.learning import RewardConfig
from flowalign.config.model import LoraConfig
from flowalign.training.algorithm import STUDENT, algorithm_class
from flowalign.training.data import PromptError, load_prompts
from flowalign.training.report.drift.monitor import checked
from flowalign.training.solvers import forwards
from flowalign.types import Conditioning, Source

NF4 = 0.5 + 4 / 64  # bytes a weight: four bits, and a float32 scale for each block of 64
ADAM_8BIT = 0.26  # of the bytes of float32 moments: one byte each, and blockwise scales
DRAWS = 64  # updates whose drawn states are averaged
BENCHMARK_PROMPTS = 512  # assumed where a benchmark has no limit and its file is not here
SIXTEEN = 2  # bytes a weight of the files on the Hub


@dataclass(frozen=True)
class Phase:
    """A kind of work of an update, or an evaluation."""

    name: str
    bytes: int  # its peak beyond the resident bytes
    flops: float  # floating-point operations of one update, or of one evaluation


@dataclass(frozen=True)
class Estimate:
    """The prediction of one process, and what it was predicted for. An evaluation (`stage: eval`)
    has no updates and one evaluation."""

    config: TrainingStage | EvalStage
    device_type: str
    processes: int
    ranks: Mapping[str, int]
    parts: Mapping[str, int]  # resident bytes by what they are
    phases: list[Phase]  # of an update
    evaluation: Phase | None  # None = the run has none
    host: int  # bytes of CPU memory while the model loads
    download: int  # bytes of the model's files, if the Hub has them in 16 bits

    @property
    def all_phases(self) -> list[Phase]:
        """The phases of an update, and the evaluation."""
        return [*self.phases, *([self.evaluation] if self.evaluation else [])]

    @property
    def resident(self) -> int:
        """Bytes that stay allocated through all phases."""
        return sum(self.parts.values())

    @property
    def worst(self) -> Phase:
        """The phase with the highest peak."""
        return max(self.all_phases, key=lambda phase: phase.bytes)

    @property
    def peak(self) -> int:
        """Peak bytes, as torch.cuda.max_memory_allocated counts them."""
        return self.resident + self.worst.bytes

    @property
    def flops(self) -> float:
        """Of one update."""
        return sum(phase.flops for phase in self.phases)

    @property
    def updates(self) -> int:
        """Rollouts of the run."""
        return self.config.train.updates if isinstance(self.config, TrainingStage) else 0

    @property
    def evaluations(self) -> int:
        """How often a run evaluates: before the first update, at intervals, and after the last."""
        if isinstance(self.config, EvalStage):
            return 1
        evaluation = self.config.evaluation
        if evaluation is None or not self.config.evaluates:
            return 0
        return len(range(0, self.updates, evaluation.every)) + 1

    def after(self, change: str) -> Estimate:
        """The prediction after a change of the config, "key.path=value"."""
        config = parse(self.config.model_dump(mode="json"), [change], stage=type(self.config))
        return predict(
            config, device_type=self.device_type, processes=self.processes, ranks=self.ranks
        )


def predict(
    config: TrainingStage | EvalStage,
    *,
    device_type: str = "cuda",
    processes: int = 1,
    ranks: Mapping[str, int] | None = None,
    drawn: Sequence[int] | None = None,
) -> Estimate:
    """The estimate of a training stage or an evaluation.

    ranks: {folder: rank} of adapters that an earlier stage of a recipe will write. drawn: the
    updates whose drawn states are averaged; None = the first DRAWS. Raises LookupError where the
    shapes of model.id are not known. Of several sizes the largest counts, for all images. Not
    included: torch.compile, and the memory of rewards, of
    kernels (cuDNN, GEMM workspaces) and of the device's context.
    """
    ranks = ranks or {}
    if isinstance(config, EvalStage):
        evaluation = _Evaluation(config, device_type, processes, ranks)
        return Estimate(
            config, device_type, processes, ranks, evaluation.parts(), [], evaluation.phase(),
            evaluation.host, evaluation.download,
        )  # fmt: skip
    run = _Run(config, device_type, processes, ranks, drawn)
    phases = [run.text(), run.rollout()]
    if run.keeps.images:
        phases.append(run.decode())
    if run.keeps.labels:
        phases.append(run.labels())
    if run.keeps.noise_levels:
        phases.append(run.noising())
    if config.alarm and run.keeps.images:
        phases.append(run.drift())
    phases.append(run.update())
    validation = run.evaluation() if config.evaluates else None
    return Estimate(
        config, device_type, processes, ranks, run.parts(), phases, validation,
        run.host, run.download,
    )  # fmt: skip


def scored(config: TrainingStage | EvalStage) -> dict[str, tuple[list[RewardConfig], float]]:
    """{task or benchmark: its rewards, and how many images of an evaluation each scores}, over all
    models and processes."""
    if isinstance(config, EvalStage):
        benchmarks, models = config.benchmarks, len(config.models)
    else:
        benchmarks, models = config.watched, 1
    images = {
        b.name: (list(b.reward_keys.values()), float(models * _prompts(b) * b.images))
        for b in benchmarks
    }
    if isinstance(config, TrainingStage) and config.evaluation:
        for task in config.tasks:
            if task.evaluated and task.reward and task.validation:
                count = _length(task.validation, config.evaluation.prompts)
                images[task.name] = ([task.reward], float(min(count, config.evaluation.prompts)))
    return images


def _prompts(benchmark: BenchmarkConfig) -> int:
    count = _length(benchmark.prompts, benchmark.limit or BENCHMARK_PROMPTS)
    return min(count, benchmark.limit or count)


def _length(source: str, assumed: int) -> int:
    """Prompts of a set; `assumed` where it is not here."""
    with suppress(PromptError, OSError):
        return len(load_prompts(source, ""))
    return assumed


def rank_of(source: str | None, ranks: Mapping[str, int], default: int) -> int:
    """The largest rank of an adapter: from `ranks`, else from its file, else `default`."""
    if source is None:
        return default
    if source in ranks:
        return ranks[source]
    try:
        return max(read_lora(source).ranks.values())
    except (AdapterError, OSError):  # it is not here, and the Hub cannot be asked
        return default


class _Shapes:
    """The model of a stage on the meta device, and its single passes. Their inputs are made before
    they are measured."""

    def __init__(self, config: TrainingStage | EvalStage, device_type: str, processes: int) -> None:
        self.device_type, self.processes = device_type, processes
        self.model, model, self.dtype = config.model, config.model, DTYPES[config.model.dtype]
        with torch.device("meta"):
            self.backbone = without_data(model)
            pipe = self.backbone.pipe
            if model.quantization == "fp8":
                kinds = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": self.dtype}
                pipe.transformer.enable_layerwise_casting(**kinds)
            self.encoders = self.backbone.family.encoders
            self.base = size_of(pipe.transformer)
            whole = (pipe.transformer, pipe.vae, *self.encoders)
            self.host = size_of(*whole)
            self.download = SIXTEEN * sum(p.numel() for part in whole for p in part.parameters())
        sizes = [height * width for height, width in model.image_sizes]
        largest = sizes.index(max(sizes))
        self.latent_shape = self.backbone.latent_shapes[largest]
        self.latent = rounded(4 * math.prod(self.latent_shape))  # bytes, float32
        self.pixels = 4 * 3 * sizes[largest]  # bytes of an image, float32

    def shrink(self) -> None:
        """Count the frozen base as nf4 stores it, if it does; called after the adapters."""
        if self.model.quantization == "nf4":
            weights = [
                layer.weight
                for name, layer in self.backbone.core.named_modules()
                if isinstance(layer, nn.Linear) and ".lora_" not in name
            ]
            self.base += round(sum(w.numel() for w in weights) * NF4) - size(weights)

    def frozen(
        self, name: str, rank: int, alpha: float, targets: list[str] | None
    ) -> list[nn.Parameter]:
        """Add a frozen adapter, as a run loads it."""
        with torch.device("meta"):
            self.backbone.add_adapter(name, rank=rank, alpha=alpha, targets=targets)
        parameters = self.backbone.adapter_parameters(name)
        for parameter in parameters:
            parameter.data = parameter.data.to(self.dtype)
        return parameters

    def base_parts(self) -> dict[str, int]:
        """Resident bytes of the model itself."""
        model = self.model
        encoders = 0 if model.offload_text_encoders else size_of(*self.encoders)
        return {
            f"transformer ({model.quantization or model.dtype})": self.base,
            f"VAE ({model.vae_dtype})": size_of(self.backbone.pipe.vae),
            f"text encoders ({model.dtype})": encoders,
        }

    def encoded(self, batch: int) -> Meter:
        """The text encoders on `batch` prompts."""
        lengths = self.backbone.family.encoder_tokens(self.model.max_sequence_length)

        def encode() -> None:
            for encoder, length in zip(self.encoders, lengths, strict=True):
                ids = torch.empty(batch, length, dtype=torch.long, device="meta")
                with torch.no_grad():
                    encoder(ids, output_hidden_states=True)

        return measure(encode, self.device_type)

    def sampled(self, sampling: SamplingConfig, images: float, adapter: str | None) -> Phase:
        """Sample held-out prompts by Euler steps, and decode them. images: of all processes. Their
        prompts are encoded, once an image."""
        batch = sampling.batch_size
        forward = self._forward(batch, Source(adapter, sampling.guidance))
        decoded, encoded = self._decode(batch), self.encoded(1)
        flops = forward.flops * sampling.steps + decoded.flops + encoded.flops * batch
        text = size(list(self._conditioning(batch + 1).text.values()))
        noise = batch * self.latent
        peak = text + max(forward.peak, decoded.peak) + noise
        return Phase("evaluation", peak, flops / batch * (images / self.processes))

    def _forward(self, batch: int, source: Source) -> Meter:
        x, cond = self._latents(batch), self._conditioning(batch)

        def forward() -> None:
            with torch.no_grad(), self.backbone.adapter(source.adapter):
                self.backbone.velocity(x, 0.5, cond, guidance=source.guidance)

        return measure(forward, self.device_type)

    def _decode(self, batch: int) -> Meter:
        latents = self._latents(batch)
        return measure(lambda: self.backbone.decode(latents, batch), self.device_type)

    def _latents(self, rows: int) -> Tensor:  # [rows,C,h,w], float32
        return torch.empty(rows, *self.latent_shape, device="meta")

    def _conditioning(self, rows: int) -> Conditioning:  # each row has its own prompt
        shapes = self.backbone.family.text_shapes(self.model.max_sequence_length)

        def text(count: int) -> dict[str, Tensor]:
            return {
                name: torch.empty(count, *shape, device="meta", dtype=self.dtype)
                for name, shape in shapes.items()
            }

        index = torch.empty(rows, device="meta", dtype=torch.long)
        return Conditioning(text(rows), index, text(1))


class _Evaluation(_Shapes):
    """An evaluation: the base with the adapters of all models, and the images of all of them."""

    def __init__(
        self, config: EvalStage, device_type: str, processes: int, ranks: Mapping[str, int]
    ) -> None:
        super().__init__(config, device_type, processes)
        self.config, self.loras = config, []
        self.adapters = {n: f"eval_{n}" for n, folder in config.models.items() if folder}
        for name, adapter in self.adapters.items():
            rank = rank_of(config.models[name], ranks, LoraConfig().rank)
            self.loras += self.frozen(adapter, rank, 1.0, None)
        self.shrink()

    def parts(self) -> dict[str, int]:
        """Resident bytes by what they are."""
        loras = {f"LoRAs of {len(self.adapters)} models": size(self.loras)}
        return {name: count for name, count in (self.base_parts() | loras).items() if count}

    def phase(self) -> Phase:
        """All images of all models; the peak is that of a model with an adapter."""
        images = sum(count for _, count in scored(self.config).values())
        adapter = next(iter(self.adapters.values()), None)
        visiting = size_of(*self.encoders) if self.model.offload_text_encoders else 0
        phase = self.sampled(self.config.sampling, images, adapter)
        return Phase(phase.name, max(phase.bytes, visiting), phase.flops)


class _Run(_Shapes):
    """A training stage: the model with all adapters, and the phases of an update."""

    def __init__(
        self,
        config: TrainingStage,
        device_type: str,
        processes: int,
        ranks: Mapping[str, int],
        drawn: Sequence[int] | None,
    ) -> None:
        super().__init__(config, device_type, processes)
        self.config, self.algorithm = config, algorithm_class(config)
        self.keeps = self.algorithm.keeps(config, drawn)
        with torch.device("meta"):
            self._add_adapters(ranks)
        self.shrink()
        if config.model.gradient_checkpointing:
            self.backbone.core.enable_gradient_checkpointing(self._checkpoint)
        self.images = max(1, config.rollout.images // processes)
        self.prompts = math.ceil(self.images / config.rollout.copies)
        self.states, self.forwards = self._steps(range(DRAWS) if drawn is None else drawn)
        self.pairs = self.images * self.states  # (image, step) that are trained

    def _add_adapters(self, ranks: Mapping[str, int]) -> None:
        """The student's adapter, and those of its teachers and anchor, as a run loads them."""
        config, lora, backbone = self.config, self.config.lora, self.backbone
        rank = rank_of(lora.init, ranks, lora.rank)
        backbone.add_adapter(STUDENT, rank=rank, alpha=lora.alpha, targets=lora.targets)
        self.student = backbone.adapter_parameters(STUDENT)
        self.teachers: list[nn.Parameter] = []
        self.sources: dict[str, Source] = {}  # who labels, by its place in the config
        for place, teacher in config.labellers.items():
            name = None
            if teacher.adapter is not None:
                name = place.replace(".", "_")  # torch forbids dots in a module's name
                rank = rank_of(teacher.adapter, ranks, lora.rank)
                self.teachers += self.frozen(name, rank, 1.0, lora.targets)
            self.sources[place] = Source(name, config.guidance_of(teacher))
        backbone.activate(STUDENT)

    def _checkpoint(self, module: Any, *args: Any) -> Any:
        """Gradient checkpointing, as diffusers calls it."""

        def run(*again: Any) -> Any:
            # the modes of `measure` do not reach into the backward pass, where this runs again
            with DeviceAttention(self.device_type):
                return module(*again)

        return checkpoint(run, *args, use_reentrant=False)

    def _steps(self, updates: Sequence[int]) -> tuple[int, float]:
        """Trained states of an image, and the mean number of forward passes of its rollout over
        these updates."""
        config, rollout = self.config, self.config.rollout
        passes = forwards(rollout.solver, rollout.steps)
        if self.keeps.noise_levels:
            return self.keeps.noise_levels, passes
        trained = [self.algorithm.trained_steps(config, update) for update in updates]
        if self.keeps.latents:  # the rollout runs to its end
            return len(trained[0]), passes
        taken = [steps[-1] + self.keeps.actions for steps in trained]
        total = sum(forwards(rollout.solver, rollout.steps, count) for count in taken)
        return len(trained[0]), total / len(trained)

    # Memory ------------------------------------------------------------------------------------

    def parts(self) -> dict[str, int]:  # resident bytes by what they are
        lora = size(self.student)
        trained = size(p for p in self.student if p.requires_grad)
        moments = ADAM_8BIT if self.config.optimizer.name == "adamw8bit" else 1
        adapters = sum(source.adapter is not None for source in self.sources.values())
        parts = self.base_parts() | {
            "student's LoRA (float32)": lora,
            "its Adam moments": round(2 * trained * moments),
            "its moving average": lora if self.config.ema else 0,
            f"LoRAs of {adapters} teachers": size(self.teachers),
            f"LoRAs of {len(self.keeps.policies)} policies": len(self.keeps.policies) * lora,
            "gradient buckets of DDP": lora if self.processes > 1 else 0,
        }
        return {name: count for name, count in parts.items() if count}

    @property
    def stored_states(self) -> int:  # bytes of trained states; where needed, what came after them
        return self.pairs * (1 + self.keeps.actions + self.keeps.means) * self.latent

    @property
    def stored_text(self) -> int:  # bytes of the embeddings of all prompts and of the empty one
        return (self.prompts + 1) * size(list(self._conditioning(1).text.values()))

    @property
    def stored(self) -> int:  # bytes of a rollout: states, last latents, images and text
        image = self.keeps.latents * self.latent + self.keeps.images * self.pixels
        return self.stored_states + self.images * image + self.stored_text

    @property
    def stored_rollout(self) -> int:  # of these, bytes that are there before images are noised
        return self.stored - (self.stored_states if self.keeps.noise_levels else 0)

    @property
    def stored_labels(self) -> int:  # bytes of labels, or of the velocities that are matched
        widths = [2 if dtype == "bfloat16" else 4 for dtype in self.keeps.targets]
        return self.pairs * self.latent * sum(widths) // 4

    # Phases ------------------------------------------------------------------------------------

    def text(self) -> Phase:
        """Encode the prompts. With a cache they are encoded once, one by one: its FLOPs are 0."""
        model = self.config.model
        batch = 1 if model.text_cache else min(self.prompts, TEXT_BATCH)
        meter = self.encoded(batch)
        visiting = size_of(*self.encoders) if model.offload_text_encoders else 0
        flops = 0.0 if model.text_cache else meter.flops / batch * self.prompts
        return Phase("text", self.stored_text + visiting + meter.peak, flops)

    def rollout(self) -> Phase:
        """Sample trajectories without gradient. Stored states are copied once, at the end."""
        rollout = self.config.rollout
        batch = min(rollout.batch_size, self.images)
        if self.keeps.taught_images:
            meter = self._teachers_forward(batch)
        else:
            meter = self._forward(batch, Source(STUDENT, rollout.guidance))
        kept = self.stored_states if self.stored_rollout == self.stored else 0
        noise = batch * (1 + (self.states if kept else 0)) * self.latent
        peak = self.stored_rollout + max(meter.peak + noise, kept)
        return Phase("rollout", peak, meter.flops / batch * self.images * self.forwards)

    def decode(self) -> Phase:  # with the VAE, beside all images of the rollout
        batch = min(self.config.rollout.batch_size, self.images)
        meter = self._decode(batch)
        peak = max(meter.peak - batch * self.pixels, self.images * self.pixels)
        peak += self.stored_rollout
        return Phase("VAE decode", peak, meter.flops / batch * self.images)

    def noising(self) -> Phase:  # clean images -> states and velocities, all at once
        copies = 3 if self.device_type == "cpu" else 2  # the noise, which is drawn there; states
        peak = self.stored_rollout + (copies * self.pairs + 3 * self.images) * self.latent
        return Phase("noising", peak, 0.0)

    def labels(self) -> Phase:  # each pair by its teacher, and by the anchor
        batch = min(self.config.batch_sizes["student.label_batch"], self.pairs)
        meters = [self._teachers_forward(batch)]
        if "anchor" in self.sources:
            meters.append(self._forward(batch, self.sources["anchor"]))
        flops = sum(meter.flops for meter in meters) / batch * self.pairs
        peak = self.stored + self.stored_labels + max(meter.peak for meter in meters)
        return Phase("labels", peak, flops)

    def drift(self) -> Phase:
        """The base's images for some of the rollout, at every check; FLOPs are those an update."""
        rollout, alarm = self.config.rollout, self.config.alarm
        assert alarm
        images = max(1, math.prod(checked(self.config)) // self.processes)
        batch = min(rollout.batch_size, images)
        forward, decoded = self._forward(batch, Source(None, rollout.guidance)), self._decode(batch)
        passes = forwards(rollout.solver, rollout.steps)
        flops = (forward.flops * passes + decoded.flops) / batch * images / alarm.every
        peak = self.stored + self.stored_labels + max(forward.peak, decoded.peak)
        return Phase("image drift", peak + images * (self.latent + self.pixels), flops)

    def update(self) -> Phase:  # both passes of a micro-batch, and the optimizer's step
        config, backbone, lora = self.config, self.backbone, size(self.student)
        batch = self.pairs // config.optimizer.updates_per_rollout
        batch = min(config.optimizer.micro_batch, batch)
        x, cond = self._latents(batch), self._conditioning(batch)
        others = [(compared, Meter()) for compared in self.keeps.compared]

        def learn() -> None:
            velocity, target = backbone.velocity(x, 0.5, cond, guidance=config.guidance), x
            for compared, meter in others:
                with torch.no_grad(), backbone.adapter(compared.adapter), meter:
                    target = backbone.velocity(x, 0.5, cond, guidance=config.guidance)
            ((velocity - target) ** 2).mean().backward()
            for parameter in self.student:
                parameter.grad = None

        meter = measure(learn, self.device_type)
        tasks = len(config.tasks) if self.keeps.task_gradients else 1
        cosines = (tasks - 1) * lora  # the gradients of all tasks, side by side
        step = 3 * lora if self.device_type == "cuda" else lora  # gradients, and foreach's copies
        peak = self.stored + self.stored_labels + max(meter.peak + cosines, step)
        flops = meter.flops - sum((1 - compared.share) * each.flops for compared, each in others)
        return Phase("update", peak, flops / batch * self.pairs)

    def evaluation(self) -> Phase:  # the held-out prompts of all tasks, and watched benchmarks
        config = self.config
        images = sum(count for _, count in scored(config).values())
        if config.alarm:
            images += sum(task.evaluated for task in config.tasks) * config.alarm.images
        return self.sampled(config.evaluation_sampling, images, STUDENT)

    def _teachers_forward(self, batch: int) -> Meter:
        """A batch of the teacher with the highest peak; its FLOPs are the mean of all tasks'."""
        config = self.config
        meters = {
            place.removeprefix("teachers."): self._forward(batch, source)
            for place, source in self.sources.items()
            if place.startswith("teachers.")
        }
        worst = max(meters.values(), key=lambda meter: meter.peak)
        weighted = (meters[config.routing[t.name]].flops * t.weight for t in config.tasks)
        worst.flops = round(sum(weighted) / sum(task.weight for task in config.tasks))
        return worst
