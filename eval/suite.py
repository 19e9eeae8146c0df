"""Evaluation: held-out prompts -> images with fixed noise -> scores -> an EvalReport.

The noise of an image depends only on the seed, the index of its prompt in the set and the number of
its copy. So all models see the same noise, whatever the batch size or the number of processes.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, product
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from flowalign.backbone import Backbone
from flowalign.config import BenchmarkConfig, ConfigError, ModelConfig, RewardConfig, SamplingConfig
from flowalign.config.section import Size
from flowalign.config.stages.evaluation import GivenImages
from flowalign.eval.images import ImagesError, assign, check_images, find_images
from flowalign.eval.scores import image_score
from flowalign.eval.stats import average, headline_row, lost, part_of, rows_of
from flowalign.eval.store import ImageKey, Store, is_valid
from flowalign.report.pictures import png
from flowalign.rewards import RewardBase, RewardSpec
from flowalign.rewards.scoring import AsyncScorer, TaskRewards
from flowalign.system.devices import current
from flowalign.system.images import eight_bits
from flowalign.training.data import spread
from flowalign.training.inputs import Inputs
from flowalign.training.rollout import generate
from flowalign.training.run.processes import missing_steps
from flowalign.types import (
    EvalImage,
    EvalReport,
    EvalRow,
    Example,
    ImageScore,
    Problem,
    PromptBatch,
    Scores,
)

log = logging.getLogger("flowalign")


class EvaluationError(RuntimeError):
    """Too many images of an evaluation have no score: which, why, what to do."""


@dataclass(frozen=True)
class Benchmark:
    """A named set of prompts and the reward that scores their images."""

    name: str
    prompts: PromptBatch
    reward: RewardBase
    copies: int = 1  # images per prompt
    source: str | None = None  # the name of the images, if other benchmarks score them too

    @property
    def image_set(self) -> str:
        """The name of the images that it judges."""
        return self.source or self.name

    @property
    def headline(self) -> str | None:
        """The part of the scores that is the benchmark's number; None = the value itself."""
        return self.reward.headline

    def image(self, key: ImageKey) -> EvalImage:
        """One of the images that it judges."""
        index, copy = key
        return EvalImage(index, copy, self.prompts.prompts[index], self.prompts.metadata[index])


@dataclass(frozen=True)
class ImageSet:
    """Images that are sampled once, and the benchmarks that score them."""

    name: str
    prompts: PromptBatch
    copies: int = 1  # images per prompt
    judges: tuple[Benchmark, ...] = ()
    files: Mapping[str, Mapping[ImageKey, Path]] = field(
        default_factory=dict
    )  # existing images, by model
    size: Size | None = None  # of the images, if known from a model or from files

    @staticmethod
    def of(benchmark: Benchmark) -> ImageSet:
        """The images of a benchmark that shares them with no other."""
        return ImageSet(benchmark.name, benchmark.prompts, benchmark.copies, (benchmark,))


def image_sets(
    configs: Sequence[BenchmarkConfig],
    config_key: str,
    model: ModelConfig | None,
    given: Mapping[str, GivenImages],
    inputs: Inputs,
) -> tuple[list[ImageSet], list[Problem]]:
    """The image sets of benchmark configs, with prompts and without judges; and the problems:
    images that are missing, too many, broken or of several sizes.

    config_key: the key of the list. model: gives the image size; None = the size of the images in
    `given`, {model: images that another program made}. inputs: reads the prompts.
    """
    problems = list[Problem]()
    sets = []
    by_prompt = {}
    for name, source in given.items():
        try:
            by_prompt[name] = find_images(source.images)
        except ImagesError as error:
            problems.append(Problem(f"models.{name}", str(error)))
    size = model.size if model else None
    for index, config in enumerate(configs):
        prompts = inputs.prompts(config.prompts, config.name)
        files = {}
        place = f"{config_key}.{index}"
        limit = config.limit
        for name, images in by_prompt.items():
            try:
                files[name] = assign(images, prompts, limit, config.images, place)
                size = check_images(files[name].values(), size)
            except ImagesError as error:
                problems.append(Problem(f"models.{name}", f"{config.name}: {error}"))
        tags = [str(row.get("tag")) for row in prompts.metadata]
        few = len({*tags[:limit]})
        many = len({*tags})
        if few < many:
            count = f"the first {limit} of {len(tags)} prompts have {few} of {many} tags"
            log.warning("%s.limit: %s.", place, count)
        prompts = prompts.select(range(len(prompts))[:limit])
        sets.append(ImageSet(config.name, prompts, config.images, (), files, size))
    return sets, problems


def matrix_benchmarks(configs: Sequence[BenchmarkConfig], inputs: Inputs) -> list[BenchmarkConfig]:
    """The benchmarks with further `rewards`: those of other benchmarks that can score their
    prompts. (GenEval needs metadata, OCR a text in quotes.)"""
    others = {name: reward for config in configs for name, reward in config.judges.items()}
    extended = []
    for config in configs:
        batch = inputs.prompts(config.prompts, config.name)
        more = dict[str, RewardConfig]()
        for name, reward in others.items():
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                spec = RewardSpec(reward.name, reward.options)
                spec.check_prompts(batch.prompts, batch.metadata)
                if name not in config.judges:
                    more[name] = reward
        extended.append(config.model_copy(update={"rewards": config.rewards | more}))
    return extended


def build_sets(
    configs: Sequence[BenchmarkConfig],
    config_key: str,
    device: torch.device,
    model: ModelConfig | None,
    inputs: Inputs,
    given: Mapping[str, GivenImages] | None = None,
) -> list[ImageSet]:
    """The `image_sets` with their rewards on a device. Raises ConfigError for their problems and
    for rewards that cannot be built."""
    sets, problems = image_sets(configs, config_key, model, given or {}, inputs)
    if problems:
        raise ConfigError(problems)
    # only now: building a reward may load a large model; several benchmarks may have the same
    built = dict[str, RewardBase]()
    for index, (config, images) in enumerate(zip(configs, sets, strict=True)):
        source = config.name if config.rewards else None
        judges = []
        for name, (key, options) in zip(config.judges, config.reward_keys.items(), strict=True):
            try:
                text = options.model_dump_json()
                if text not in built:
                    built[text] = RewardSpec(options.name, options.options).build(device)
                judges.append(Benchmark(name, images.prompts, built[text], images.copies, source))
            except (ImportError, ValueError, OSError) as error:
                problems.append(Problem(f"{config_key}.{index}.{key}", str(error)))
        sets[index] = replace(images, judges=tuple(judges))
    if problems:
        raise ConfigError(problems)
    return sets


def run(
    backbone: Backbone,
    sets: Sequence[ImageSet],
    settings: SamplingConfig,
    accelerator: Accelerator | None = None,
    *,
    seconds: float | None = None,
    max_invalid_share: float = 1.0,
    shown: int = 0,
    whole: Container[str] = (),
) -> EvalReport:
    """Score every benchmark; with an accelerator each process takes a share of the prompts.

    seconds: as in `judge_set`. max_invalid_share: a benchmark that loses more images is `lost`.
    shown: the number of prompts per set, evenly spaced, whose first image is an example of the
    report. whole: the sets whose first images are all in its pictures.
    """
    rows = list[EvalRow]()
    reasons = dict[str, str]()
    examples = list[Example]()
    whole_sets = dict[str, Mapping[str, bytes]]()
    for images in sets:
        count = len(images.prompts)
        keep = count if images.name in whole else shown
        results = judge_set(backbone, images, settings, accelerator, keep=keep, seconds=seconds)
        for benchmark, judged in zip(images.judges, results, strict=True):
            rows += rows_of(benchmark, judged.scores)
            if reason := lost(benchmark, judged.scores, max_invalid_share):
                reasons[benchmark.name] = reason
        first = images.judges[0]  # its scores are shown with the images
        judged = results[0]
        numbers = judged.pictured(images.copies)
        pictures = dict(zip(numbers, judged.pictures[:: images.copies], strict=True))
        for number in spread(count, shown):
            score = judged.scores[number * images.copies]
            value = score.number(part_of(first))
            examples.append(Example(score.image.prompt, value, pictures[number]))
        if images.name in whole:
            prompts = images.prompts.prompts
            whole_sets[images.name] = {prompts[i]: picture for i, picture in pictures.items()}
    return EvalReport(rows, reasons, examples, whole_sets)


def headline(report: EvalReport, benchmarks: Sequence[Benchmark]) -> EvalRow:
    """The mean over the benchmarks of their numbers; NaN if one of them is lost."""
    if any(benchmark.name in report.lost for benchmark in benchmarks):
        return EvalRow("average", "mean", math.nan, math.nan, 0)
    return average([headline_row(benchmark, report.rows) for benchmark in benchmarks])


def environment() -> dict[str, str]:
    """What the numbers were measured with: versions, and the device."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("diffusers", "transformers", "peft", "rapidocr", "paddleocr", "onnxruntime"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    device = current() or torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    return {**versions, "device": name}


# Sampling and scoring ----------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgedImages:
    """The images of a benchmark: one score each, in order, and some of the pictures. The copies of
    a prompt follow one another."""

    scores: list[ImageScore]
    pictures: list[bytes]  # PNG files of the images of some prompts, evenly spaced: `pictured`
    features: Tensor | None = None  # [N,D] on the CPU, if they were asked for
    taken_over: int = field(default=0, compare=False)  # scores that the store had

    def pictured(self, copies: int) -> list[int]:
        """The indices of the prompts with pictures, where there are `copies` images per prompt."""
        return spread(len(self.scores) // copies, len(self.pictures) // copies)


def judge_set(
    backbone: Backbone | None,
    images: ImageSet,
    settings: SamplingConfig,
    accelerator: Accelerator | None = None,
    *,
    keep: int = 0,
    features: Callable[[Tensor], Tensor] | None = None,
    advance: Callable[[int], None] = lambda images: None,
    seconds: float | None = None,
    store: Store | None = None,
) -> list[JudgedImages]:
    """Sample the images of every prompt and score them: one result per judge, in their order.

    The result is the same on every process. A batch is scored while the next one is sampled; one
    that takes a judge longer than `seconds` is invalid (None = wait for ever). keep: number of
    prompts whose pictures are kept, evenly spaced. features: images [B,3,H,W] -> [B,D]. advance is
    called with the number of images of each batch. store: what it holds is neither sampled nor
    scored again. backbone: None = the store holds all images.
    """
    world, rank = (accelerator.num_processes, accelerator.process_index) if accelerator else (1, 0)
    owner = backbone or accelerator
    assert owner, "without a model, the accelerator says the device"
    batches = _share(images, settings.batch_size, world, rank)
    order = [key for keys in batches.values() for key in keys]
    known: dict[str, dict[ImageKey, ImageScore]] = {judge.name: {} for judge in images.judges}
    if store:
        known = store.read(images.judges, order)
    had = [sum(map(is_valid, scores.values())) for scores in known.values()]
    scoring = _Scoring(images.judges, known, store, seconds)
    extra = missing_steps(len(batches), backbone.sharded) if backbone else 0  # before any forward
    pictured = {*spread(len(images.prompts), keep)}
    pictures, vectors = list[bytes](), list[Tensor]()
    for number, keys in enumerate(batches.values()):
        unscored = {
            judge.name: _unscored(judge, known[judge.name], keys) for judge in images.judges
        }
        needed = {key for key in keys if features or key[0] in pictured}.union(*unscored.values())
        left = [*batches][number:]
        pixels = _pixels(backbone, owner.device, images, settings, left, keys, needed, store)
        scoring.submit(unscored, pixels)
        pictures += [png(pixels[key]) for key in keys if key[0] in pictured]
        if features:
            vectors.append(_vectors(torch.stack([pixels[key] for key in keys]), features))
        advance(len(keys))
    # a sharded base needs all processes in every forward pass: sample once more, and drop it
    for _ in range(extra):
        assert backbone
        generate(backbone, images.prompts.select([0]), settings)
    scoring.finish()
    scores = [[known[judge.name][key] for key in order] for judge in images.judges]
    if world > 1:  # objects, not tensors: a process without prompts does not know the width of [D]
        scores = [gather_object(by_judge) for by_judge in scores]
        pictures, vectors = gather_object(pictures), gather_object(vectors)
        had = [sum(gather_object([count])) for count in had]
    joined = torch.cat(vectors) if vectors else None
    return [JudgedImages(s, pictures, joined, count) for s, count in zip(scores, had, strict=True)]


def _share(images: ImageSet, size: int, world: int, rank: int) -> dict[range, list[ImageKey]]:
    """The batches of a process {prompts: all their images}: at most `size` where that is possible.

    The batches are the same for any number of processes, and so is their arithmetic.
    """
    total = len(images.prompts)
    step = max(1, size // images.copies)  # more copies than `size` are still one batch
    batches = [range(start, min(start + step, total)) for start in range(0, total, step)]
    # with more processes than batches, some have none
    share = batches[rank * len(batches) // world : (rank + 1) * len(batches) // world]
    return {batch: [*product(batch, range(images.copies))] for batch in share}


def _unscored(
    judge: Benchmark, known: Mapping[ImageKey, ImageScore], keys: list[ImageKey]
) -> list[ImageKey]:
    """The images of a batch that need scores. A batch that was interrupted is judged completely,
    because a score's last bits depend on the batch. Images whose reward failed are judged alone,
    because judges may cost money; a groupwise judge gets all images of their prompt."""
    missing = [key for key in keys if not is_valid(known.get(key))]
    if judge.reward.groupwise:
        prompts = {prompt for prompt, _ in missing}
        return [key for key in keys if key[0] in prompts]
    return keys if any(key not in known for key in missing) else missing


def _pixels(
    backbone: Backbone | None,
    device: torch.device,
    images: ImageSet,
    settings: SamplingConfig,
    left: Sequence[range],
    keys: Sequence[ImageKey],
    needed: set[ImageKey],
    store: Store | None,
) -> dict[ImageKey, Tensor]:
    """The needed images [3,H,W] of a batch, on the device, at 8 bits a channel, so that scores from
    memory and from a file are equal. Images that the store saves are written. left: the prompts of
    this batch and of the later ones."""
    stored = {key: store.load(key) for key in needed} if store else {}
    # a GPU may round k / 255 differently from the CPU that read the file
    pixels = {k: eight_bits(image.to(device)) for k, image in stored.items() if image is not None}
    absent = needed - pixels.keys()
    absent |= {key for key in keys if store and store.saves(key) and not store.has(key)}
    if absent:
        assert backbone, f"the store of {images.name} lacks images"
        batches = [images.prompts.select(prompts) for prompts in left]
        # all batches at once, so that the encoders come to the device a single time
        backbone.text.prepare([batch.prompts for batch in batches])
        # the complete batch: the same arithmetic as in an uninterrupted run
        sampled = generate(backbone, batches[0], settings, left[0], images.copies)
        made = dict(zip(keys, eight_bits(sampled), strict=True))
        pixels |= {key: made[key] for key in absent}
        for key in absent:
            if store:
                store.save(key, made[key])
    return pixels


def _vectors(images: Tensor, features: Callable[[Tensor], Tensor]) -> Tensor:
    """Features [B,D] on the CPU; NaN for images that are not finite, which the encoder never
    sees."""
    finite = images.isfinite().flatten(1).all(1)
    vectors = features(images.where(finite[:, None, None, None], 0)).float().cpu()
    return vectors.where(finite.cpu()[:, None], torch.nan)


class _Scoring:
    """Scores batches while the next ones are sampled. known {judge: {image: its score}}: the scores
    in the store; new scores are added here and in the store."""

    def __init__(
        self,
        judges: Sequence[Benchmark],
        known: Mapping[str, dict[ImageKey, ImageScore]],
        store: Store | None,
        seconds: float | None,
    ) -> None:
        self.judges = judges
        self.known = known
        self.store = store
        # judges take turns: models are not thread safe, and one at a time fills the memory
        by_name = TaskRewards({judge.name: judge.reward for judge in judges})
        self._scoring = AsyncScorer(by_name, seconds)
        self._submitted: list[tuple[Benchmark, list[ImageKey]]] = []

    def submit(
        self, unscored: Mapping[str, list[ImageKey]], pixels: Mapping[ImageKey, Tensor]
    ) -> None:
        """Start to score a batch when the one before is done."""
        if not any(unscored.values()):
            return
        self._collect()  # first: otherwise images would fill the memory behind a slow reward
        for judge in self.judges:
            groups = [unscored[judge.name]]
            if judge.reward.groupwise:  # a set may list a prompt twice
                groups = [[*keys] for _, keys in groupby(*groups, key=lambda key: key[0])]
            for keys in filter(None, groups):
                prompts = judge.prompts.select([prompt for prompt, _ in keys])
                images = torch.stack([pixels[key] for key in keys])
                self._scoring.submit(images, replace(prompts, tasks=[judge.name] * len(keys)))
                self._submitted.append((judge, keys))

    def finish(self) -> None:
        self._collect()
        self._scoring.discard()

    def _collect(self) -> None:
        submitted = self._submitted
        self._submitted = []
        for (judge, keys), scores in zip(submitted, self._scoring.results(), strict=True):
            # a batch or group also holds images that had a score: the first one counts
            known = self.known[judge.name]
            new = {}
            for i, key in enumerate(keys):
                if not is_valid(known.get(key)):
                    new[key] = _score(judge, key, scores, i)
            known |= new
            if self.store:
                self.store.append(judge.name, [*new.values()])


def _score(judge: Benchmark, key: ImageKey, scores: Scores, i: int) -> ImageScore:
    """Image i of the scores of a batch."""
    numbers = {"value": float(scores.value[i])}
    for name, part in scores.parts.items():
        numbers[name] = float(part[i])
    return image_score(judge.image(key), numbers, scores.reasons.get(i), judge.reward.counts)
