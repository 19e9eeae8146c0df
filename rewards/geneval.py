"""GenEval as a reward: a detector finds objects and colours, flowalign.eval.geneval judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from flowalign.rewards import check_factory, load, placed
from flowalign.rewards.geneval_judge import Verdict, judge, partial_credit
from flowalign.rewards.options import check_common
from flowalign.types import Detections, Detector, Scores

DETECTORS: dict[str, str] = {
    "tiny": "flowalign.tiny.detector:TinyDetector",
    "mask2former": "flowalign.rewards.mask2former:Mask2Former",
}
REWARD_KINDS = ("bounded", "published", "official")


class GenEval:
    """Reward by GenEval's rules; an image's metadata is a line of GenEval's schema.

    detector: a name in DETECTORS ("tiny" for the tiny world, "mask2former" for photographs) or a
        dotted path "package.module:Class" (built with detector_options), or a Detector object.
        `detector.name`, where it has one, says which models answer.
    device: of a detector that takes one and is not told by its options.
    reward: "bounded" or "published" (`partial_credit`), or "official" (0 or 1, `judge`).
    The thresholds are those of `judge`, and the defaults are the benchmark's.
    parts: "correct", the official decision, 0 or 1, which is the number a benchmark is known by.
    An image whose metadata cannot be judged is invalid; a detector that raises passes to the
    caller (`flowalign.rewards.score` masks).
    """

    name = "geneval"
    headline = "correct"

    def __init__(
        self,
        detector: str | Detector = "tiny",
        reward: str = "bounded",
        *,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_objects: int = 16,
        max_overlap: float = 1.0,
        position_threshold: float = 0.1,
        detector_options: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.check_options(
            detector,
            reward,
            threshold=threshold,
            counting_threshold=counting_threshold,
            max_objects=max_objects,
            max_overlap=max_overlap,
            position_threshold=position_threshold,
            detector_options=detector_options,
            device=device,
        )
        self.reward = reward
        self.rules = {
            "threshold": threshold,
            "counting_threshold": counting_threshold,
            "max_objects": max_objects,
            "max_overlap": max_overlap,
            "position_threshold": position_threshold,
        }
        self.detector = build_detector(detector, detector_options, device)

    @staticmethod
    def check_options(
        detector: str | Detector = "tiny",
        reward: str = "bounded",
        *,
        detector_options: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        **rules: Any,
    ) -> None:
        """Raise ValueError for options that cannot work; imports the detector, loads no model."""
        if reward not in REWARD_KINDS:
            raise ValueError(
                f"reward {reward!r} of geneval is unknown; use one of {list(REWARD_KINDS)}."
            )
        check_common("reward geneval", device=device)
        check_rules(rules)
        check_detector(detector, detector_options)

    @staticmethod
    def check_prompts(
        prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], **options: Any
    ) -> None:
        """Raise ValueError for the first prompt whose metadata is not in GenEval's form."""
        for number, (prompt, meta) in enumerate(zip(prompts, metadata, strict=True), 1):
            include = meta.get("include")
            if not isinstance(include, list) or not include or not all(map(_is_clause, include)):
                seen = f"`include` is {include!r}" if "include" in meta else "no `include`"
                raise ValueError(
                    f"number {number} of {len(prompts)}: prompt {prompt!r} has the metadata keys "
                    f"{sorted(meta)}, {seen}; geneval judges by a list such as "
                    '[{"class": "dog", "count": 2}]. Give a .jsonl whose lines hold it, or use '
                    "another reward for this task."
                )

    def describe(self) -> dict[str, Any]:
        """Which detector looked, and by which rules its findings are judged."""
        detector = getattr(self.detector, "name", type(self.detector).__name__)
        return {"name": self.name, "engine": detector, "rule": self.reward, **self.rules}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] -> Scores of B, on the CPU; a failed or wrong image has its
        reason."""
        with ExitStack() as awake:  # models that are offloaded are brought back once a call
            for placement in getattr(self.detector, "placements", ()):
                awake.enter_context(placement)
            return self._judge_all(self.detector(images), metadata)

    def _judge_all(
        self, found: Sequence[Detections], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        if len(found) != len(metadata):
            raise ValueError(
                f"got {len(found)} detections and {len(metadata)} metadata; they must be one an "
                "image."
            )
        value = torch.full((len(found),), float("nan"))
        correct, reasons = value.clone(), {}
        for row, (meta, seen) in enumerate(zip(metadata, found, strict=True)):
            try:  # a colour may be looked up only now
                value[row], verdict = self._judge(meta, seen)
            except Exception as error:
                reasons[row] = f"{type(error).__name__}: {error}"
                continue
            correct[row] = verdict.correct
            if verdict.reason:
                reasons[row] = verdict.reason
        return Scores(value, torch.isfinite(value), {"correct": correct}, reasons)

    def _judge(self, metadata: Mapping[str, Any], seen: Detections) -> tuple[float, Verdict]:
        """(reward, official decision) of one image."""
        if not metadata.get("include"):
            raise ValueError(
                f"metadata has no `include` clauses (keys: {sorted(metadata)}), so there is "
                "nothing to judge. Is this a prompt of another task?"
            )
        verdict = judge(metadata, seen.boxes, seen.colors, **self.rules)
        if self.reward == "official":
            return float(verdict.correct), verdict
        credit = partial_credit(
            metadata, seen.boxes, seen.colors, **self.rules, variant=self.reward
        )
        return credit, verdict


def build_detector(
    detector: str | Detector,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> Detector:
    """The detector of that name or dotted path, built with these options; an object as it is.
    device: as in `flowalign.rewards.build_on`.

    Raises ValueError as `check_detector` does, and whatever the detector's constructor raises.
    """
    check_detector(detector, options)
    if not isinstance(detector, str):
        return detector
    factory = _factory(detector)
    return factory(**placed(factory, options or {}, device))


def check_detector(detector: str | Detector, options: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError if there is no such detector, or if it does not take these options.

    Imports the detector's module and asks its `check_options`, where it has one; builds nothing.
    """
    options = options or {}
    if not isinstance(detector, str):
        if options:
            raise ValueError(
                f"`detector_options` {sorted(options)} are of no use to a detector that is built "
                f"already, a {type(detector).__name__}. Give them where it is built."
            )
        return
    if detector not in DETECTORS and ":" not in detector:
        raise ValueError(
            f"no detector {detector!r}; use one of {list(DETECTORS)}, or the path of yours as "
            "'package.module:Class'."
        )
    check_factory(f"detector {detector!r}", _factory(detector), options)


def check_rules(rules: Mapping[str, Any]) -> None:
    """Raise ValueError for a threshold or limit of `judge` with which nothing could be judged."""
    possible = {
        "threshold": (0, 1, "a score that a box must exceed, from 0 to below 1 (0.3)"),
        "counting_threshold": (0, 1, "the same where objects are counted (0.9)"),
        "max_objects": (1, math.inf, "how many boxes of a class count, 1 or more (16)"),
        "max_overlap": (1e-9, 1 + 1e-9, "above 0 and up to 1, which turns suppression off (1.0)"),
        "position_threshold": (0, math.inf, "a share of the objects' sizes, 0 or more (0.1)"),
    }
    for name, value in rules.items():
        low, high, meaning = possible[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            not number
            or not low <= value < high
            or (name == "max_objects" and not isinstance(value, int))
        ):
            raise ValueError(f"`{name}` of reward geneval is {value!r}; give {meaning}.")


def _factory(detector: str) -> Callable[..., Detector]:
    return load(DETECTORS.get(detector, detector), "detector")


def _is_clause(asked: Any) -> bool:
    """Is this an include clause: a class, and how many of it?"""
    if not isinstance(asked, Mapping) or not isinstance(asked.get("class"), str):
        return False
    count = asked.get("count")
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1
