"""Soft-TIFA: the official arithmetic on recorded probabilities."""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vision_judge import tokenizer

from flowalign.eval.scores import image_score
from flowalign.eval.stats import rows_of
from flowalign.rewards import RewardSpec, score
from flowalign.rewards.base import question_counts
from flowalign.rewards.geneval2 import (
    GenEval2,
    first_tokens,
    question_score,
    soft_tifa,
    spellings,
)
from flowalign.rewards.service.client import Remote
from flowalign.types import EvalImage, ImageScore

GOLDEN = json.loads((Path(__file__).parent / "golden" / "geneval2.json").read_text())
FIRST, CASES = GOLDEN["meta"]["first_token"], GOLDEN["cases"]
BENCH: Any = SimpleNamespace(name="geneval2", headline="gm")


def scored(case: dict[str, Any]) -> list[float]:
    pairs = zip(case["probabilities"], case["vqa_list"], strict=True)
    return [question_score(defaultdict(float, table), FIRST, *pair) for table, pair in pairs]


def line(*questions: tuple[str, str, str], atoms: int = 3) -> dict[str, Any]:
    skills = [skill for skill, _, _ in questions]
    return {"atom_count": atoms, "vqa_list": [[q, a] for _, q, a in questions], "skills": skills}


LINE = line(("count", "How many dogs are there?", "two"), ("attribute", "Are they red?", "Yes"))


@pytest.mark.parametrize("case", CASES)
def test_scores_and_means_are_those_of_the_official_code(case: dict[str, Any]) -> None:
    scores = scored(case)
    assert scores == pytest.approx(case["scores"], rel=1e-12)
    assert soft_tifa(scores) == pytest.approx((case["am"], case["gm"]), rel=1e-12)


def test_the_benchmark_its_skills_and_its_atoms_are_those_of_the_official_analysis() -> None:
    """The rows of an evaluation, as the reward's parts make them."""
    images, summary = [], GOLDEN["summary"]
    for index, case in enumerate(CASES):
        scores = scored(case)
        am, gm = soft_tifa(scores)
        numbers = {"am": am, "gm": gm, "value": gm, f"atoms_{case['atom_count']:02}": gm}
        for skill in {*case["skills"]}:
            own = [s for s, name in zip(scores, case["skills"], strict=True) if name == skill]
            numbers[skill] = sum(own) / len(own)
        metadata = {key: case[key] for key in ("vqa_list", "skills", "atom_count")}
        image = EvalImage(index, 0, str(index), metadata)
        images.append(image_score(image, numbers, None, question_counts))
    lost = ImageScore(EvalImage(99, 0, "99", LINE), math.nan, {"gm": math.nan})
    rows = {row.metric: row for row in rows_of(BENCH, [*images, lost])}
    expected = {"am": summary["am"], "gm": summary["gm"], **summary["skills"]}
    expected |= {f"atoms_{int(count):02}": number for count, number in summary["atoms"].items()}
    assert {name: 100 * rows[name].mean for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (rows["gm"].n, rows["gm"].total) == (20, 21)
    served = Remote("http://localhost:1", reward="geneval2")
    assert served.counts(CASES[0], {}) == question_counts(CASES[0], {})
    having = [case for case in CASES if "verb" in case["skills"]]
    assert rows["verb"].n == len(having) < len(CASES)  # images, not questions


def test_what_is_accepted_and_what_is_its_first_token() -> None:
    assert set(spellings("How many cats?", "ten")) == {"ten", "Ten", " ten", " Ten", "10", " 10"}
    assert set(spellings("Is it how many?", "No")) == {"Yes", "yes", " Yes", " yes"}
    for answer in ("eleven", "2", "Two"):
        with pytest.raises(ValueError, match=repr(answer)):
            spellings("How many cats?", answer)
    words = tokenizer()
    assert FIRST.items() <= {t: words.decode([i]) for t, i in first_tokens(words).items()}.items()
    shared = {"one": "o", "One": "O", " one": " ", " One": " ", "1": "1", " 1": " "}
    assert question_score(
        defaultdict(float, {" ": 0.4}), shared, "How many?", "one"
    ) == pytest.approx(1.2)
    assert soft_tifa([0.5, 0.0]) == (0.25, 0.0)
    assert all(map(math.isnan, soft_tifa([0.5, math.nan])))


TABLE = defaultdict(float, {"two": 0.5, " ": 0.125, "Yes": 0.25, "No": 0.0625})


class Judge:
    """Gives the same table to every question."""

    def __init__(self) -> None:
        words = tokenizer()
        self.first = {text: words.decode([i]) for text, i in first_tokens(words).items()}
        self.asked: list[tuple[int, str]] = []

    def ask(self, images: torch.Tensor, asked: list[tuple[int, str]]) -> list[dict[str, float]]:
        self.asked += asked
        return [TABLE for _ in asked]


def test_each_question_is_asked_as_officially_and_an_image_without_any_is_invalid() -> None:
    reward, judge = GenEval2.__new__(GenEval2), Judge()
    reward.judge = judge  # type: ignore[assignment]
    scores = score(reward, torch.rand(2, 3, 40, 64), ["a", "b"], [LINE, LINE])
    texts = ("How many dogs are there?", "Are they red?")
    assert judge.asked == [(i, f"{t} Answer in one word.") for i in range(2) for t in texts]
    two, yes = 0.5 + 0.125, 0.25  # two, and the space of " 2"
    assert scores.parts["am"].tolist() == [pytest.approx((two + yes) / 2)] * 2
    assert scores.value.tolist() == [pytest.approx(math.sqrt(two * yes))] * 2
    assert scores.parts["count"].tolist() == [two] * 2
    assert scores.parts["atoms_03"].equal(scores.value)
    some = score(reward, torch.rand(2, 3, 8, 8), ["a"] * 2, [LINE, {"tag": "none"}])
    assert some.valid.tolist() == [True, False] and "KeyError" in some.reasons[1]


def test_wrong_options_and_prompts_are_refused_before_anything_is_loaded() -> None:
    for options, key in (
        ({"model": "no/such/model/here"}, "`model`"),
        ({"endpoint": {}}, "'endpoint'"),
    ):
        with pytest.raises(ValueError) as caught:
            RewardSpec("geneval2", options).check()
        assert key in str(caught.value), options
    RewardSpec("geneval2").check_prompts(["a"], [LINE])
    for change in (
        {"skills": ["count"]},
        {"atom_count": "3"},
        {"vqa_list": [["How many dogs?", "many"], ["Is it?", "Yes"]]},
        {"vqa_list": None},
    ):
        with pytest.raises(ValueError, match="flowalign data fetch geneval2"):
            RewardSpec("geneval2").check_prompts(["a"], [LINE | change])
