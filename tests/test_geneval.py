"""GenEval's decision and the reward server's scores agree with what the peers' code answers."""

import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from flowalign.rewards import RewardSpec
from flowalign.rewards.geneval import GenEval
from flowalign.rewards.geneval_judge import judge, partial_credit, select, summarize

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "geneval_evaluate.json").read_text())["cases"]
SUMMARIES = json.loads((GOLDEN / "geneval_summary.json").read_text())["cases"]
STRICT = [case for case in CASES if case["expected_strict"]]


def _id(case):
    return f"{case['id']}-{case['kind']}"


def _inputs(case):
    return case["metadata"], case["detections"], case["colors"]


def test_decision_and_selection_are_the_official_ones():
    assert len(CASES) > 200
    for case in CASES:
        options, expected = dict(case["options"]), case["expected"]
        verdict = judge(*_inputs(case), **options)
        assert verdict.correct is expected["correct"], _id(case)
        assert verdict.reason == expected["reason_canonical"], _id(case)
        del options["position_threshold"]
        selected = select(case["metadata"], case["detections"], **options)
        assert selected == expected["selected"], _id(case)


def test_the_published_score_is_the_reward_servers():
    assert len(STRICT) > 100
    for case in STRICT:
        expected = case["expected_strict"]
        score = partial_credit(*_inputs(case), **case["options"], variant="published")
        assert score == pytest.approx(expected["score"], abs=1e-12), _id(case)


def test_bounded_credit_is_one_exactly_when_nothing_failed():
    for case in STRICT:
        credit = partial_credit(*_inputs(case), **case["options"])
        strict = case["expected_strict"]["strict_correct"]
        official = judge(*_inputs(case), **case["options"]).correct
        assert 0 <= credit <= 1, _id(case)
        assert (credit == 1) is (strict and official), _id(case)


def test_bounded_credit_of_the_cases_that_the_published_score_gets_wrong():
    dog, cat = {"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["above", 0]}
    below = {"dog": [[40, 0, 50, 10, 0.95]], "cat": [[40, 80, 50, 90, 0.95]]}
    beside = {"tag": "position", "include": [dog, cat]}
    assert partial_credit(beside, below, {}, variant="published") == 0.75
    assert partial_credit(beside, below, {}) == pytest.approx(2 / 3)
    crowd = {"dog": [[0, 0, 9, 9, 0.95]] * 16}
    single = {"tag": "single_object", "include": [dog]}
    assert partial_credit(single, crowd, {}, variant="published") == -14
    assert partial_credit(single, crowd, {}) == 0
    with pytest.raises(ValueError, match="bounded"):
        partial_credit(single, crowd, {}, variant="none")


def test_colors_may_be_a_callable_that_is_asked_by_raw_index():
    asked = []

    def color(name, index):
        asked.append((name, index))
        return "red"

    metadata = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]}
    detections = {"dog": [[0, 0, 9, 9, 0.4], [0, 0, 9, 9, 0.8]], "cat": [[0, 0, 9, 9, 0.8]]}
    assert judge(metadata, detections, color).correct
    assert asked == [("dog", 1)]


def test_a_position_that_refers_to_itself_or_forward_is_refused():
    clauses: list[dict] = [{"class": name, "count": 1} for name in ("dog", "cat", "cow")]
    boxes = {name: [[0, 0, 9, 9, 0.9]] for name in ("dog", "cat", "cow")}
    for index in (1, 2):
        clauses[1]["position"] = ["above", index]
        with pytest.raises(ValueError):
            judge({"tag": "position", "include": clauses}, boxes, {})


def test_summary_is_the_official_one():
    for case in SUMMARIES:
        summary, name = summarize(case["rows"]), case["name"]
        assert summary["overall"] == pytest.approx(case["overall"], abs=6e-6), name
        assert 100 * summary["images"] == pytest.approx(case["pct_images"], abs=6e-3), name
        assert 100 * summary["prompts"] == pytest.approx(case["pct_prompts"], abs=6e-3), name
        assert sum(summary["counts"].values()) == len(case["rows"]), name
        assert summary["overall"] == pytest.approx(fmean(summary["tasks"].values())), name
    with pytest.raises(ValueError, match="no images"):
        summarize([])


DOG, CUP = {"class": "dog", "count": 1}, {"class": "cup", "count": 1}
WRONG = [
    {"include": [{**DOG, "position": ["left of", 0]}]},  # its own clause
    {"include": [CUP, {**DOG, "position": ["left of", -2]}]},
    {"include": [CUP, {**DOG, "position": ["beside", 0]}]},
    {"include": [{**DOG, "color": None}]},
    {"include": [{**DOG, "count": "1"}]},
    {"include": [{**DOG, "class": ["dog"]}]},
    {"include": []},
    {"target": "HI"},
    {"include": [DOG], "exclude": [{"class": "dog"}]},
]


@pytest.mark.parametrize("metadata", WRONG)
def test_wrong_metadata_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="number 2 of 2: prompt 'b'.*(in|ex)clude"):
        GenEval.check_prompts(["a", "b"], [{"include": [DOG]}, metadata])


def test_what_the_check_accepts_can_be_judged_whatever_was_detected() -> None:
    extras = ({}, {"color": "red"}, {"position": ["left of", 0]}, {"count": 3})
    boxes = [[], [[0, 0, 9, 9, 0.9]], [[9, 9, 0, 0, 1.0], [0, 0, 0, 0, 0]]]
    for extra, exclude, dogs, cups in product(extras, ([], [CUP]), boxes, boxes):
        metadata = {"include": [CUP, DOG | extra], "exclude": exclude}
        GenEval.check_prompts(["a"], [metadata])
        found = metadata, {"dog": dogs, "cup": cups}, lambda name, index: "blue"
        judge(*found, max_overlap=0.5)
        for variant in ("bounded", "published"):
            partial_credit(*found, max_overlap=0.5, variant=variant)


def test_a_colour_or_thing_that_the_judge_never_answers_is_refused() -> None:
    def checked(detector: str | None, **keys: Any) -> None:
        clause = {"class": "bench", "count": 1, **keys}
        options = {"detector": detector} if detector else {}
        RewardSpec("geneval", options).check_prompts(["a"], [{"include": [clause]}])

    checked(None, color="red")
    for word in ("crimson", "grey", "Red"):
        with pytest.raises(ValueError, match=f"'{word}'.*purple"):
            checked("mask2former", color=word)
    with pytest.raises(ValueError, match="white"):
        checked("tiny", **{"class": "dog"}, color="white")
