"""Rewards made of rewards: a weighted sum, a gate, a common scale.

A component is given as in a config, {name, options}: a name of flowalign.rewards and its options.
An image that a component failed on is invalid, with the component's reason. parts: every
component's value under its label, and its own parts as label/part. device: where components compute
that are not told (`flowalign.rewards.build_on`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import flowalign.rewards as registry
from flowalign.rewards.options import check_common
from flowalign.rewards.scoring import score
from flowalign.types import Reward, Scores

Spec = Mapping[str, Any]
Device = str | torch.device | None


class Weighted:
    """Sum of weight * value over components [{name, options, weight, label}, ...].

    The weights are used as they are, so put components on one scale first (see `Normalized`).
    label: what a component is called in parts; its name by default.
    """

    name = "weighted"

    def __init__(self, rewards: Sequence[Spec], *, device: Device = None) -> None:
        self.check_options(rewards, device=device)
        self.rewards = {_label(spec): _build(spec, device) for spec in rewards}
        self.weights = {_label(spec): float(spec.get("weight", 1.0)) for spec in rewards}

    @staticmethod
    def check_options(rewards: Sequence[Spec], *, device: Device = None) -> None:
        """Raise ValueError for components that cannot work; loads no model."""
        check_common("reward weighted", device=device)
        if not isinstance(rewards, (list, tuple)) or not rewards:
            raise ValueError(
                f"`rewards` of reward weighted is {rewards!r}; give a list such as "
                "[{name: pickscore, weight: 1.0}, {name: ocr, weight: 0.5}]."
            )
        for spec in rewards:
            _check(spec, "rewards", ("weight", "label"))
            _number(spec.get("weight", 1.0), "weight", "weighted")
        labels = [_label(spec) for spec in rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(f"reward weighted has the labels {labels}; give each its own `label`.")

    @staticmethod
    def check_prompts(
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        rewards: Sequence[Spec],
        **others: Any,
    ) -> None:
        """Raise ValueError if a component cannot judge images of one of these prompts."""
        for spec in rewards:
            _check_prompts(spec, prompts, metadata)

    def describe(self) -> dict[str, Any]:
        """The components, and what they weigh."""
        found = {label: registry.describe(reward) for label, reward in self.rewards.items()}
        return {"name": self.name, "rewards": found, "weights": self.weights}

    @property
    def groupwise(self) -> bool:
        """Whether a component must see all images of a prompt at once."""
        return any(getattr(reward, "groupwise", False) for reward in self.rewards.values())

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] -> Scores of B, on the CPU."""
        found = {
            label: score(reward, images, prompts, metadata)
            for label, reward in self.rewards.items()
        }
        value = torch.zeros(len(images))
        for label, scores in found.items():
            value += self.weights[label] * scores.value
        return _joined(value, found)


class Gated:
    """`reward` where `gate` is at least `threshold`, else `below`: quality only counts once the
    task is done. Images that do not pass the gate are not shown to `reward`; their parts are NaN.
    """

    name = "gated"

    def __init__(
        self,
        reward: Spec,
        gate: Spec,
        threshold: float,
        below: float = 0.0,
        *,
        device: Device = None,
    ) -> None:
        self.check_options(reward, gate, threshold, below, device=device)
        self.reward, self.gate = _build(reward, device), _build(gate, device)
        self.threshold, self.below = threshold, below

    @staticmethod
    def check_options(
        reward: Spec, gate: Spec, threshold: float, below: float = 0.0, *, device: Device = None
    ) -> None:
        """Raise ValueError for components or numbers that cannot work; loads no model."""
        check_common("reward gated", device=device)
        _check(reward, "reward")
        _check(gate, "gate")
        _number(threshold, "threshold", "gated")
        _number(below, "below", "gated")

    @staticmethod
    def check_prompts(
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        reward: Spec,
        gate: Spec,
        **others: Any,
    ) -> None:
        """Raise ValueError if a component cannot judge images of one of these prompts."""
        for spec in (reward, gate):
            _check_prompts(spec, prompts, metadata)

    def describe(self) -> dict[str, Any]:
        """The components, and when the gate opens."""
        found = {"reward": registry.describe(self.reward), "gate": registry.describe(self.gate)}
        return {"name": self.name, **found, "threshold": self.threshold, "below": self.below}

    @property
    def groupwise(self) -> bool:
        """Whether a component must see all images of a prompt at once."""
        return any(getattr(each, "groupwise", False) for each in (self.reward, self.gate))

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] -> Scores of B, on the CPU."""
        gate = score(self.gate, images, prompts, metadata)
        rows: list[int] = (
            (gate.value >= self.threshold).nonzero().flatten().tolist()
        )  # NaN does not pass
        mine, theirs = [prompts[r] for r in rows], [metadata[r] for r in rows]
        passed = _spread(score(self.reward, images[rows], mine, theirs), rows, len(images))
        value = torch.full((len(images),), float(self.below)).masked_fill(~gate.valid, torch.nan)
        value[rows] = passed.value[rows]
        return _joined(value, {"gate": gate, "reward": passed})


class Normalized:
    """1 / (1 + exp(-(value - median) / spread)): the reward on a scale of (0, 1), median -> .5.

    So that the tasks of a mix weigh alike, however hard: per task, take the median, and for
    `spread` about half the distance between the quartiles, of the model that training starts from
    (both are in the results.json of `flowalign eval`). After MedGRPO (2512.06581), whose logistic
    maps every dataset's median to .5; the numbers are given here, not estimated while training, so
    that a reward means the same throughout a run.
    parts: "raw", the value before.
    """

    name = "normalized"

    def __init__(
        self, reward: Spec, median: float, spread: float, *, device: Device = None
    ) -> None:
        self.check_options(reward, median, spread, device=device)
        self.reward, self.median, self.spread = _build(reward, device), median, spread
        self.groupwise = bool(getattr(self.reward, "groupwise", False))
        self.headline = getattr(self.reward, "headline", None) or "raw"

    @staticmethod
    def check_options(reward: Spec, median: float, spread: float, *, device: Device = None) -> None:
        """Raise ValueError for a component or numbers that cannot work; loads no model."""
        check_common("reward normalized", device=device)
        _check(reward, "reward")
        _number(median, "median", "normalized")
        if _number(spread, "spread", "normalized") <= 0:
            raise ValueError(
                f"`spread` of reward normalized is {spread!r}; it divides, so give a number above "
                "0, such as half the distance between the quartiles."
            )

    @staticmethod
    def check_prompts(
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        reward: Spec,
        **others: Any,
    ) -> None:
        """Raise ValueError if the component cannot judge images of one of these prompts."""
        _check_prompts(reward, prompts, metadata)

    def describe(self) -> dict[str, Any]:
        """The component, and its scale."""
        found = registry.describe(self.reward)
        return {"name": self.name, "reward": found, "median": self.median, "spread": self.spread}

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores:
        """images [B,3,H,W] in [0,1] -> Scores of B, on the CPU."""
        found = score(self.reward, images, prompts, metadata)
        value = torch.sigmoid((found.value - self.median) / self.spread)
        parts = {**found.parts, "raw": found.value}
        return Scores(value, found.valid, parts, found.reasons)


# Components ---------------------------------------------------------------------------------------


def _check(spec: Any, option: str, more: Sequence[str] = ()) -> None:
    """Raise ValueError for what is no {name, options}, or names no reward that takes them."""
    allowed = {"name", "options", *more}
    if not isinstance(spec, Mapping) or "name" not in spec or not set(spec) <= allowed:
        raise ValueError(
            f"`{option}` has the component {spec!r}; give {{name: ..., options: {{...}}}}"
            + (f", and if you like {' and '.join(more)}." if more else ".")
        )
    options = spec.get("options") or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"`options` of component {spec['name']!r} is {options!r}; give a mapping.")
    registry.check(spec["name"], options)


def _check_prompts(
    spec: Spec, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> None:
    registry.check_prompts(spec["name"], spec.get("options") or {}, prompts, metadata)


def _build(spec: Spec, device: Device) -> Reward:
    return registry.build_on(device, spec["name"], spec.get("options") or {})


def _label(spec: Spec) -> str:
    return str(spec.get("label", spec["name"]))


def _number(value: Any, option: str, reward: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"`{option}` of reward {reward} is {value!r}; give a finite number.")
    return value


def _spread(found: Scores, rows: Sequence[int], count: int) -> Scores:
    """Scores of some rows as scores of all: the others are valid NaNs, as they were not asked."""

    def wide(tensor: Tensor) -> Tensor:
        spread = torch.full((count,), torch.nan)
        spread[rows] = tensor
        return spread

    valid = torch.ones(count, dtype=torch.bool)
    valid[rows] = found.valid
    parts = {name: wide(part) for name, part in found.parts.items()}
    reasons = {rows[row]: text for row, text in found.reasons.items()}
    return Scores(wide(found.value), valid, parts, reasons)


def _joined(value: Tensor, found: Mapping[str, Scores]) -> Scores:
    """The value with the components' parts; invalid where a component is."""
    valid, parts = torch.isfinite(value), {}
    said: dict[int, list[str]] = {}
    for label, scores in found.items():
        valid &= scores.valid
        parts[label] = scores.value
        parts |= {f"{label}/{name}": part for name, part in scores.parts.items()}
        for row, text in scores.reasons.items():
            said.setdefault(row, []).append(f"{label}: {text}")
    reasons = {row: "; ".join(texts) for row, texts in said.items()}
    return Scores(value.masked_fill(~valid, torch.nan), valid, parts, reasons)
