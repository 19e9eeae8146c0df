"""GenEval's official prompts are all there, and are judged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowalign.rewards.geneval import GenEval
from flowalign.rewards.geneval_judge import NAMES
from flowalign.types import Detections

OFFICIAL = next(
    (
        file
        for folder in Path(__file__).resolve().parents
        if (file := folder / "shared" / "data" / "geneval_evaluation_metadata.jsonl").is_file()
    ),
    None,
)


@pytest.fixture(scope="module")
def official() -> list[dict[str, Any]]:
    if OFFICIAL is None:
        pytest.skip("no ../shared/data/geneval_evaluation_metadata.jsonl")
    return [json.loads(line) for line in OFFICIAL.read_text().splitlines()]


def perfect(metadata: dict[str, Any]) -> Detections:
    """What an image shows that fulfils the metadata and nothing else."""
    boxes: dict[str, list[list[float]]] = {}
    colors: dict[str, list[str]] = {}
    places: list[tuple[float, float]] = []
    step = {"left of": (-150, 0), "right of": (150, 0), "above": (0, -150), "below": (0, 150)}
    for number, clause in enumerate(metadata["include"]):
        x, y = 200.0 + 30 * number, 200.0
        if "position" in clause:
            relation, reference = clause["position"]
            x, y = (a + b for a, b in zip(places[reference], step[relation], strict=True))
        places.append((x, y))
        for index in range(clause["count"]):
            box = [x + 40 * index, y, x + 40 * index + 30, y + 30, 0.95]
            boxes.setdefault(clause["class"], []).append(box)
            colors.setdefault(clause["class"], []).append(clause.get("color", "pink"))
    return Detections(boxes, colors)


def test_the_official_prompts_are_all_there_and_can_be_judged(official):
    GenEval.check_prompts([row["prompt"] for row in official], official)
    tags = [row["tag"] for row in official]
    assert {tag: tags.count(tag) for tag in tags} == {
        "single_object": 80, "two_object": 99, "counting": 80,
        "colors": 94, "position": 100, "color_attr": 100,
    }  # fmt: skip
    clauses = [clause for row in official for clause in row["include"] + row.get("exclude", [])]
    assert {clause["class"] for clause in clauses} <= set(NAMES)


@pytest.mark.parametrize("kind", ["bounded", "published", "official"])
def test_a_perfect_image_of_an_official_prompt_is_correct_and_an_empty_one_is_not(official, kind):
    detections = [perfect(row) for row in official] + [Detections({}, {})] * len(official)
    reward = GenEval(lambda images: detections, reward=kind)
    scores = reward(torch.zeros(len(detections), 3, 1, 1), [""] * len(detections), official * 2)
    assert scores.valid.all()
    assert set(scores.reasons) == set(range(len(official), len(detections)))  # why they are wrong
    correct, empty = scores.parts["correct"].split(len(official))
    assert bool((correct == 1).all()) and bool((empty == 0).all())
    assert bool((scores.value[: len(official)] == 1).all())
    assert bool((scores.value[len(official) :] < 1).all())


def test_one_thing_wrong_with_an_official_prompt_is_seen(official):
    for row in official:
        detections, clause = perfect(row), row["include"][-1]
        name = clause["class"]
        if row["tag"] == "position":
            at = detections.boxes[row["include"][0]["class"]][0][:4]
            detections.boxes[name][0] = [*at, 0.95]  # pyright: ignore[reportIndexIssue]
        elif "color" in clause:
            detections.colors[name][-1] = "none"  # pyright: ignore[reportIndexIssue]
        else:
            detections.boxes[name].pop()  # pyright: ignore[reportAttributeAccessIssue]
        reward = GenEval(lambda images, detections=detections: [detections])
        scores = reward(torch.zeros(1, 3, 1, 1), [row["prompt"]], [row])
        assert scores.parts["correct"].tolist() == [0] and 0 <= float(scores.value) < 1, row
