"""GenEval as a reward: a detector finds objects and colours, `geneval_judge` judges them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError, field_validator
from torch import Tensor

from flowalign.rewards import load, with_device
from flowalign.rewards.base import VIT_L, Cost, RewardBase
from flowalign.rewards.geneval_judge import COLORS, Verdict, judge, partial_credit
from flowalign.rewards.options import Device, check_call, hub_files
from flowalign.rewards.weights import hub_file
from flowalign.system.escape import shown
from flowalign.system.hub_files import HubFiles
from flowalign.types import Detections, Detector, Metadata, Scores

DETECTORS: dict[str, str] = {
    "tiny": "flowalign.backbone.tiny.detector:TinyDetector",
    "mask2former": "flowalign.rewards.mask2former:Mask2Former",
}
MASK2FORMER = "facebook/mask2former-swin-small-coco-instance"
# where open_clip has the weights "openai" of ViT-L-14 from
OPEN_CLIP = "timm/vit_large_patch14_clip_224.openai/open_clip_model.safetensors"
# the benchmark's thresholds, see `judge`
RULES: dict[str, Any] = {
    "threshold": 0.3,
    "counting_threshold": 0.9,
    "max_objects": 16,
    "max_overlap": 1.0,
    "position_threshold": 0.1,
}


class Exclusion(BaseModel, strict=True):
    """An exclude clause of GenEval's metadata: a class, and the number that is too many of it."""

    name: str = Field(alias="class")
    count: Annotated[int, Field(ge=1, le=1000)]


class Clause(Exclusion):
    """An include clause: a class, how many of it, and what else its objects must show."""

    color: str = ""
    position: tuple[Literal["left of", "right of", "above", "below"], int] = None  # type: ignore
    """The relation, and the index of the clause that it refers to. Null is refused: `judge` looks
    whether the key is there."""


class Form(BaseModel, strict=True):
    """What `judge` reads of the metadata; it can judge whatever has this form."""

    include: list[Clause] = Field(min_length=1)
    exclude: list[Exclusion] = []

    @field_validator("include")
    @classmethod
    def _refer_backwards(cls, clauses: list[Clause]) -> list[Clause]:
        for index, clause in enumerate(clauses):
            if clause.position and not -index <= clause.position[1] < index:
                raise ValueError("a position refers to a clause before its own")
        return clauses


class GenEval(RewardBase):
    """Reward by GenEval's rules; an image's metadata is a line of GenEval's schema.

    detector: a name in DETECTORS ("tiny" for the tiny world, "mask2former" for photographs) or a
        dotted path "package.module:Class" (built with detector_options), or a Detector object.
        `detector.name`, where it has one, says which models answer.
    device: of a detector that takes one and is not given it by its options.
    reward: "bounded" or "published" (`partial_credit`), or "official" (0 or 1, `judge`).
    parts: "correct", the official decision, 0 or 1, which is the number a benchmark is known by.
    Raises ValueError for metadata that cannot be judged, and what the detector raises.
    """

    name = "geneval"
    licence = "its rules: MIT"
    choice = ("detector", "tiny")
    choices = {**RewardBase.choices, "mask2former": "its weights have a licence of their own"}
    # Swin-S: 313 G multiply-adds at 800 pixels (arXiv 2112.01527, table 1), and a crop or two
    cost = Cost(2 * 313e9 + 2 * VIT_L)
    downloads = {
        MASK2FORMER: 0.28,
        "open_clip ViT-L-14 (openai)": 1.7,
    }
    reads = {"model": (MASK2FORMER, hub_files), "colours": (OPEN_CLIP, hub_file)}
    headline = "correct"

    def __init__(
        self,
        detector: str | Detector = "tiny",
        reward: Literal["bounded", "published", "official"] = "bounded",
        *,
        detector_options: Mapping[str, Any] | None = None,
        device: Device = None,
    ) -> None:
        self.reward = reward
        self.detector = _factory(detector)
        if isinstance(detector, str):
            options = with_device(self.detector, detector_options or {}, device)
            self.detector = self.detector(**options)
        engine = getattr(self.detector, "name", type(self.detector).__name__)
        self.settings = {"engine": engine, "rule": reward, **RULES}

    @classmethod
    def check_options(cls, *_: Any, **options: Any) -> None:
        """Raise ValueError if there is no such detector, or if it does not take its options.

        Imports the detector's module and checks its signature; builds nothing.
        """
        detector = cls.chosen(**options)
        detector_options = options.get("detector_options") or {}
        if isinstance(detector, str):
            check_call(f"detector {detector!r}", _factory(detector), detector_options)

    @classmethod
    def packages(cls, *_: Any, **options: Any) -> tuple[str, ...]:
        packages = getattr(_factory(cls.chosen(**options)), "packages", None)
        return packages(**(options.get("detector_options") or {})) if packages else ()

    @classmethod
    def hub_files(cls, **options: Any) -> list[HubFiles]:
        return super().hub_files(**{**options, **(options.get("detector_options") or {})})

    @classmethod
    def check_prompts(cls, prompts: Sequence[str], metadata: Metadata, **options: Any) -> None:
        """Raise ValueError for the first prompt whose metadata is not in GenEval's form, or asks
        for what the detector that the options name does not know (its `classes` and `palette`):
        it would never be detected and only cost points. Without a detector, GenEval's colours are
        known."""
        detector = options.get("detector")
        factory = _factory(detector)
        classes = getattr(factory, "classes", ())
        palette = getattr(factory, "palette", COLORS if factory is None else ())
        for number, (prompt, meta) in enumerate(zip(prompts, metadata, strict=True), 1):
            read = {key: meta[key] for key in Form.model_fields if key in meta}
            where = f"number {number} of {len(prompts)}: prompt {shown(repr(prompt))}"
            try:
                form = Form.model_validate_json(json.dumps(read, default=str))
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"]))
                raise ValueError(
                    f"{where} has the metadata {shown(repr(dict(meta)))}; `{key}`: {first['msg']}. "
                    "geneval wants a .jsonl with lines such as "
                    '{"include": [{"class": "dog", "count": 2}]}.'
                ) from None
            words = [(clause.name, classes) for clause in form.include]
            words += [(clause.color, palette) for clause in form.include if clause.color]
            for word, known in words:
                if known and word not in known:
                    seen = f"{where} asks for {shown(repr(word))}"
                    answers = shown(", ".join(known))
                    raise ValueError(f"{seen}, and detector {detector!r} knows {answers}.")

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        with ExitStack() as stack:  # offloaded models are moved to the device once a call
            for placement in getattr(self.detector, "placements", ()):
                stack.enter_context(placement)
            rows = zip(metadata, self.detector(images), strict=True)
            judged = [self._judge(meta, objects) for meta, objects in rows]  # may ask for colours
        correct = torch.tensor([float(verdict.correct) for _, verdict in judged])
        reasons = {row: v.reason for row, (_, v) in enumerate(judged) if v.reason}
        return replace(Scores.of([value for value, _ in judged], correct=correct), reasons=reasons)

    def _judge(self, metadata: Mapping[str, Any], objects: Detections) -> tuple[float, Verdict]:
        """(reward, official decision) of one image."""
        if not metadata.get("include"):
            raise ValueError(f"the metadata has no `include`, but the keys {sorted(metadata)}.")
        judged = metadata, objects.boxes, objects.colors
        verdict = judge(*judged, **RULES)
        if self.reward == "official":
            return float(verdict.correct), verdict
        return partial_credit(*judged, **RULES, variant=self.reward), verdict


def _factory(detector: Any) -> Any:
    """The factory behind a name or dotted path; any other detector as it is."""
    if not isinstance(detector, str):
        return detector
    if detector not in DETECTORS and ":" not in detector:
        raise ValueError(f"no detector {detector!r}; use one of {list(DETECTORS)}, or a path.")
    return load(DETECTORS.get(detector, detector), "detector")
