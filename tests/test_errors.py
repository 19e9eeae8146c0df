"""Standard errors are right: what is reported is the spread of the number over repeated draws.

A score = effect of the seed + of the prompt + of both + of the image. The prompts' effects are
shared by all seeds; all but the seeds' are correlated over judges of the same images.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from flowalign.eval import seeds, stats
from flowalign.eval.scores import from_row
from flowalign.eval.stats import AVERAGE
from flowalign.eval.suite import Benchmark, JudgedImages
from flowalign.eval.table import Results
from flowalign.rewards import RewardBase
from flowalign.types import PromptBatch

Array = NDArray[np.float64]
DRAWS, REPORTED = 8000, 200  # of the number; of its error, which varies less
TAGS = ["a"] * 6 + ["b"] * 12  # of the prompts of a set


class Judge(RewardBase):
    """A reward that judges no more. headline: of a benchmark of tags."""

    def __init__(self, headline: str | None = None) -> None:
        self.headline = headline


class World(NamedTuple):
    """judges {name: (its image set, whether tags count alike)}; texts {image set: prompts}. models:
    1 = the average of a model, 2 = of its paired differences to another."""

    judges: dict[str, tuple[str, bool]]
    texts: dict[str, list[str]]
    models: int = 1
    seeds: int = 1
    copies: int = 1
    seed: float = 0.0  # standard deviations: of what a seed does to all tasks
    own: float = 0.0  # and to one task
    prompt: float = 0.3
    both: float = 0.2
    image: float = 0.2
    common: float = 0.0  # correlation of the judges of an image
    lost: float = 0.0  # share of images without a score

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, Array]:
        """{judge: its scores [count, seeds, prompts, copies]} of a model."""

        def normal(*shape: int) -> Array:
            return rng.normal(size=(count, *shape))

        def effects(length: int) -> Array:
            found = self.prompt * normal(1, length, 1) + self.both * normal(self.seeds, length, 1)
            return found + self.image * normal(self.seeds, length, self.copies)

        all_tasks = self.seed * normal(self.seeds, 1, 1)
        # a text that a set holds twice, or that two sets hold, has one effect
        texts = {text: i for i, text in enumerate(dict.fromkeys(sum(self.texts.values(), [])))}
        of_texts = normal(1, len(texts), 1)
        found = {}
        shared = {name: effects(len(some)) for name, some in self.texts.items()}
        for name, (images, _) in self.judges.items():
            rows = [texts[text] for text in self.texts[images]]
            mixed = self.common**0.5 * shared[images]
            mixed = mixed + (1 - self.common) ** 0.5 * effects(len(rows))
            found[name] = all_tasks + self.own * normal(self.seeds, 1, 1) + mixed
            if len(texts) < sum(map(len, self.texts.values())):
                found[name] += self.prompt * of_texts[:, :, rows]
            missing = rng.random((count, self.seeds, len(rows), self.copies)) < self.lost
            found[name] = np.where(missing, np.nan, found[name])
        return found

    def number(self, name: str, scores: Array) -> Array:
        """The judge's number of scores [..., seeds, prompts, copies]."""
        groups = [np.arange(scores.shape[-2])]
        if self.judges[name][1]:
            tags = np.array(TAGS)
            groups = [np.flatnonzero(tags == tag) for tag in np.unique(tags)]
        # of each seed
        means = [np.nanmean(scores[..., rows, :], axis=(-1, -2)) for rows in groups]
        return np.stack(means).mean((0, -1))

    def rows(self, name: str) -> list[dict[str, Any]]:
        images, tagged = self.judges[name]
        return [
            {"index": i, "copy": copy, "prompt": text, "reason": None}
            | {"metadata": {"tag": TAGS[i]} if tagged else {}}
            for i, text in enumerate(self.texts[images])
            for copy in range(self.copies)
        ]

    def images(self, scores: dict[str, Array], attempt: int, seed: int) -> dict[str, list[dict]]:
        found = {}
        for name in self.judges:
            values = scores[name][attempt, seed].ravel().tolist()
            rows = zip(self.rows(name), values, strict=True)
            found[name] = [{**row, "value": value, "right": value} for row, value in rows]
        return found


def evaluated(world: World, models: list[dict[str, list[dict]]]) -> tuple[float, float]:
    """The average of an evaluation, or the average difference of its second model."""
    marks = [
        Benchmark(name, PromptBatch([], [], []), Judge("right" if tagged else None), world.copies)
        for name, (_, tagged) in world.judges.items()
    ]
    judged = {
        str(i): {name: JudgedImages([*map(from_row, rows)], []) for name, rows in images.items()}
        for i, images in enumerate(models)
    }
    results = Results(marks, judged, {})
    row = (results.difference("1", "0") if len(models) > 1 else results.scores("0"))[AVERAGE]
    return row.mean, row.stderr


def over_seeds(world: World, models: list[list[dict[str, list[dict]]]]) -> tuple[float, float]:
    """The same of several evaluations, one a seed: by flowalign.eval.seeds."""
    judges = world.judges.items()
    about = {
        name: {"headline": "right" if tagged else None, "average": "average"}
        for name, (_, tagged) in judges
    }
    documents = [
        {
            "benchmarks": about,
            "models": {str(i): {"images": of[seed]} for i, of in enumerate(models)},
        }
        for seed in range(world.seeds)
    ]
    return list(seeds.cells(documents, *map(str, reversed(range(len(models))))).values())[-1][:2]


def reported(world: World) -> tuple[float, float]:
    """The standard deviation of the average over draws; and the error that is reported of it, as
    the root of its mean square."""
    rng = np.random.default_rng(1)
    gaps = world.draw(DRAWS, rng)
    scores = [gaps]
    if world.models > 1:  # what the models share leaves their difference
        base = world.draw(DRAWS, rng)
        scores = [base, {name: base[name] + gaps[name] for name in base}]
    numbers = np.mean([world.number(name, gap) for name, gap in gaps.items()], 0)
    errors = []
    for attempt in range(REPORTED):
        every = range(world.seeds)
        images = [[world.images(some, attempt, seed) for seed in every] for some in scores]
        if world.seeds > 1:
            mean, error = over_seeds(world, images)
        else:
            mean, error = evaluated(world, [of[0] for of in images])
        assert mean == pytest.approx(numbers[attempt])
        errors.append(error)
    return float(numbers.std()), float(np.sqrt(np.mean(np.square(errors))))


def prompts(name: str, times: int = 1) -> list[str]:
    return [f"{name}{i // times}" for i in range(len(TAGS))]


ONE = {"x": ("x", False)}, {"x": prompts("x")}
TAGGED = {"x": ("x", True)}, {"x": prompts("x")}
TASKS = {n: (n, n == "b") for n in "abc"}, {n: prompts(n) for n in "abc"}  # each its prompts
JUDGES = {n: ("x", False) for n in "abc"}, {"x": prompts("x")}  # of the same images
MIXED = {"a": ("x", True), "b": ("x", False), "c": ("y", False)}, {n: prompts(n) for n in "xy"}
AGAIN = {"a": ("a", False), "b": ("b", True)}, {n: prompts("x") for n in "ab"}  # other images
WORLDS = {
    "one image a prompt": World(*ONE),
    "paired": World(*ONE, models=2, copies=4),
    "a prompt listed twice": World({"x": ("x", False)}, {"x": prompts("x", 2)}),
    "tags": World(*TAGGED, copies=2),
    "invalid images": World(*TAGGED, copies=4, lost=0.1),
    "tasks": World(*TASKS),
    "judges of the same images": World(*JUDGES, copies=2, common=0.8),
    "judges of the same images, paired": World(*JUDGES, models=2, common=0.8),
    "judges and tasks": World(*MIXED, common=0.8),
    "other images of the same prompts": World(*AGAIN),
    "seeds": World(*ONE, seeds=4, seed=0.06),
    "seeds, a prompt listed twice": World({"x": ("x", False)}, {"x": prompts("x", 2)}, seeds=4),
    "seeds, judges of the same images": World(*JUDGES, seeds=4, common=0.8, copies=2),
    "seeds, judges and tasks, paired": World(
        *MIXED, models=2, seeds=4, seed=0.05, own=0.05, common=0.8
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_error_is_the_spread_over_repeated_draws(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(stats, "bootstrap_interval", lambda *_: (np.nan, np.nan))  # it takes time
    true, error = reported(WORLDS[name])
    assert error / true == pytest.approx(1, abs=0.05)
