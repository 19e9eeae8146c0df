"""The stage of an evaluation, and its sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from flowalign.config.run import AlarmConfig, BenchmarkConfig, SamplingConfig
from flowalign.config.section import (
    FileName,
    Location,
    Many,
    NotNegative,
    Seconds,
    Section,
    Seed,
    Share,
    Steps,
    did_you_mean,
    null_is_empty,
)
from flowalign.config.stages.base import Judged, Stage, judged_at, same_names
from flowalign.types import Problem


class GivenImages(Section):
    """Images that another program made, in place of a model, and how they were sampled; null = not
    known."""

    images: Location = Field(examples=["outputs/sdxl"])
    """Their folder or file; see docs/evaluation.md."""
    steps: Steps | None = Field(default=None, examples=[40])
    """Denoising steps."""
    guidance: NotNegative | None = Field(default=None, examples=[4.5])
    """CFG scale."""
    seed: Seed | None = Field(default=None, examples=[42])
    """Only if the initial noise is the same as here for this seed."""
    max_sequence_length: Many | None = Field(default=None, examples=[128])
    """Tokens of a prompt, at most."""


Evaluated = Annotated[  # an adapter, or images
    Annotated[Location, Tag("[adapter]")] | Annotated[GivenImages, Tag("[images]")],
    Discriminator(lambda v: "[images]" if isinstance(v, Mapping | GivenImages) else "[adapter]"),
]


class FidelityConfig(Section):
    """Fréchet distance between the features of the images and of reference images."""

    features: Location = Field(default="tiny", examples=["tiny", "my_features:dino"])
    """A CLIP or DINOv2 (`tiny`, a folder, a Hub id), or package.module:function, [B,3,H,W] ->
    [B,D]."""
    reference: Location = Field(default="tiny", examples=["tiny", "data/coco_val2017"])
    """`tiny` (scenes drawn from the benchmarks' own metadata), or a folder of images."""


class ReportConfig(Section):
    """What report.html shows."""

    title: str | None = Field(default=None, examples=["Flow-OPD on the tiny world"])
    """Its heading; null = the name of the base model."""
    images: Annotated[int, Field(ge=0)] = 24
    """Number of prompts of a benchmark whose images are shown, evenly spaced over the set."""


class EvalStage(Stage):
    """An evaluation of the base model and of adapters on it.

    Compare models on the same prompts and seeds: on the tiny world a paired difference has the
    error .004 where the two means have .012 and .014 (README). Judges that share prompts are not
    independent: taken so, the error of their average came out as .62 of the true one.
    """

    command = "flowalign eval"
    stage: Literal["eval"]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Evaluate models."""
    models: dict[FileName, Evaluated | None] = Field(
        default={"base": None}, min_length=1, examples=[{"base": None, "ocr": "runs/ocr/adapter"}]
    )
    """{name: adapter folder, or null for the base model; or images: FOLDER}. All are compared with
    the first. If all are images, no model is loaded."""
    compare: Annotated[dict[str, list[str]], null_is_empty] = Field(
        default={}, examples=[{"student": ["ocr", "merged"]}]
    )
    """{name: other models that it is compared with}, besides the first; null = none."""
    guidance: Annotated[dict[str, NotNegative], null_is_empty] = Field(
        default={}, examples=[{"base_cfg": 4.5}]
    )
    """{name of a model: its CFG scale}, where it is not `sampling.guidance`; null = none."""
    benchmarks: list[BenchmarkConfig] = Field(min_length=1)
    matrix: bool = False
    """Also score the images of each benchmark by the rewards of all others that can: what a model
    trained for one task loses by another's judge. The images are sampled once."""
    sampling: SamplingConfig = SamplingConfig()
    fidelity: FidelityConfig | None = None
    report: ReportConfig = ReportConfig()
    alarm: AlarmConfig | None = AlarmConfig()
    """Of the images that the report shows; null = none."""
    score_seconds: Seconds | None = 1800.0
    """A batch of images is invalid if its reward takes longer; null = no limit."""
    timeout_seconds: Seconds | None = Field(default=None, examples=[7200.0])
    """As train.timeout_seconds of a training run."""
    max_invalid_share: Share = 0.05
    """The evaluation stops without a table if a larger share of a benchmark's images could not be
    scored."""
    keep_images: bool = False
    """Keep every image in <output>/images, so that another reward can score it later; false = keep
    those that the report shows."""

    @property
    def samples(self) -> bool:
        return bool(self.adapters)

    @property
    def adapters(self) -> dict[str, str | None]:
        """{name: adapter, None for the base} of the models that sample."""
        models = self.models.items()
        return {name: a for name, a in models if not isinstance(a, GivenImages)}

    @property
    def given(self) -> dict[str, GivenImages]:
        return {name: g for name, g in self.models.items() if isinstance(g, GivenImages)}

    @property
    def inputs(self) -> dict[str, str]:
        return {f"models.{name}": adapter for name, adapter in self.adapters.items() if adapter}

    def guidance_at(self, key: str) -> float:
        return self.sampling_of(key.removeprefix("models.")).guidance

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """The sampling of a model that costs most: one with an unconditional pass, if there is
        any."""
        return max(map(self.sampling_of, self.models), key=lambda sampling: sampling.guidance != 1)

    def settings_of(self, model: str) -> dict[str, Any]:
        """The settings of a model's images for results.json; None = not known."""
        if images := self.given.get(model):
            size = {"height": self.model.height, "width": self.model.width}
            return images.model_dump(exclude={"images"}) | size
        return self.sampling_of(model).model_dump() | self.model.model_dump(mode="json")

    @property
    def judged(self) -> list[Judged]:
        return judged_at("benchmarks", self.benchmarks, models=len(self.models))

    @property
    def scales(self) -> dict[str, float]:
        scales = {f"guidance.{model}": scale for model, scale in self.guidance.items()}
        return {"sampling.guidance": self.sampling.guidance, **scales}

    def sampling_of(self, model: str) -> SamplingConfig:
        scale = self.guidance.get(model, self.sampling.guidance)
        return self.sampling.model_copy(update={"guidance": scale})

    def problems(self) -> Iterator[Problem]:
        yield from same_names([("models", name) for name in self.models])
        columns = [{b.name, *b.judges} for b in self.benchmarks]
        columns += [{"average"}, {"fidelity"}]  # of every table
        yield from same_names([("benchmarks", name) for names in columns for name in names])
        named = {f"compare.{name}": [name, *others] for name, others in self.compare.items()}
        named["guidance"] = list(self.guidance)
        for key, models in named.items():
            for model in (m for m in models if m not in self.models):
                text = f"no model is named {model!r}.{did_you_mean(model, self.models)}"
                yield Problem(key, f"{text} Possible: {', '.join(self.models)}.")
