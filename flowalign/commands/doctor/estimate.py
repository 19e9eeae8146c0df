"""Memory and FLOPs of a run, predicted before any weight is loaded.

The library's own forward and backward passes run on a model without data (`meter`), once for each
phase of an update. What is stored between them follows from what the algorithm keeps
(`Algorithm.keeps`). All numbers are of one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowalign.backbone import DTYPES
from flowalign.backbone.adapters import AdapterError, read_lora
from flowalign.backbone.loading import store_in_fp8
from flowalign.backbone.lora import adapted_layers
from flowalign.backbone.structure import family_without_text, read_family, without_data
from flowalign.backbone.text import BATCH as TEXT_BATCH
from flowalign.commands.doctor.meter import (
    DeviceAttention,
    Pass,
    measure_blocks,
    rounded,
    size,
    size_of,
)
from flowalign.config import Stage, TrainingStage, overlay, parse
from flowalign.config.model import LoraConfig, ModelConfig
from flowalign.training.algorithm import STUDENT, algorithm_class
from flowalign.training.data import PromptError, load_prompts
from flowalign.training.report.drift.monitor import checked
from flowalign.training.solvers import forwards
from flowalign.types import Conditioning, Source

NF4 = 0.5 + 4 / 64  # bytes a weight: four bits, and a float32 scale for each block of 64
ADAM_8BIT = 0.26  # of the bytes of float32 moments: one byte each, and blockwise scales
DRAWS = 64  # updates whose drawn states are averaged
BENCHMARK_PROMPTS = 512  # assumed where a benchmark has no limit and its file is not here
# Keys of `model` that change no shape; fp8 does, and 4 bits are counted by NF4
FREE = {
    "gradient_checkpointing",
    "text_cache",
    "offload_text_encoders",
    "decode_batch",
    "quantization",
}
SIXTEEN = 2  # bytes a weight of the files on the Hub


@dataclass(frozen=True)
class Phase:
    """A kind of work of an update, or an evaluation."""

    name: str
    kind: str  # whose rate it runs at: sampling, labels, learning or alarm
    bytes: int  # its peak beyond the resident bytes
    flops: float  # floating-point operations of one update, or of one evaluation
    sizes: Mapping[str, int] = field(default_factory=dict)  # {key of a batch size: its value}


@dataclass(frozen=True)
class Estimate:
    """The prediction of one process, and what it was predicted for. An evaluation (`stage: eval`)
    has no updates and one evaluation."""

    config: Stage
    device_type: str
    processes: int
    ranks: Mapping[str, Mapping[str, int]]
    parts: Mapping[str, int]  # resident bytes by what they are
    phases: list[Phase]  # of an update
    evaluation: Phase | None  # None = the run has none
    shapes: _Shapes  # what it was measured on

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

    def after(self, change: str | Mapping[str, Any]) -> Estimate:
        """The prediction after a change of the config: "key.path=value", or keys that are laid over
        it. What was measured for this one is not measured again."""
        keys, texts = ({}, [change]) if isinstance(change, str) else (change, [])
        data = overlay(self.config.model_dump(mode="json"), keys)
        config = parse(data, texts, stage=type(self.config))
        return predict(
            config, device_type=self.device_type, processes=self.processes, ranks=self.ranks,
            shapes=self.shapes,
        )  # fmt: skip


def predict(
    config: Stage,
    *,
    device_type: str = "cuda",
    processes: int = 1,
    ranks: Mapping[str, Mapping[str, int]] | None = None,
    drawn: Sequence[int] | None = None,
    shapes: _Shapes | None = None,
) -> Estimate:
    """The estimate of a training stage or an evaluation.

    ranks: {folder: {layer: rank}} of adapters that an earlier stage of a recipe will write. drawn:
    the updates whose drawn states are averaged; None = the first DRAWS. shapes: of a config with
    the same adapters, taken again where the model is the same. Raises LookupError where the shapes
    of model.id are not known. Of several sizes the largest counts, for all images. Not
    included: torch.compile, and the memory of rewards, of kernels (cuDNN, GEMM workspaces) and of
    the device's context.
    """
    ranks = ranks or {}
    again = shapes.after(config) if shapes else None
    if isinstance(config, TrainingStage):
        run = again or _Run(config, device_type, processes, ranks, drawn)
        assert isinstance(run, _Run)
        parts, phases = run.parts(), list(run.phases())
        shapes, evaluation = run, run.evaluation() if config.evaluations else None
    else:  # the base with the adapters of all models; the peak is that of a model with an adapter
        shapes, default = again or _Shapes(config, device_type, processes), LoraConfig()
        loras = [
            shapes.add_frozen(ranks_of(source, default, ranks, config.model))
            for source in config.inputs.values()
        ]
        held = sum(size(shapes.frozen[name]) for name in loras)
        parts, phases = shapes.base_parts() | {f"LoRAs of {len(loras)} models": held}, []
        images = sum(evaluated_images(config).values())
        evaluation = shapes.sampled("sampling.batch_size", images, next(iter(loras), None))
        evaluation = replace(evaluation, bytes=max(evaluation.bytes, shapes.visiting))
    parts = {name: count for name, count in parts.items() if count}
    return Estimate(config, device_type, processes, ranks, parts, phases, evaluation, shapes)


def evaluated_images(config: Stage) -> dict[str, int]:
    """{task or benchmark: images of one evaluation}, of all models and processes."""
    images = {}
    for judged in (judged for judged in config.judged if judged.evaluated):
        *_, held_out = judged.prompts.values()
        count = judged.limit or BENCHMARK_PROMPTS
        with suppress(PromptError, OSError):  # the set is not here
            length = len(load_prompts(held_out, ""))
            count = min(length, judged.limit or length)
        images[judged.name] = count * judged.evaluated
    return images


def ranks_of(
    source: str | None,
    lora: LoraConfig,
    ranks: Mapping[str, Mapping[str, int]],
    model: ModelConfig,
) -> Mapping[str, int]:
    """{layer: rank} of an adapter: from `ranks`, else from its file, else of a fresh one as `lora`
    says. LookupError where the shapes of the model are not known."""
    if source is not None and source in ranks:
        return ranks[source]
    if source is not None:
        with suppress(AdapterError, OSError):  # it is not here, and the Hub cannot be asked
            return read_lora(source, family=partial(read_family, model)).ranks
    family = family_without_text(model.id, model.revision, model.family)
    return dict.fromkeys(adapted_layers(family.core, lora.targets or family.targets), lora.rank)


class _Shapes:
    """The model of a stage on the meta device, and its single passes. Their inputs are made before
    they are measured."""

    here = True  # on the device that is predicted, as all but the base of a teacher

    def __init__(self, config: Stage, device_type: str, processes: int) -> None:
        self.device_type, self.processes = device_type, processes
        self.stage, model, self.dtype = config, config.model, DTYPES[config.model.dtype]
        with torch.device("meta"):
            self.backbone = without_data(model)
            pipe = self.backbone.pipe
            if model.quantization == "fp8":
                store_in_fp8(pipe.transformer, self.dtype)
        self.encoders = self.backbone.family.encoders
        self.base = size_of(pipe.transformer)
        linear = (m for m in pipe.transformer.modules() if isinstance(m, nn.Linear))
        (self.width, _), *_ = Counter(layer.in_features for layer in linear).most_common(1)
        modules = (pipe.transformer, pipe.vae, *self.encoders)
        self.host = size_of(*modules)
        files = [SIXTEEN * sum(p.numel() for p in part.parameters()) for part in modules]
        self.file, self.downloads = files[0], {model.id: sum(files)}  # bytes; transformer, all
        sizes = [height * width for height, width in model.image_sizes]
        largest = sizes.index(max(sizes))
        self.latent_shape = self.backbone.latent_shapes[largest]
        self.latent = rounded(4 * math.prod(self.latent_shape))  # bytes, float32
        self.pixels = 4 * 3 * sizes[largest]  # bytes of an image, float32
        self.frozen: dict[str, list[nn.Parameter]] = {}
        self.names: dict[frozenset[tuple[str, int]], str] = {}  # of frozen adapters, by their ranks
        self.meters: dict[tuple[Any, ...], Pass] = {}

    @property
    def transformer(self) -> int:
        """Bytes of the transformer as it is stored, without adapters."""
        if self.stage.model.quantization != "nf4":
            return self.base
        layers = self.backbone.core.named_modules()
        linear = (m for name, m in layers if isinstance(m, nn.Linear) and ".lora_" not in name)
        weights = [layer.weight for layer in linear]
        return self.base + round(sum(w.numel() for w in weights) * NF4) - size(weights)

    @property
    def visiting(self) -> int:
        """Bytes of the text encoders, where they visit the device; else they stay there."""
        return size_of(*self.encoders) if self.stage.model.offload_text_encoders else 0

    def after(self, config: Stage) -> _Shapes | None:
        """The same for a config that differs in sizes of batches and the like; None where the
        model differs."""
        now, then = (
            stage.model.model_dump(exclude=FREE) | {"fp8": stage.model.quantization == "fp8"}
            for stage in (config, self.stage)
        )
        if now != then:
            return None
        other = copy(self)
        other.configure(config)
        return other

    def configure(self, config: Stage) -> None:
        """Take over what a config says beside the model and its adapters."""
        self.stage, self.backbone.decode_batch = config, config.model.decode_batch

    def measured(self, call: Callable[[], object], *key: Any) -> Pass:
        """A call, which this key tells from others."""
        if key not in self.meters:
            # an encoder's peak can be its hidden states, which few blocks do not show
            whole = key[0] in ("text", "VAE")
            used = [] if whole else [self.backbone.core]
            self.meters[key] = measure_blocks(call, self.device_type, used)
        return self.meters[key]

    def add(self, name: str, ranks: Mapping[str, int]) -> list[nn.Parameter]:
        """Add an adapter with these ranks of its layers; its weights."""
        add = partial(self.backbone.add_adapter, name, rank=max(ranks.values()), alpha=1.0)
        with torch.device("meta"):
            add(targets=list(ranks), ranks=ranks)
        return self.backbone.adapter_parameters(name)

    def add_frozen(self, ranks: Mapping[str, int]) -> str:
        """Add a frozen adapter, as a run loads it; its name. Adapters of the same ranks cost the
        same, so that one stands for all."""
        name = self.names.setdefault(frozenset(ranks.items()), f"frozen_{len(self.names)}")
        if name not in self.frozen:
            self.frozen[name] = self.add(name, ranks)
            for parameter in self.frozen[name]:
                parameter.data = parameter.data.to(self.dtype)
        return name

    def base_parts(self) -> dict[str, int]:
        """Resident bytes of the model itself."""
        model = self.stage.model
        return {
            f"transformer ({model.quantization or model.dtype})": self.transformer,
            f"VAE ({model.vae_dtype})": size_of(self.backbone.pipe.vae),
            f"text encoders ({model.dtype})": size_of(*self.encoders) - self.visiting,
        }

    def sampled(self, key: str, images: float, adapter: str | None) -> Phase:
        """Sample held-out prompts by Euler steps, and decode them; their prompts are encoded, once
        an image. key: of the batch size. images: of all processes."""
        sampling = self.stage.evaluation_sampling
        batch = sampling.batch_size
        forward = self.forward(batch, Source(adapter, sampling.guidance))
        decoded, encoded = self.decoded(batch), self.encoded(1)
        flops = forward.flops * sampling.steps + decoded.flops + encoded.flops * batch
        peak = self.text_bytes(batch + 1) + max(forward.peak, decoded.peak) + batch * self.latent
        sizes = {"model.decode_batch": self.stage.model.decode_batch or batch, key: batch}
        share = images / self.processes
        return Phase("evaluation", "sampling", peak, flops / batch * share, sizes)

    def encoded(self, batch: int) -> Pass:
        """The text encoders on `batch` prompts."""
        lengths = self.backbone.family.encoder_tokens(self.backbone.text.max_sequence_length)

        def encode() -> None:
            for encoder, length in zip(self.encoders, lengths, strict=True):
                ids = torch.empty(batch, length, dtype=torch.long, device="meta")
                with torch.no_grad():
                    encoder(ids, output_hidden_states=True)

        return self.measured(encode, "text", batch)

    def forward(self, batch: int, source: Source) -> Pass:
        """A forward pass without gradient."""
        x, cond = self.latents(batch), self.conditioning(batch)

        def forward() -> None:
            with torch.no_grad(), self.backbone.adapter(source.adapter):
                self.backbone.velocity(x, 0.5, cond, guidance=source.guidance)

        return self.measured(forward, "forward", batch, source)

    def decoded(self, batch: int) -> Pass:
        """The VAE's decoder."""
        latents = self.latents(batch)
        rows = self.stage.model.decode_batch or batch
        return self.measured(lambda: self.backbone.decode(latents, batch), "VAE", batch, rows)

    def latents(self, rows: int) -> Tensor:  # [rows,C,h,w], float32
        return torch.empty(rows, *self.latent_shape, device="meta")

    def conditioning(self, rows: int) -> Conditioning:  # each row has its own prompt
        index = torch.empty(rows, device="meta", dtype=torch.long)
        return Conditioning(self._text(rows), index, self._text(1))

    def text_bytes(self, rows: int) -> int:  # of the embeddings of so many prompts
        return size(self._text(rows).values())

    def _text(self, rows: int) -> dict[str, Tensor]:
        shapes = self.backbone.family.text_shapes(self.backbone.text.max_sequence_length)
        return {
            name: torch.empty(rows, *shape, device="meta", dtype=self.dtype)
            for name, shape in shapes.items()
        }


class _Run(_Shapes):
    """A training stage: the model with all adapters, and the phases of an update."""

    def __init__(
        self,
        config: TrainingStage,
        device_type: str,
        processes: int,
        ranks: Mapping[str, Mapping[str, int]],
        drawn: Sequence[int] | None,
    ) -> None:
        super().__init__(config, device_type, processes)
        self.drawn, self.config = drawn, config
        self._add_adapters(ranks)
        self.configure(config)

    def configure(self, config: Stage) -> None:
        """The sizes of an update."""
        super().configure(config)
        assert isinstance(config, TrainingStage)
        self.config, self.algorithm = config, algorithm_class(config)
        self.keeps = keeps = self.algorithm.keeps(config, self.drawn)
        self.images = max(1, config.rollout.images // self.processes)
        self.prompts = math.ceil(self.images / config.rollout.copies)
        updates = range(DRAWS) if self.drawn is None else self.drawn
        self.states, self.forwards = self._steps(updates)
        self.pairs = self.images * self.states  # (image, step) that are trained
        # bytes: trained states and, where needed, what came after them; labels, or the velocities
        # that are matched; a rollout, before images are noised and after it
        states = self.pairs * (1 + keeps.actions + keeps.means) * self.latent
        widths = [DTYPES[dtype].itemsize for dtype in keeps.targets]
        self.label_bytes = self.pairs * self.latent * sum(widths) // 4
        self.prompt_bytes = (self.prompts + 1) * self.text_bytes(1)  # and the empty prompt
        ends = self.images * (keeps.latents * self.latent + keeps.images * self.pixels)
        self.sampled_states = 0 if keeps.noise_levels else states
        self.rollout_bytes = self.sampled_states + ends + self.prompt_bytes
        self.stored = states + ends + self.prompt_bytes

    def _add_adapters(self, ranks: Mapping[str, Mapping[str, int]]) -> None:
        """The adapters of the student, its teachers and its anchor, as a run loads them."""
        config, lora = self.config, self.config.lora
        ranks_of_student = ranks_of(lora.init, lora, ranks, config.model)
        self.student = self.add(STUDENT, ranks_of_student)
        self.teachers: list[nn.Parameter] = []
        self.sources: dict[str, Source] = {}  # who labels, by its key in the config
        self.bases: dict[str, _Shapes] = {}  # of teachers, by their settings: several may have one
        self.others: dict[str, tuple[_Shapes, str | None]] = {}  # teachers there, their adapters
        for key, teacher in config.labellers.items():
            name, shapes, model = None, self, config.bases.get(key, config.model)
            if key in config.bases:
                shapes = self._base(model, teacher.device)
            if teacher.adapter is not None:
                name = shapes.add_frozen(ranks_of(teacher.adapter, lora, ranks, model))
                self.teachers += shapes.frozen[name] if shapes.here else []
            if key in config.bases:
                self.others[key], name = (shapes, name), key
            self.sources[key] = Source(name, config.guidance_of(teacher))
        self._add_references(ranks_of_student)
        self.compared: str | None = None  # of the alarm: None = the base
        if config.alarm and config.alarm.reference == "start":
            self.compared = self.add_frozen(ranks_of_student)
            self.teachers += self.frozen[self.compared]
        self.backbone.activate(STUDENT)

    def _base(self, model: ModelConfig, device: str | None) -> _Shapes:
        """The base of a teacher."""
        if (settings := f"{device} {model}") not in self.bases:
            stage = self.config.model_copy(update={"model": model})
            base = self.bases[settings] = _Shapes(stage, self.device_type, self.processes)
            base.here = device in (None, self.device_type)
            self.host = max(self.host, base.base)
            self.downloads[model.id] = base.file
        return self.bases[settings]

    def forward(self, batch: int, source: Source) -> Pass:
        """As of the student's base; a base on another device holds nothing on this one."""
        if source.adapter not in self.others:
            return super().forward(batch, source)
        base, name = self.others[source.adapter]
        meter = base.forward(batch, replace(source, adapter=name))
        return meter if base.here else meter._replace(peak=0)

    def _add_references(self, ranks: Mapping[str, int]) -> None:
        """What a teacher's target is extrapolated from, where it is: one more who labels."""
        self.targets = {key: [source] for key, source in self.sources.items()}
        beyond, start = self.config.extrapolated, None
        if any(teacher.reference == "start" for teacher in beyond.values()):
            start = self.add_frozen(ranks)
            self.teachers += self.frozen[start]
        for key, teacher in beyond.items():
            name = start if teacher.reference == "start" else None
            reference = Source(name, self.config.guidance_of(teacher))
            if name or reference != self.sources.get("anchor"):  # the anchor labels all states
                self.targets[key].append(reference)

    def _checkpoint(self, module: Any, *args: Any) -> Any:
        """Gradient checkpointing, as diffusers calls it."""

        def run(*inputs: Any) -> Any:
            # the modes of `measure` do not reach into the backward pass, where this runs again
            with DeviceAttention(self.device_type):
                return module(*inputs)

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

    def parts(self) -> dict[str, int]:
        """Resident bytes by what they are."""
        lora, policies = size(self.student), len(self.keeps.policies)
        trained = size(p for p in self.student if p.requires_grad)
        moments = ADAM_8BIT if self.config.optimizer.name == "adamw8bit" else 1
        labellers = self.config.labellers.values()
        adapters = sum(teacher.adapter is not None for teacher in labellers)
        bases = [base.transformer for base in self.bases.values() if base.here]
        return self.base_parts() | {
            f"transformers of {len(bases)} other bases": sum(bases),
            "student's LoRA (float32)": lora,
            "its Adam moments": round(2 * trained * moments),
            "its moving average": lora if self.config.ema else 0,
            f"LoRAs of {adapters} teachers": size(self.teachers),
            f"LoRAs of {policies} policies": policies * lora,
            "gradient buckets of DDP": lora if self.processes > 1 else 0,
        }

    # Phases ------------------------------------------------------------------------------------

    def phases(self) -> Iterator[Phase]:
        """What an update does, in order."""
        yield self._text_phase()
        yield self._rollout()
        if self.keeps.images:
            yield self._decode()
        if self.keeps.labels:
            yield self._labels()
        if self.keeps.noise_levels:
            yield self._noising()
        if self.config.alarm and self.keeps.images:
            yield self._drift()
        yield self._update()

    def evaluation(self) -> Phase:
        """The held-out prompts of all tasks, and watched benchmarks."""
        config = self.config
        images = sum(evaluated_images(config).values())
        if config.alarm:
            images += sum(task.evaluated for task in config.tasks) * config.alarm.images
        return self.sampled("evaluation.batch_size", images, STUDENT)

    def _text_phase(self) -> Phase:
        """Encode the prompts. With a cache they are encoded once, one by one: its FLOPs are 0."""
        cache = self.config.model.text_cache
        batch = 1 if cache else min(self.prompts, TEXT_BATCH)
        meter = self.encoded(batch)
        flops = 0.0 if cache else meter.flops / batch * self.prompts
        return Phase("text", "sampling", self.prompt_bytes + self.visiting + meter.peak, flops)

    def _rollout(self) -> Phase:
        """Sample trajectories without gradient. Stored states are copied once, at the end."""
        rollout = self.config.rollout
        batch = min(rollout.batch_size, self.images)
        if self.keeps.taught_images:
            meter = self._teachers_forward(batch)
        else:
            meter = self.forward(batch, Source(STUDENT, rollout.guidance))
        noise = batch * (1 + (self.states if self.sampled_states else 0)) * self.latent
        peak = self.rollout_bytes + max(meter.peak + noise, self.sampled_states)
        flops = meter.flops / batch * self.images * self.forwards
        sizes = {"rollout.batch_size": batch}
        return Phase("rollout", "sampling", peak, flops, sizes)

    def _decode(self) -> Phase:  # with the VAE; all images of the rollout are held
        size = self.config.rollout.batch_size
        batch = min(size, self.images)
        meter = self.decoded(batch)
        pixels = self.images * self.pixels
        peak = self.rollout_bytes + max(meter.peak - batch * self.pixels, pixels)
        sizes = {"model.decode_batch": min(self.config.model.decode_batch or size, batch)}
        return Phase("VAE decode", "sampling", peak, meter.flops / batch * self.images, sizes)

    def _noising(self) -> Phase:  # clean images -> states and velocities, all at once
        copies = 3 if self.device_type == "cpu" else 2  # the noise, which is drawn there; states
        latents = copies * self.pairs + 3 * self.images
        return Phase("noising", "learning", self.rollout_bytes + latents * self.latent, 0.0)

    def _labels(self) -> Phase:  # each pair by its teacher, and by the anchor
        size = self.config.batch_sizes["student.label_batch"]
        batch = min(size, self.pairs)
        meters = [self._teachers_forward(batch)]
        if "anchor" in self.sources:
            meters.append(self.forward(batch, self.sources["anchor"]))
        flops = sum(meter.flops for meter in meters) / batch * self.pairs
        peak = self.stored + self.label_bytes + max(meter.peak for meter in meters)
        if any(len(sources) > 1 for sources in self.targets.values()):
            peak += self.pairs * self.latent  # summed in float32
        return Phase("labels", "labels", peak, flops, {"student.label_batch": batch})

    def _drift(self) -> Phase:
        """The base's images for some of the rollout, at every check; FLOPs are those an update."""
        rollout, alarm = self.config.rollout, self.config.alarm
        assert alarm
        images = max(1, math.prod(checked(self.config)) // self.processes)
        batch = min(rollout.batch_size, images)
        forward = self.forward(batch, Source(self.compared, rollout.guidance))
        decoded = self.decoded(batch)
        passes = forwards(rollout.solver, rollout.steps)
        flops = (forward.flops * passes + decoded.flops) / batch * images / alarm.every
        peak = self.stored + self.label_bytes + max(forward.peak, decoded.peak)
        peak += images * (self.latent + self.pixels)
        return Phase("image drift", "alarm", peak, flops)

    def _update(self) -> Phase:  # both passes of a micro-batch, and the optimizer's step
        config, backbone, lora = self.config, self.backbone, size(self.student)
        batch = self.pairs // config.optimizer.updates_per_rollout
        batch = min(config.optimizer.micro_batch, batch)
        x, cond = self.latents(batch), self.conditioning(batch)
        compared = self.keeps.compared
        recomputes = config.model.gradient_checkpointing
        if recomputes:
            backbone.core.enable_gradient_checkpointing(self._checkpoint)
        else:
            backbone.core.disable_gradient_checkpointing()

        def learn() -> None:
            velocity, target = backbone.velocity(x, 0.5, cond, guidance=config.guidance), x
            for other in compared:
                with torch.no_grad(), backbone.adapter(other.adapter):
                    target = backbone.velocity(x, 0.5, cond, guidance=config.guidance)
            ((velocity - target) ** 2).mean().backward()
            for parameter in self.student:
                parameter.grad = None

        meter = self.measured(learn, "update", batch, recomputes)
        tasks = len(config.tasks) if self.keeps.task_gradients else 1
        cosines = (tasks - 1) * lora  # the gradients of all tasks, side by side
        step = 3 * lora if self.device_type == "cuda" else lora  # gradients, and foreach's copies
        peak = self.stored + self.label_bytes + max(meter.peak + cosines, step)
        each = [self.forward(batch, Source(c.adapter, config.guidance)).flops for c in compared]
        flops = meter.flops - sum((1 - c.share) * f for c, f in zip(compared, each, strict=True))
        sizes = {"optimizer.micro_batch": batch}
        return Phase("update", "learning", peak, flops / batch * self.pairs, sizes)

    def _teachers_forward(self, batch: int) -> Pass:
        """A batch of the teacher with the highest peak; its FLOPs are the mean of all tasks'."""
        config = self.config
        asked = {
            task.name: self.targets[f"teachers.{config.routing[task.name]}"]
            for task in config.tasks
        }
        every = dict.fromkeys(source for sources in asked.values() for source in sources)
        meters = {source: self.forward(batch, source) for source in every}
        weighted = (
            task.weight * sum(meters[source].flops for source in asked[task.name])
            for task in config.tasks
        )
        flops = sum(weighted) / sum(task.weight for task in config.tasks)
        return Pass(max(meter.peak for meter in meters.values()), flops)
