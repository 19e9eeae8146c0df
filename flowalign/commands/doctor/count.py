"""Memory and FLOPs of a run, counted before any weight is loaded.

A stage is built as a run builds it (`flowalign.commands.build`), on the meta device. The library's
own forward and backward passes run there (`meter`), once for each phase of an update. What is
stored between them follows from what the algorithm keeps (`Algorithm.keeps`). All numbers are of
one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowalign.backbone import DTYPES, Backbone
from flowalign.backbone.adapters import AdapterError, Lora, weightless_lora
from flowalign.backbone.compilation import compiles
from flowalign.backbone.lora import CastingLinear, misfit
from flowalign.backbone.structure import ModelSpec, bare, mismatches, model_spec, weightless
from flowalign.backbone.text import TEXTS_A_PASS
from flowalign.commands import build
from flowalign.commands.doctor.meter import (
    DeviceAttention,
    Pass,
    measure_blocks,
    rounded,
    size,
    size_of,
)
from flowalign.config import Judged, Stage, TrainingStage
from flowalign.config.model import LoraConfig
from flowalign.eval.evaluation import adapter_name, load_adapters
from flowalign.report.alarm import Alarm
from flowalign.report.drift.monitor import checked
from flowalign.rewards import RewardSpec
from flowalign.teachers import merge
from flowalign.teachers.bank import Bank, teacher_name
from flowalign.training.algorithm import STUDENT, Compared, algorithm_class
from flowalign.training.data import PromptError
from flowalign.training.inputs import Inputs
from flowalign.types import Conditioning, Source

NF4 = 0.5 + 4 / 64  # bytes a weight: four bits, and a float32 scale for each block of 64
AVERAGED_UPDATES = 64  # updates whose drawn states are averaged
BENCHMARK_PROMPTS = 512  # assumed where a benchmark has no limit and its file is not here
META = torch.device("meta")


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
    processes: int
    parts: Mapping[str, int]  # resident bytes by what they are
    phases: list[Phase]  # of an update
    evaluation: Phase | None  # None = the run has none
    updates: int  # rollouts of a training run
    evaluations: int
    evaluated: Mapping[str, int]  # {task or benchmark: images of one evaluation}, of all processes
    width: int  # of the transformer

    @property
    def compiled(self) -> bool:
        """Whether the run compiles its transformer on a GPU."""
        return compiled(self.config, sum(self.evaluated.values()))

    @property
    def all_phases(self) -> list[Phase]:
        return [*self.phases, *([self.evaluation] if self.evaluation else [])]

    @property
    def resident(self) -> int:
        """Bytes that stay allocated through all phases."""
        return sum(self.parts.values())

    @property
    def worst(self) -> Phase:
        return max(self.all_phases, key=lambda phase: phase.bytes)

    @property
    def peak(self) -> int:
        """Peak bytes, as torch.cuda.max_memory_allocated counts them."""
        return self.resident + self.worst.bytes


def predict(
    config: Stage,
    inputs: Inputs | None = None,
    *,
    device_type: str = "cuda",
    processes: int = 1,
    drawn: Sequence[int] | None = None,
    models: dict[str, _Model] | None = None,
) -> Estimate:
    """The estimate of a training stage or an evaluation.

    inputs: what was opened of the stage, and what an earlier stage will write. drawn: the updates
    whose drawn states are averaged; None = the first DRAWS. models: a cache for calls with the same
    device and inputs; their passes are measured once. Raises LookupError where the shapes of
    model.id are not known. Not included: the memory that torch.compile saves, and that of rewards'
    activations, of kernels (cuDNN, GEMM workspaces) and of the device's context.
    """
    models = {} if models is None else models
    inputs = inputs or Inputs(config.model)
    key = _key(config)
    if key not in models:
        models[key] = _Model(config, device_type, inputs)
    model = models[key]
    phases = list[Phase]()
    updates = 0
    if isinstance(config, TrainingStage):
        update = _Update(config, model, processes, drawn)
        phases = [*update.sampling(), *update.learning()]
        updates = config.train.updates
    evaluated = evaluated_images(config, inputs)
    evaluations = _evaluations(config)
    staying, visiting, _ = judge_bytes(config)
    held = {**model.parts(config, processes), "reward models (their files)": staying}
    parts = {name: count for name, count in held.items() if count}
    evaluation = None
    if evaluations:
        phase = _evaluation(config, model, processes, sum(evaluated.values()))
        evaluation = replace(phase, bytes=phase.bytes + visiting)

    for number, phase in enumerate(phases):
        # images are scored while the next ones are sampled
        if phase.kind == "sampling" and phase.name != "text":
            phases[number] = replace(phase, bytes=phase.bytes + visiting)
    return Estimate(
        config, processes, parts, phases, evaluation, updates, evaluations, evaluated, model.width
    )


def compiled(stage: Stage, evaluated: int = 0) -> bool:
    """Whether a stage, or an evaluation of so many images, compiles its transformer on a GPU."""
    images = stage.images if stage.trains else evaluated
    return compiles(stage.model, "cuda", images)[0]


def judges(stage: Stage) -> Iterator[RewardSpec]:
    """The rewards that a stage scores with, each as its parts. Imports no code of the user's."""
    for judged in stage.judged:
        yield from parts_of(judged)


def parts_of(judged: Judged) -> Iterator[RewardSpec]:
    """The parts of the rewards of a task or a benchmark."""
    for reward in judged.rewards.values():
        yield from RewardSpec(reward.name, reward.options, trusted=False).parts()


def judge_bytes(config: Stage) -> tuple[int, int, list[str]]:
    """Bytes of reward models, by the size of their files: the sum of those that stay on the device;
    the largest of those that are there only while they score; the rewards of unknown size."""
    staying = dict[str, float]()
    visiting = [0.0]
    unknown = list[str]()
    for judge in judges(config):
        files = judge.downloads
        options = judge.options
        if files is None and judge.name not in unknown:
            unknown.append(judge.name)
        size = sum((files or {}).values())
        if options.get("offload") or (options.get("detector_options") or {}).get("offload"):
            visiting.append(size)
        elif options.get("device") != "cpu":
            staying[f"{judge.name} {options}"] = size
    return int(1e9 * sum(staying.values())), int(1e9 * max(visiting)), unknown


def judge_kept(config: Stage) -> int:
    """Bytes of an image that a judge keeps on the device for its gradient, the maximum over judges;
    0 if unknown."""
    costs = [judge.cost for judge in judges(config) if judge.options.get("device") != "cpu"]
    return int(max((cost.kept for cost in costs if cost), default=0))


def evaluated_images(config: Stage, inputs: Inputs) -> dict[str, int]:
    """{task or benchmark: images of one evaluation}, of all models and processes."""
    images = {}
    for judged in (judged for judged in config.judged if judged.evaluated):
        *_, held_out = judged.prompts.values()
        count = judged.limit or BENCHMARK_PROMPTS
        with suppress(PromptError, OSError):  # the set is not here
            length = len(inputs.prompts(held_out, judged.name))
            count = min(length, judged.limit or length)
        images[judged.name] = count * judged.evaluated
    return images


def _evaluations(config: Any) -> int:
    """The number of evaluations: before the first update, at intervals, and after the last."""
    if not config.trains:
        return 1
    if config.evaluation is None or not config.evaluates:
        return 0
    return len(range(0, config.train.updates, config.evaluation.every)) + 1


# Adapters ----------------------------------------------------------------------------------------


def foreseen(stage: Any, inputs: Inputs) -> Lora:
    """The adapter that a stage will write, on the meta device. LookupError where the shapes of the
    model are not known."""
    loras = on_meta(stage, inputs)
    if stage.merges:
        sources = [loras.adapter(source) for source in stage.adapters]
        return merge.foreseen_merge(sources, stage.method, stage.rank)
    init = stage.lora.init
    return loras.adapter(init) if init else _fresh(model_spec(stage.model), stage.lora)


def on_meta(config: Any, inputs: Inputs) -> Inputs:
    """The adapters of a stage on the meta device. One that cannot be read, or does not fit its
    base, counts as a fresh one. LookupError where the shapes of a model are not known."""
    adapters = {}
    for key, source in config.inputs.items():
        spec = model_spec(config.bases.get(key.removesuffix(".adapter"), config.model))
        lora = inputs.pending.get(source)
        with suppress(AdapterError, OSError):  # it is not here, and the Hub cannot be asked
            lora = lora or inputs.adapter(source)
        if lora is None or misfit(spec.family.core, lora):
            lora = _fresh(spec, getattr(config, "lora", LoraConfig()))
        shapes = {name: weight.to("meta") for name, weight in lora.weights.items()}
        adapters[source] = replace(lora, weights=shapes)
    return Inputs(config.model, adapters)


def _fresh(spec: ModelSpec, lora: LoraConfig) -> Lora:
    shapes = {}
    for name in spec.adapted(lora.targets):
        layer: Any = spec.family.core.get_submodule(name)
        shapes[name] = (layer.out_features, lora.rank, layer.in_features)
    return weightless_lora(shapes)


# Models ------------------------------------------------------------------------------------------


class _Model:
    """What a stage builds, on the meta device, and its single passes, each measured once. Their
    inputs are made before they are measured."""

    def __init__(self, config: Any, device_type: str, inputs: Inputs) -> None:
        self.device_type = device_type
        self.dtype = DTYPES[config.model.dtype]
        for key, model in config.bases.items():
            if any(mismatches(config.model, model)):
                raise LookupError(f"{key}.base cannot label states of {config.model.id!r}")
        inputs = on_meta(config, inputs)
        config = config.model_copy(update={"model": bare(config.model)})
        self.teachers: Bank | None = None
        self.anchor: Bank | None = None
        self.compared: str | None = None  # of the alarm: None = the base
        with weightless():
            if config.trains:
                self.sampler = STUDENT  # of evaluations: None = the base
                self.backbone = build.student(config, META, inputs)
                self.teachers, self.anchor = build.banks(config, self.backbone, inputs)
                if config.alarm:
                    monitor = build.monitor(config, self.backbone, Alarm({}), inputs)
                    self.compared = monitor.reference
            else:
                names = (adapter_name(name) for name, lora in config.adapters.items() if lora)
                self.sampler = next(names, None)  # its peak is that of a model with an adapter
                self.backbone = Backbone.load(config.model, META)
                load_adapters(self.backbone, config, inputs)
        self.here = {self.backbone: config.model}  # and the bases of teachers on this device
        for key, model in config.bases.items():
            if config.labellers[key].device in (None, device_type):
                name = teacher_name(key.removeprefix("teachers."))
                self.here[self.backbone.others[name]] = model
        self.student = self.backbone.adapter_parameters(STUDENT)
        self.encoders = self.backbone.family.encoders
        widths = Counter(layer.in_features for layer in _linear(self.backbone.core))
        (self.width, _), *_ = widths.most_common(1)
        self.latent_shape = self.backbone.latent_shape
        self.latent = rounded(4 * math.prod(self.latent_shape))  # bytes, float32
        self.pixels = 4 * 3 * config.model.height * config.model.width  # of an image, float32
        self.passes: dict[tuple[Any, ...], Pass] = {}

    def parts(self, config: Any, processes: int) -> dict[str, int]:
        """Resident bytes by what they are."""
        model = config.model
        core = self.backbone.core
        text = 0 if model.offload_text_encoders else size_of(*self.encoders)
        frozen = sum(
            size(base.adapter_parameters(name)) for base in self.here for name in base.frozen
        )
        parts = {
            f"transformer ({model.quantization or model.dtype})": _stored(core, model.quantization),
            "VAE (float32)": size_of(self.backbone.pipe.vae),
            f"text encoders ({model.dtype})": text,
        }
        if not config.trains:
            return parts | {f"LoRAs of {len(config.inputs)} models": frozen}
        lora = size(self.student)
        trained = size(p for p in self.student if p.requires_grad)
        taught = sum(teacher.adapter is not None for teacher in config.labellers.values())
        policies = len(algorithm_class(config).keeps(config).policies)
        _, *others = (_stored(base.core, m.quantization) for base, m in self.here.items())
        return parts | {
            f"transformers of {len(others)} other bases": sum(others),
            "student's LoRA (float32)": lora,
            "its Adam moments": 2 * trained,
            "its moving average": lora if config.ema else 0,
            f"LoRAs of {taught} teachers": frozen,
            f"LoRAs of {policies} policies": policies * lora,
            "gradient buckets of DDP": lora if processes > 1 else 0,
        }

    def measured(
        self, call: Callable[[], object], *key: Any, core: nn.Module | None = None
    ) -> Pass:
        """The cost of a call, by a key of its own. core: whose equal blocks are measured once; None
        for an encoder, whose peak can be its hidden states, which few blocks do not show."""
        if key not in self.passes:
            shown = [core] if core else []
            self.passes[key] = measure_blocks(call, self.device_type, *shown)
        return self.passes[key]

    def encoded(self, batch: int) -> Pass:
        lengths = self.backbone.family.encoder_tokens(self.backbone.text.max_sequence_length)

        def encode() -> None:
            for encoder, length in zip(self.encoders, lengths, strict=True):
                ids = torch.empty(batch, length, dtype=torch.long, device="meta")
                with torch.no_grad():
                    encoder(ids, output_hidden_states=True)

        return self.measured(encode, "text", batch)

    def forward(self, batch: int, source: Source) -> Pass:
        """A velocity of a batch. Adapters of the same shapes on one base cost the same. A base that
        is not on this device takes no memory."""
        base = self.backbone.others.get(source.adapter or "", self.backbone)
        weights = base.adapter_parameters(source.adapter) if source.adapter else []
        shapes = tuple((weight.shape, weight.dtype) for weight in weights)
        x, cond = self.inputs(batch)

        def forward() -> None:
            with torch.no_grad(), self.backbone.adapter(source.adapter):
                self.backbone.velocity(x, 0.5, cond, guidance=source.guidance)

        key = ("forward", batch, base, shapes, source.guidance)
        cost = self.measured(forward, *key, core=base.core)
        return cost if base in self.here else cost._replace(peak=0)

    def updated(
        self, batch: int, config: TrainingStage, compared: Sequence[Compared], summed: bool
    ) -> Pass:
        """Both passes of a micro-batch. compared: other velocities that the loss asks for. summed:
        its gradients are added to those of others, which are there already."""
        core = self.backbone.core
        recomputes = config.model.gradient_checkpointing
        x, cond = self.inputs(batch)
        velocity = partial(self.backbone.velocity, x, 0.5, cond, guidance=config.loss_guidance)
        self.checkpointed(core, recomputes)

        def learn() -> None:
            learner = velocity()
            target = x
            for other in compared:
                with torch.no_grad(), self.backbone.adapter(other.adapter):
                    target = velocity()
            ((learner - target) ** 2).mean().backward()
            if not summed:
                core.zero_grad()

        trained = [parameter for parameter in self.student if parameter.requires_grad]
        if summed:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        adapters = (other.adapter for other in compared)
        key = ("update", batch, config.loss_guidance, recomputes, summed, *adapters)
        peak, flops = self.measured(learn, *key, core=core)
        core.zero_grad()
        if summed:
            peak += size(trained)
        return Pass(peak, flops)

    def decoded(self, batch: int, rows: int) -> Pass:
        """The VAE's decoder on a batch, so many rows at once."""
        latents = self.latents(batch)
        self.backbone.decode_batch = rows
        return self.measured(partial(self.backbone.decode, latents), "VAE", batch, rows)

    def ascended(self, batch: int, recomputes: bool, kept: int) -> Pass:
        """A gradient through a judge and the VAE's decoder, of a batch at once. recomputes: with
        gradient checkpointing, if the VAE has it. kept: bytes of an image that the judge keeps."""
        latents = self.latents(batch).requires_grad_()
        vae = self.backbone.pipe.vae
        self.checkpointed(vae, recomputes and vae._supports_gradient_checkpointing)

        def ascend() -> None:
            _Judge.apply(self.backbone.decoded(latents), batch * kept).backward()
            latents.grad = None

        return self.measured(ascend, "VAE", "gradient", batch, recomputes, kept)

    def checkpointed(self, part: Any, recomputes: bool) -> None:
        """Switch the gradient checkpointing of a part of the pipeline on, as it is metered, or
        off."""
        part.disable_gradient_checkpointing()
        if recomputes:
            # the modes of `measure` do not reach into the backward pass, where blocks run again
            again = partial(checkpoint, use_reentrant=False)
            modes = lambda: (nullcontext(), DeviceAttention(self.device_type))  # noqa: E731
            part.enable_gradient_checkpointing(partial(again, context_fn=modes))

    def read(self, size: tuple[int, int]) -> int:
        """Peak bytes of the VAE's encoder on an image."""
        image = torch.empty(1, 3, *size, device="meta")
        return self.measured(partial(self.backbone.encode_image, image), "VAE", "encoder").peak

    def latents(self, rows: int) -> Tensor:
        """[rows,C,h,w], float32."""
        return torch.empty(rows, *self.latent_shape, device="meta")

    def texts(self, rows: int) -> dict[str, Tensor]:
        shapes = self.backbone.family.text_shapes(self.backbone.text.max_sequence_length)
        make = partial(torch.empty, dtype=self.dtype, device="meta")
        return {name: make(rows, *shape) for name, shape in shapes.items()}

    def inputs(self, rows: int) -> tuple[Tensor, Conditioning]:
        index = torch.empty(rows, device="meta", dtype=torch.long)
        return self.latents(rows), Conditioning(self.texts(rows), index, self.texts(1))


class _Judge(torch.autograd.Function):
    """A reward of images that keeps so many bytes until its backward pass."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, kept: int) -> Tensor:
        ctx.save_for_backward(torch.empty(kept, dtype=torch.uint8, device=images.device))
        ctx.shape = images.shape
        return images.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].expand(ctx.shape), None


def _linear(core: nn.Module) -> list[nn.Linear]:
    """The linear layers of a transformer, without those of adapters."""
    layers = (module for module in core.modules() if isinstance(module, nn.Linear))
    return [layer for layer in layers if not isinstance(layer, CastingLinear)]


def _stored(core: nn.Module, quantization: str | None) -> int:
    """Bytes of a transformer as it is stored, without adapters."""
    named = (*core.named_parameters(), *core.named_buffers())
    total = size(tensor for name, tensor in named if ".lora_" not in name)
    if quantization == "nf4":
        weights = [layer.weight for layer in _linear(core)]
        total += round(sum(w.numel() for w in weights) * NF4) - size(weights)
    return total


def _key(config: Any) -> str:
    """All settings that the model of a stage and its adapters depend on."""
    loaded: list[Any] = [bare(config.model), config.inputs]
    if config.trains:
        start = config.alarm is not None and config.alarm.reference == "start"
        loaded += [config.lora, config.labellers, config.guidance, start]
    return repr(loaded)


# Phases ------------------------------------------------------------------------------------------


def _evaluation(config: Stage, model: _Model, processes: int, images: int) -> Phase:
    """The pass of an evaluation: encode the held-out prompts, once an image; sample all tasks and
    benchmarks by Euler steps, and decode. Adds a student's velocities at its fixed states."""
    key = "sampling.batch_size"
    least = size_of(*model.encoders) if config.model.offload_text_encoders else 0
    if isinstance(config, TrainingStage):
        key = "evaluation.batch_size"
        least = 0  # the phase "text" counts the encoders
    sampling = config.evaluation_sampling
    rows = config.model.decode_batch
    batch = sampling.batch_size
    forward = model.forward(batch, Source(model.sampler, sampling.guidance))
    decoded = model.decoded(batch, rows)
    encoded = model.encoded(1)
    flops = forward.flops * sampling.steps + decoded.flops + encoded.flops * batch
    peak = max(forward.peak, decoded.peak) + batch * model.latent
    peak += size(model.texts(batch + 1).values())
    sizes = {"model.decode_batch": min(rows, batch), key: batch}
    flops = flops / batch * (images / processes)
    if isinstance(config, TrainingStage):  # each process measures all
        forward = model.forward(batch, Source(model.sampler, config.loss_guidance))
        flops += forward.flops / batch * algorithm_class(config).keeps(config).fixed_states
    return Phase("evaluation", "sampling", max(peak, least), flops, sizes)


class _Update:
    """The phases of an update of a training stage."""

    def __init__(
        self, config: Any, model: _Model, processes: int, drawn: Sequence[int] | None
    ) -> None:
        self.config = config
        self.model = model
        self.processes = processes
        self.keeps = keeps = algorithm_class(config).keeps(config, drawn)
        self.images = max(1, config.rollout.images // processes)
        self.states, self.forwards = self._steps(
            range(AVERAGED_UPDATES) if drawn is None else drawn
        )
        self.pairs = self.images * self.states  # (image, step) that are trained
        # bytes: trained states and, where needed, what came after them; labels, or the velocities
        # that are matched; a rollout, before images are noised and after it
        states = self.pairs * (1 + keeps.actions) * model.latent
        widths = [DTYPES[dtype].itemsize for dtype in keeps.targets]
        labels = self.pairs * model.latent * sum(widths) // 4
        self.prompts = math.ceil(self.images / config.rollout.group_size)
        self.prompt_bytes = (self.prompts + 1) * size(
            model.texts(1).values()
        )  # and the empty prompt
        ends = self.images * (keeps.latents * model.latent + keeps.images * model.pixels)
        self.sampled_states = 0 if keeps.noise_levels else states
        self.rollout_bytes = self.sampled_states + ends + self.prompt_bytes
        self.stored = states + ends + self.prompt_bytes + labels

    def _steps(self, updates: Sequence[int]) -> tuple[int, float]:
        """Trained states of an image, and the mean number of forward passes of its rollout over
        these updates."""
        config = self.config
        passes = self.config.rollout.steps
        if self.keeps.noise_levels:  # of latents that are sampled, or else read
            return self.keeps.noise_levels, passes * self.keeps.latents
        trained = [algorithm_class(config).trained_steps(config, update) for update in updates]
        if self.keeps.latents:  # the rollout runs to its end
            return len(trained[0]), passes
        total = sum(steps[-1] + self.keeps.actions for steps in trained)
        return len(trained[0]), total / len(trained)

    def sampling(self) -> Iterator[Phase]:
        model = self.model
        settings = self.config.model
        rollout = self.config.rollout
        # with a cache, prompts are encoded once, one by one
        batch = 1 if settings.text_cache else min(self.prompts, TEXTS_A_PASS)
        meter = model.encoded(batch)
        visiting = settings.offload_text_encoders
        peak = self.prompt_bytes + (size_of(*model.encoders) if visiting else 0) + meter.peak
        flops = 0.0 if settings.text_cache else meter.flops / batch * self.prompts
        yield Phase("text", "sampling", peak, flops)

        if not self.forwards:  # images are read, each once in a run
            peak = self.rollout_bytes + model.read(settings.size)
            yield Phase("VAE encode", "sampling", peak, 0.0)
            return
        batch = min(rollout.batch_size, self.images)
        if self.keeps.taught_images:
            meter = self._teachers(batch)
        else:
            meter = model.forward(batch, Source(STUDENT, rollout.guidance))
        noise = batch * (1 + (self.states if self.sampled_states else 0)) * model.latent
        # stored states are copied once, at the end
        peak = self.rollout_bytes + max(meter.peak + noise, self.sampled_states)
        flops = meter.flops / batch * self.images * self.forwards
        yield Phase("rollout", "sampling", peak, flops, {"rollout.batch_size": batch})

        if self.keeps.images:  # all images of the rollout are held
            meter = model.decoded(batch, settings.decode_batch)
            held = max(meter.peak - batch * model.pixels, self.images * model.pixels)
            sizes = {"model.decode_batch": min(settings.decode_batch, batch)}
            flops = meter.flops / batch * self.images
            yield Phase("VAE decode", "sampling", self.rollout_bytes + held, flops, sizes)

        if self.keeps.ascended:  # the images themselves, and then the candidates
            batch = min(self.keeps.ascended, self.images)
            count = self.keeps.candidates
            kept = judge_kept(self.config)
            meter = model.ascended(batch, settings.gradient_checkpointing, kept)
            decoded = model.decoded(batch, batch)
            held = self.rollout_bytes + (1 + count) * self.images * model.latent
            flops = (meter.flops + count * decoded.flops) / batch * self.images
            sizes = {"gradient.batch": batch}
            yield Phase("reward gradient", "sampling", held + meter.peak, flops, sizes)

    def learning(self) -> Iterator[Phase]:
        config, model = self.config, self.model
        if self.keeps.labels:  # each pair by its teacher, and by the anchor
            batch = min(config.student.label_batch, self.pairs)
            meters = [self._teachers(batch)]
            if model.anchor:
                meters.append(model.forward(batch, model.anchor.source("anchor")))
            flops = sum(meter.flops for meter in meters) / batch * self.pairs * self.keeps.labels
            peak = self.stored + max(meter.peak for meter in meters)
            if config.extrapolated:
                peak += self.pairs * model.latent  # summed in float32
            yield Phase("labels", "labels", peak, flops, {"student.label_batch": batch})
        if self.keeps.noise_levels:  # clean images -> states and velocities, all at once
            # the noise, and the states
            latents = (2 * self.pairs + 3 * self.images) * model.latent
            yield Phase("noising", "learning", self.rollout_bytes + latents, 0.0)
        if config.alarm and self.keeps.images:
            yield self._drift(config.alarm.every)
        yield self._update()

    def _drift(self, every: int) -> Phase:
        """The base's images for some of the rollout, at every check. FLOPs are for one update."""
        config = self.config
        model = self.model
        rollout = self.config.rollout
        images = max(1, math.prod(checked(config)) // self.processes)
        batch = min(rollout.batch_size, images)
        forward = model.forward(batch, Source(model.compared, rollout.guidance))
        decoded = model.decoded(batch, config.model.decode_batch)
        flops = (forward.flops * rollout.steps + decoded.flops) / batch * images / every
        peak = self.stored + max(forward.peak, decoded.peak)
        return Phase("image drift", "alarm", peak + images * (model.latent + model.pixels), flops)

    def _update(self) -> Phase:
        """Both passes of a micro-batch, and the optimizer's step."""
        config = self.config
        model = self.model
        compared = self.keeps.compared
        pairs = self.pairs // config.optimizer.updates_per_rollout
        batch = min(config.optimizer.micro_batch, pairs)
        lora = size(model.student)
        meter = model.updated(batch, config, compared, summed=pairs > batch)
        step = 3 * lora if model.device_type == "cuda" else lora  # gradients, and foreach's copies
        peak = self.stored + max(meter.peak, step)
        costs = [
            model.forward(batch, Source(c.adapter, config.loss_guidance)).flops for c in compared
        ]
        flops = meter.flops - sum((1 - c.share) * f for c, f in zip(compared, costs, strict=True))
        several = config.optimizer.updates_per_rollout > 1
        if model.device_type == "cuda" and compiled(config) and self.keeps.actions and several:
            # log-probabilities by the compiled graph (`Step.learn`)
            flops += model.forward(batch, Source(STUDENT, config.loss_guidance)).flops
        sizes = {"optimizer.micro_batch": batch}
        return Phase("update", "learning", peak, flops / batch * self.pairs, sizes)

    def _teachers(self, batch: int) -> Pass:
        """A batch of the teacher with the highest peak; its FLOPs are the mean of all tasks'."""
        config = self.config
        teachers = self.model.teachers
        assert teachers
        peak = 0
        flops = 0.0
        for task in config.tasks:
            targets = teachers.targets(config.routing[task.name])
            passes = [self.model.forward(batch, source) for source, _ in targets]
            peak = max(peak, *(meter.peak for meter in passes))
            flops += task.weight * sum(meter.flops for meter in passes)
        return Pass(peak, flops / sum(task.weight for task in config.tasks))
