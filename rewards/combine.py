"""Rewards made of rewards: a weighted sum, a product, a common scale.

A component is given as in a config, {name, options}: a name of flowalign.rewards and its options.
An image that a component failed on is invalid, with the component's reason; a component of weight 0
has no such effect. parts: every component's value under its label, and its own parts as label/part.
device: where components compute that are not given one (`flowalign.rewards.RewardSpec.build`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, Field, GetPydanticSchema, model_validator
from torch import Tensor

import flowalign.rewards as registry
from flowalign.rewards.base import RewardBase
from flowalign.rewards.options import Device, Divisor, Number
from flowalign.rewards.scoring import score
from flowalign.types import Metadata, Scores


class Component(BaseModel, extra="forbid"):
    """What a component may say: a reward that exists, with options that it takes."""

    name: str
    options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_a_reward(self) -> Component:
        registry.RewardSpec(self.name, self.options or {}).check()
        return self


class Summand(Component):
    """A component of a sum. label: what it is called in parts; its name by default."""

    weight: Number = 1.0
    label: str | None = None


def _distinct(summands: Sequence[Summand]) -> Sequence[Summand]:
    labels = [summand.label or summand.name for summand in summands]
    if len(set(labels)) < len(labels):
        raise ValueError(f"the labels are {labels}; give each component its own `label`.")
    return summands


# Mappings, as a config has them; pydantic checks them by the models.
Spec = Annotated[Mapping[str, Any], GetPydanticSchema(lambda _, model: model(Component))]
Term = Annotated[Mapping[str, Any], GetPydanticSchema(lambda _, model: model(Summand))]


class Composed(RewardBase):
    """Base: components {label: reward}."""

    def __init__(self, specs: Mapping[str, Spec], device: Device) -> None:
        self.components = {
            label: registry.RewardSpec(spec["name"], spec.get("options") or {}).build(device)
            for label, spec in specs.items()
        }
        self.groupwise = any(reward.groupwise for reward in self.components.values())

    @classmethod
    def made_of(cls, **options: Any) -> list[Mapping[str, Any]]:
        return [*options.get("rewards", ()), *filter(None, [options.get("reward")])]


class Terms(Composed):
    """Base of a sum and a product of components [{name, options, weight, label}, ...]."""

    called = "weights"  # the attribute that holds them, and what descriptions call them

    def __init__(
        self,
        rewards: Annotated[Sequence[Term], Field(min_length=1), AfterValidator(_distinct)],
        *,
        device: Device = None,
    ) -> None:
        terms = {str(spec.get("label") or spec["name"]): spec for spec in rewards}
        super().__init__(terms, device)
        numbers = {label: float(spec.get("weight", 1.0)) for label, spec in terms.items()}
        setattr(self, self.called, numbers)
        self.columns = tuple(terms)

    def describe(self) -> dict[str, Any]:
        parts = {label: registry.describe(reward) for label, reward in self.components.items()}
        return {"name": self.name, "rewards": parts, self.called: getattr(self, self.called)}


class Weighted(Terms):
    """Sum of weight * value over components.

    The weights are used as they are, so put components on one scale first (see `Normalized`).
    """

    name = "weighted"
    weights: Mapping[str, float] = {}  # by label; set when it is built

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        value = torch.zeros(len(images))
        components = {}
        for label, reward in self.components.items():
            components[label] = score(reward, images, prompts, metadata)
            if weight := self.weights[label]:
                value += weight * components[label].value  # NaN where it failed
        return _join(value, components, self.weights)


class Product(Terms):
    """Product of value ** weight over components: an image needs all of them, but those of weight
    0. A value below 0 counts as 0, so put a reward that is often below it on another scale first
    (see `Normalized`)."""

    name, called = "product", "exponents"
    exponents: Mapping[str, float] = {}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        value = torch.ones(len(images))
        components = {}
        for label, reward in self.components.items():
            scores = score(reward, images, prompts, metadata)
            if exponent := self.exponents[label]:
                rows: list[int] = (scores.value < 0).nonzero().flatten().tolist()
                below = {row: f"{float(scores.value[row]):.3g} counts as 0" for row in rows}
                scores = replace(scores, reasons={**scores.reasons, **below})
                value *= scores.value.clamp(min=0) ** exponent  # NaN stays
            components[label] = scores
        return _join(value, components, self.exponents)


class Normalized(Composed):
    """1 / (1 + exp(-(value - median) / spread)): the reward on a scale of (0, 1), median -> .5.

    This gives the tasks of a mix equal weight, however hard they are. Per task, take the median,
    and for `spread` about half the distance between the quartiles, of the model that training
    starts from (both are in the results.json of `flowalign eval`). After MedGRPO (2512.06581),
    whose logistic maps every dataset's median to .5. Here the numbers are options and are not
    estimated while training, so that a reward means the same throughout a run.
    parts: "raw", the value before.
    """

    name = "normalized"

    def __init__(
        self, reward: Spec, median: Number, spread: Divisor, *, device: Device = None
    ) -> None:
        super().__init__({"reward": reward}, device)
        self.reward = self.components["reward"]
        self.median = median
        self.spread = spread
        self.headline = self.reward.headline or "raw"  # comparable
        self.counts = self.reward.counts  # its parts are kept

    def describe(self) -> dict[str, Any]:
        numbers = {"median": self.median, "spread": self.spread}
        return {"name": self.name, "reward": registry.describe(self.reward), **numbers}

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Metadata) -> Scores:
        scores = score(self.reward, images, prompts, metadata)
        value = torch.sigmoid((scores.value - self.median) / self.spread)
        return replace(scores, value=value, parts={**scores.parts, "raw": scores.value})


def _join(value: Tensor, components: Mapping[str, Scores], weights: Mapping[str, float]) -> Scores:
    """The value with the components' parts and reasons; invalid where a component with weight
    is."""
    valid = torch.isfinite(value)
    parts = {}
    texts: dict[int, list[str]] = {}
    for label, scores in components.items():
        valid &= scores.valid | (weights[label] == 0)
        parts[label] = scores.value
        parts |= {f"{label}/{name}": part for name, part in scores.parts.items()}
        for row, text in scores.reasons.items():
            texts.setdefault(row, []).append(f"{label}: {text}")  # several may fail on one image
    reasons = {row: "; ".join(lines) for row, lines in texts.items()}
    return Scores(value.masked_fill(~valid, torch.nan), valid, parts, reasons)
