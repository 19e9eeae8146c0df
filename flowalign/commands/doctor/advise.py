"""What each stage of a run holds and takes, the sum, and what would make it fit.

If the memory does not suffice, changes of the config are proposed, the cheapest first (`_changes`).
If the hours (`--hours`) do not suffice, a smaller run is proposed. The first cuts are those that
cost the least quality, as measured on the tiny model alone (CUTS). Reasons name pages of docs.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from flowalign.backbone.structure import local_folder
from flowalign.commands.doctor.count import evaluated_images, foreseen, judge_bytes, predict
from flowalign.commands.doctor.pace import DEFAULT_GPU, GPUS, Gpu, Pace, Times, present_gpu, times
from flowalign.commands.findings import fault, note, ok, print_findings
from flowalign.config import ADAPTER, ConfigError, ModelConfig, Stage, parse
from flowalign.training.inputs import Inputs
from flowalign.types import Problem

GIB = 2**30
USABLE_SHARE = 0.92  # of a device's memory that tensors can use; the rest is lost between blocks
CUDA_CONTEXT = 0.6 * GIB  # of CUDA, cuDNN and cuBLAS
LONG = 100  # hours above which a run is noted
WATCHING = 0.05  # of a run's hours: a larger share for the judges of evaluation.watch is noted


class Device(NamedTuple):
    """The device that a run is planned for: the number of GPUs, and, unless it is the one here,
    their name in GPUS, their memory in GiB and their rate in TFLOP/s."""

    gpus: int
    gpu: str | None = None
    memory: float | None = None
    tflops: float | None = None


@dataclass(frozen=True)
class Forecast:
    """A stage, and its prediction. estimate: None for a merge, and where shapes are not known."""

    name: str
    stage: Stage
    device: Device
    kind: str = "cuda"  # type of the device
    inputs: Inputs = field(default_factory=Inputs)
    models: dict[str, Any] = field(default_factory=dict)  # as for `predict`
    estimate: Any = None
    unknown: str = ""  # why there is no estimate
    measured: Pace | None = None  # as given to `timed`
    pace: Pace | None = None  # None: no rate is known, or `timed` was not called

    def predicted(self) -> Forecast:
        """This forecast with the estimate of its stage. Raises LookupError if the shapes of the
        model are not known."""
        estimate = predict(
            self.stage, self.inputs, device_type=self.kind, processes=self.device.gpus,
            models=self.models,
        )  # fmt: skip
        return replace(self, estimate=estimate)

    def after(self, *changes: str) -> Forecast:
        """The forecast after these changes of the config. Its pace is that of the changed model."""
        stage = parse(self.stage.model_dump(mode="json"), changes, stage=type(self.stage))
        changed = replace(self, stage=stage).predicted()
        measured = self.measured
        if measured:
            measured = measured.stored(self.stage.model.quantization, stage.model.quantization)
        return changed.timed(measured)

    @property
    def gpu(self) -> Gpu | None:
        """The GPU of the table that is planned for: the one that is asked for or here; where torch
        sees none, DEFAULT_GPU. None: a CPU, or a GPU that is not in the table."""
        if self.kind == "cpu":
            return None
        if self.device.gpu or not torch.cuda.is_available():
            return GPUS[self.device.gpu or DEFAULT_GPU]
        return present_gpu()

    def timed(self, measured: Pace | None = None) -> Forecast:
        """This forecast with a pace: from --tflops, measured here, or of the table."""
        if tflops := self.device.tflops:
            return replace(self, pace=Pace.constant(tflops * 1e12, f"{tflops:g} TFLOP/s, --tflops"))
        if measured and not self.device.gpu:
            return replace(self, measured=measured, pace=measured)
        if not (self.estimate and self.gpu):
            return replace(self, pace=None)
        return replace(self, pace=Pace.of_gpu(self.gpu, self.estimate))

    @cached_property
    def times(self) -> Times | None:
        return times(self.estimate, self.pace) if self.estimate and self.pace else None

    @property
    def hours(self) -> float:
        return self.times.hours if self.times else 0.0

    @property
    def watching(self) -> float:
        """The share of the hours that the judges of evaluation.watch take."""
        stage: Any = self.stage
        if not (self.times and self.hours and stage.trains and stage.watched):
            return 0.0
        images = self.estimate.evaluated
        watched = sum(images[judged.name] for judged in stage.watched)
        seconds = self.times.evaluation * watched / sum(images.values())
        return self.estimate.evaluations * seconds / (3600 * self.hours)

    @cached_property
    def memory(self) -> int:
        """Bytes of the device: from --memory, of the planned GPU, or of this machine."""
        if known := self.device.memory or (self.gpu and self.gpu.memory):
            return int(known * GIB)
        if self.kind == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return torch.cuda.get_device_properties(0).total_memory

    @cached_property
    def advice(self) -> list[tuple[str, Forecast]]:
        """(a helpful change, the forecast after it and all before) until the memory suffices or
        nothing helps."""
        steps = list[tuple[str, Forecast]]()
        now = self
        while (peak := now.estimate.peak) > usable(self.memory, self.kind):
            tried = ((change, now.after(change)) for change in _changes(now))
            helpful = next((pair for pair in tried if pair[1].estimate.peak < peak), None)
            if helpful is None:
                break
            steps.append(helpful)
            now = helpful[1]
        return steps

    @property
    def fitting(self) -> Forecast:
        """The forecast after the changes of `advice`; itself without any."""
        return self.advice[-1][1] if self.estimate and self.advice else self

    @property
    def too_large(self) -> bool:
        """Whether the predicted peak does not fit in the memory."""
        return bool(self.estimate) and self.estimate.peak > usable(self.memory, self.kind)

    def findings(self) -> Iterator[Problem]:
        if self.unknown:
            yield note("memory", f"no prediction: {self.unknown}")
        if self.estimate is None:
            return
        yield from fits(self)
        if unknown := judge_bytes(self.stage)[2]:
            yield note("memory", f"not included: {', '.join(unknown)}")
        if self.times is None:
            yield note("time", "the rate of this device is not known; --gpu or --tflops says it")
        elif self.times.unknown:
            yield note("time", f"not included: {', '.join(self.times.unknown)}")
        if self.watching > WATCHING:
            text = f"{self.watching:.0%} of the hours are for judges that are not trained"
            remedy = "raise evaluation.every, or lower evaluation.watch.*.limit"
            yield note("watch", f"{text}; {WATCHING:.0%} are enough: {remedy}")
        if self.times and self.stage.trains and self.device.gpus > 1:
            longest = max(self.times.update, self.times.evaluation)
            warned = 60 * math.ceil((1.5 * longest + 30) / 60)  # hours may be too low by a third
            text = f"at most {longest:.0f} s, an update or an evaluation, pass before a run can end"
            yield note("queue", f"{text}: sbatch --signal=B:USR1@{warned}")

    def show(self) -> None:
        """Print what is resident, and the peak, FLOPs and seconds of each phase."""
        if not (estimate := self.estimate):
            return
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
        if self.kind == "cuda" and estimate.compiled:
            console.print("Seconds are those of compiled blocks, memory that of eager ones.")


def forecasts(stages: Mapping[str, Stage], device: Device, inputs: Inputs) -> list[Forecast]:
    """The prediction of each stage, without its times. inputs: what was opened of the stages; keeps
    what they will write."""
    listed = []
    planned = device.gpu or device.memory or device.tflops or torch.cuda.is_available()
    for name, stage in stages.items():
        # for this machine's CPU only where the run itself would be on it
        kind = "cuda" if planned or not is_here(stage.model) else "cpu"
        one = Forecast(name, stage, device, kind, inputs)
        adapter = stage.folder.adapter
        try:
            if (stage.trains or stage.merges) and not (adapter / ADAPTER).is_file():
                inputs.pending[str(adapter)] = foreseen(stage, inputs)
            listed.append(one.predicted() if stage.samples else one)
        except LookupError as error:
            listed.append(replace(one, unknown=str(error.args[0])))
    return listed


def is_here(model: ModelConfig) -> bool:
    return local_folder(model.id, model.revision) is not None


# Memory ------------------------------------------------------------------------------------------


def usable(memory: float, device_type: str) -> float:
    """Bytes that tensors can use on a device with `memory` bytes."""
    return memory * USABLE_SHARE - (CUDA_CONTEXT if device_type == "cuda" else 0)


def fits(forecast: Forecast) -> Iterator[Problem]:
    """The problem of a peak that does not fit in the memory, and the changes that would make it
    fit. It is no fault if the GPU is neither here nor named by the user."""
    device, gpu, size = forecast.device, forecast.gpu, forecast.memory
    assumed = bool(gpu) and not (device.gpu or device.memory or torch.cuda.is_available())
    limit = usable(size, forecast.kind)
    now = forecast.estimate
    text = f"{now.peak / GIB:.3g} GiB in {now.worst.name}; "
    text += f"{gpu.title if gpu and assumed else 'the device'} has "
    text += f"{size / GIB:.3g} GiB, of which tensors can use {limit / GIB:.3g}"
    if not forecast.too_large:
        yield ok("memory", f"at most {text}")
        return
    yield (note if assumed else fault)("memory", f"does not fit: {text}. Changes:")
    for change, after in forecast.advice:
        now = after.estimate
        end = f"still too much, in {now.worst.name}" if after.too_large else "fits"
        yield note(f"  {change}", f"{now.peak / GIB:.3g} GiB, {end}")
    if forecast.fitting.too_large:
        work = "the text encoders at work" if now.worst.name == "text" else now.worst.name
        parts = {**now.parts, work: now.worst.bytes}
        largest = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
        listed = ", ".join(f"{name}: {parts[name] / GIB:.3g} GiB" for name in largest)
        yield note("", f"  no other setting helps; use a larger device. The most is of {listed}.")


def _changes(forecast: Forecast) -> Iterator[str]:
    """Changes that are possible now, the cheapest first: the worst phase, then what is resident,
    then what a run can do without."""
    model = forecast.stage.model
    estimate = forecast.estimate
    worst = estimate.worst
    sizes = {key: size for key, size in worst.sizes.items() if size > 1}
    limit = usable(forecast.memory, forecast.kind)
    share = (limit - estimate.resident) / worst.bytes  # of the phase's memory that is available
    if worst.name == "update" and not model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    if share > 0.05:  # smaller batches can suffice
        for key, size in sizes.items():
            yield f"{key}={max(1, min(size - 1, int(size * share * 0.9)))}"  # 0.9: some slack
    if not model.offload_text_encoders:
        yield "model.offload_text_encoders=true"
    if model.dtype == "float32":  # only from here on is something else learned
        yield "model.dtype=bfloat16"
    if model.quantization is None:
        yield f"model.quantization={'nf4' if forecast.kind == 'cuda' else 'fp8'}"
    if worst.name == "text" and model.text_cache is None:
        yield "model.text_cache=outputs/text_cache"
    for key in sizes:
        yield f"{key}=1"
    if worst.name == "image drift":
        yield "alarm=null"


# Hours -------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """A key that can be lowered to `floor`, and the reason for its place in CUTS. taught: the floor
    for a student of teachers; None = `floor`, 0 = it is not cut."""

    key: str
    floor: Any
    why: str
    taught: int | None = None


CUTS = (
    Cut("benchmarks.*.images", 1, "images of one prompt resemble each other (log)"),
    Cut("benchmarks.*.limit", 128, "standard errors grow: at most .044 of a share"),
    Cut("evaluation.prompts", 64, "the best update is chosen less surely: errors of at most .063"),
    Cut("student.noise_levels.select", "high_noise", "one such level was as good as all (log)"),
    Cut("student.noise_levels.count", 1, "one random level was .005 behind three (log)"),
    Cut(
        "rollout.prompts", 8, "a quarter of the images lost as much as half the rollouts (log)", 128
    ),
    Cut("rollout.group_size", 8, "groups of 8 learn (results); larger ones were not compared"),
    Cut("{stage}.noise_levels", 1, "1 of 8 cost a quarter of the gain of an OCR teacher (log)"),
    Cut("train.updates", 100, "half of the rollouts cost a quarter of the gain (log)"),
    Cut("rollout.window", "[0,4]", "4 of 10 steps were enough (log); all were not compared", 0),
    Cut("train.updates", 30, "the tiny model's teachers learn most in 30 (results)"),
    Cut("rollout.steps", 6, "not measured: the reward sees other images than the users do"),
)


def show_total(listed: Sequence[Forecast]) -> None:
    """Print a row for each stage, after the changes with which it fits in the memory (`fits`)."""
    changed = [f.name for f in listed if f.fitting is not f]
    listed = [f.fitting for f in listed]
    numbers = ("updates", "images", "s/update", "held-out")
    table = Table("stage", "peak GiB", *numbers, "hours", "GPU-hours")
    gpus = listed[0].device.gpus
    for f in listed:
        peak = f"{f.estimate.peak / GIB:.1f}" if f.estimate else "-"
        if (t := f.times) and not f.too_large:
            drawn = [str(f.estimate.updates), f"{f.stage.images:,}"]
            numbers = [*drawn, f"{t.update:.3g}", str(f.estimate.evaluations)]
            table.add_row(f.name, peak, *numbers, *map(shown_hours, (t.hours, t.hours * gpus)))
            continue
        why = "not predicted" if f.stage.samples else "minutes, no GPU"
        why = "does not fit" if f.too_large else why
        table.add_row(f.name, peak, "-", "-", "-", "-", why, "-")
    if len(listed) > 1:
        table.add_section()
        hours = 0.0 if any(f.too_large for f in listed) else sum(f.hours for f in listed)
        total = [*map(shown_hours, (hours, hours * gpus))] if hours else ["not predicted", "-"]
        images = sum(f.stage.images for f in listed)
        table.add_row("sum", "", "", f"{images:,}", "", "", *total)
    console = Console(highlight=False, width=max(110, Console().width))
    console.print(table)
    if changed:
        text = f"with the changes for memory: {', '.join(changed)}"
        console.print(text, soft_wrap=True, markup=False)
    for source in dict.fromkeys(f.pace.source for f in listed if f.times and f.pace):
        text = f"on {gpus} x {source}"
        if gpus > 1:
            text += f", taken as {gpus} times as fast as one"
        console.print(text, soft_wrap=True)


def shown_hours(hours: float) -> str:
    return f"{hours:.2f}" if hours < 10 else f"{hours:.0f}"


def within(config: Any, listed: Sequence[Forecast], limit: float | None) -> bool:
    """Print the hours of all stages, and the changes that hours and memory need, as arguments of
    `flowalign train`. Returns False if the hours are a fault."""
    fitting = [forecast.fitting for forecast in listed]
    total = sum(forecast.hours for forecast in fitting)
    changes = memory_changes(listed)
    text = f"{total:.2f} h"
    if any(changes.values()):
        text += " with the changes for memory"
    if too_large := [forecast.name for forecast in fitting if forecast.too_large]:
        total = 0.0  # they take no hours
        if limit is not None:
            print_findings(
                [fault("time", f"no hours: {', '.join(too_large)} does not fit in the memory")]
            )
    elif limit is None:
        if total > LONG:
            print_findings([note("time", f"{text}. --hours 24 proposes a smaller run")])
    elif not any(forecast.times for forecast in listed):
        print_findings(
            [fault("time", "--hours needs a rate, not known here: add --gpu or --tflops")]
        )
    else:
        print_findings([(ok if total <= limit else fault)("time", f"{text} of {limit:g}")])
        for name, texts in cuts(fitting, limit).items():
            changes[name] = [*changes[name], *texts]
    if any(changes.values()):
        print("all of these changes, as arguments of `flowalign train` (or of `init --force`):")
        print(shlex.join(as_arguments(config, changes)))
    return limit is None or 0 < total <= limit


def memory_changes(listed: Sequence[Forecast]) -> dict[str, list[str]]:
    """{stage: the changes that its memory needs}"""
    return {f.name: [change for change, _ in f.advice] for f in listed if f.estimate}


def cuts(listed: Sequence[Forecast], limit: float) -> dict[str, list[str]]:
    """{stage: changes} after which all stages together take at most so many hours, if CUTS suffice;
    prints them. The longest stage that can be cut is cut next, in the order of CUTS, and no further
    than needed."""
    now = {forecast.name: forecast for forecast in listed if forecast.times}
    left = {name: iter(CUTS) for name in now}
    changes = {name: list[str]() for name in now}
    while (over := sum(f.hours for f in now.values()) - limit) > 0 and left:
        name = max(left, key=lambda name: now[name].hours)
        forecast = now[name]
        cut = next(left[name], None)
        if cut is None:
            del left[name]
            continue
        with suppress(ConfigError, LookupError):  # another key needs more; there is no value
            choices = _choices(cut, forecast)
            enough = forecast.hours - over
            index = bisect_right(choices, enough, key=lambda c: forecast.after(*c).hours)  # noqa: B023
            texts = choices[max(index - 1, 0)]
            after = forecast.after(*texts)
            if after.hours < forecast.hours:
                took = f"{' '.join(texts)}: {shown_hours(after.hours)} h. {cut.why}"
                print_findings([note(f"  {name}", took)])
                now[name] = after
                changes[name] += texts
    if over > 0:
        print_findings([note("", f"  {limit + over:.2f} h are the least: use a larger GPU")])
    return changes


def as_arguments(config: Any, changes: Mapping[str, Sequence[str]]) -> list[str]:
    """Changes by stage, as changes of the whole config. The last change of a key counts."""
    last = dict[str, list[str]]()
    for name, texts in changes.items():
        last[name] = list({text.partition("=")[0]: text for text in texts}.values())
    if not config.is_recipe:
        return [text for texts in last.values() for text in texts]
    settings = {name: config.stages[name].get("set", []) for name in last}
    sets = {n: json.dumps([*settings[n], *texts]) for n, texts in last.items() if texts}
    return [f"stages.{name}.set={texts}" for name, texts in sets.items()]


def _choices(cut: Cut, forecast: Forecast) -> list[list[str]]:
    """Possible changes of a stage by a cut, from the floor up. `limit` is only for sets of texts:
    the first rows of a .jsonl may all have one tag, as in GenEval."""
    stage: Any = forecast.stage
    head, star, leaf = cut.key.format(stage=stage.stage).partition(".*.")
    try:
        current = attrgetter(head)(stage)
    except AttributeError:
        return []
    floor = cut.floor
    if stage.trains and not stage.learns_from_rewards and cut.taught is not None:
        floor = cut.taught
    if not floor:
        return []
    if isinstance(floor, str):
        return [[f"{head}={floor}"]] if current in ("all", None) else []
    now = {head: current}
    if star:
        now = {}
        whole = ".jsonl" if leaf == "limit" else "/"
        for number, benchmark in enumerate(current):
            if not benchmark.prompts.endswith(whole):
                now[f"{head}.{number}.{leaf}"] = getattr(benchmark, leaf)
    unit = 1  # of what all processes and optimizer steps share
    if cut.key in ("rollout.prompts", "rollout.group_size"):
        unit = stage.optimizer.updates_per_rollout * forecast.device.gpus
    every = max(evaluated_images(stage, forecast.inputs).values(), default=0)  # for None
    largest = max((value or every for value in now.values()), default=0)
    least = -(-floor // unit) * unit
    return [
        [f"{key}={value}" for key, v in now.items() if not isinstance(v, int) or v > value]
        for value in range(least, largest, unit)
    ]
