"""Soft-TIFA: the official arithmetic on recorded probabilities, and an endpoint."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_vlm import asked, serve  # noqa: F401
from vision_judge import completion, tokenizer

from flowalign.eval.stats import rows_of
from flowalign.rewards import build, build_on, check, check_prompts, describe, score
from flowalign.rewards.geneval2 import first_tokens, question_score, soft_tifa, spellings

GOLDEN = json.loads((Path(__file__).parent / "golden" / "geneval2.json").read_text())
FIRST, CASES = GOLDEN["meta"]["first_token"], GOLDEN["cases"]


class Bench(NamedTuple):
    name: str = "geneval2"
    headline: str | None = "gm"


def scored(case: dict[str, Any]) -> list[float]:
    pairs = zip(case["probabilities"], case["vqa_list"], strict=True)
    return [question_score(table, FIRST, *pair) for table, pair in pairs]


@pytest.fixture
def words(tmp_path: Path) -> str:
    """The folder of a tokenizer alone, which is what an endpoint's judge needs."""
    tokenizer().save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def line(*questions: tuple[str, str, str], atoms: int = 3) -> dict[str, Any]:
    skills = [skill for skill, _, _ in questions]
    return {"atom_count": atoms, "vqa_list": [[q, a] for _, q, a in questions], "skills": skills}


LINE = line(("count", "How many dogs are there?", "two"), ("attribute", "Are they red?", "Yes"))


# The arithmetic ----------------------------------------------------------------------------------


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
        row = {"am": am, "gm": gm, "value": gm, f"atoms_{case['atom_count']:02}": gm}
        for skill in {*case["skills"]}:
            own = [s for s, name in zip(scores, case["skills"], strict=True) if name == skill]
            row[skill] = sum(own) / len(own)
        metadata = {key: case[key] for key in ("vqa_list", "skills", "atom_count")}
        images.append({"index": index, "prompt": str(index), "metadata": metadata, **row})
    lost = {"index": 99, "prompt": "99", "metadata": LINE, "value": math.nan, "gm": math.nan}
    rows = {row.metric: row for row in rows_of(Bench(), [*images, lost])}
    expected = {"am": summary["am"], "gm": summary["gm"], **summary["skills"]}
    expected |= {f"atoms_{int(count):02}": number for count, number in summary["atoms"].items()}
    assert {name: 100 * rows[name].mean for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (rows["gm"].n, rows["gm"].total) == (20, 21)
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
    assert question_score({" ": 0.4}, shared, "How many?", "one") == pytest.approx(1.2)
    assert soft_tifa([0.5, 0.0]) == (0.25, 0.0)
    assert all(map(math.isnan, soft_tifa([0.5, math.nan])))


# An endpoint -------------------------------------------------------------------------------------

TABLE = {"two": 0.5, " ": 0.125, "Yes": 0.25, "No": 0.0625}  # the likeliest four


def endpoint(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "model": "judge", "retries": 0, **more}


def test_an_endpoint_is_asked_each_question_as_officially(serve, words: str) -> None:  # noqa: F811
    judge = serve(lambda request: completion(TABLE, 4))
    reward = build_on(None, "geneval2", {
        "model": words, "endpoint": endpoint(judge.url, concurrency=1), "top_logprobs": 4,
    })  # fmt: skip
    del judge.requests[:]  # of the question that tells whether it can
    scores = score(reward, torch.rand(2, 3, 40, 64), ["a", "b"], [LINE, LINE])
    assert [asked(request)[0] for request in judge.requests] == [
        "How many dogs are there? Answer in one word.", "Are they red? Answer in one word.",
    ] * 2  # fmt: skip
    request = judge.requests[0]
    assert asked(request)[1].shape == (40, 64, 3)  # the image as it is
    form = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    assert form.items() <= request.items()
    two, yes = 0.5 + 0.125, 0.25  # two, and the space of " 2"
    assert scores.parts["am"].tolist() == [pytest.approx((two + yes) / 2)] * 2
    assert scores.value.tolist() == [pytest.approx(math.sqrt(two * yes))] * 2
    assert scores.parts["count"].tolist() == [two] * 2
    assert scores.parts["atoms_03"].equal(scores.value)
    assert "4 log-probabilities" in describe(reward)["engine"]


@pytest.mark.parametrize(
    "reply",
    [
        completion(TABLE, None),
        completion(TABLE, 2),  # fewer than were asked for
        (400, b'{"error": {"message": "logprobs are off"}}'),
        (200, b'{"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "a"}]}]}}]}'),
        (200, completion({"a": 0.5, "b": 0.9, "c": 0.1, "d": 0.1}, 4)[1]),  # no probabilities
    ],
)
def test_an_endpoint_without_log_probabilities_is_refused(serve, words: str, reply: Any) -> None:  # noqa: F811
    options = {"endpoint": endpoint(serve(lambda request: reply).url), "top_logprobs": 4}
    with pytest.raises(ValueError, match="`endpoint`.*(log-prob|logprobs)"):
        build_on(None, "geneval2", {"model": words, **options})


def test_an_image_with_a_question_unanswered_is_invalid_and_never_0(serve, words: str) -> None:  # noqa: F811
    broken = line(("object", "Is it broken?", "Yes"), ("object", "Is it there?", "Yes"))
    reply = {True: completion(TABLE, None), False: completion(TABLE, 4)}
    judge = serve(lambda request: reply["broken" in asked(request)[0]])
    reward = build("geneval2", model=words, endpoint=endpoint(judge.url), top_logprobs=4)
    images = torch.rand(4, 3, 32, 32)
    images[3] = math.nan
    scores = score(reward, images, ["a"] * 4, [LINE, broken, {"tag": "none"}, LINE])
    assert scores.valid.tolist() == [True, False, False, False]
    for numbers in (scores.value, *scores.parts.values()):
        assert numbers[1:].isnan().all()
    assert "log-probabilities" in scores.reasons[1] and "KeyError" in scores.reasons[2]


def test_wrong_options_and_prompts_are_refused_before_anything_is_loaded() -> None:
    for options, key in (
        ({"model": "no/such/model/here"}, "`model`"),
        ({"endpoint": {}}, "`url`"),
        ({"endpoint": {"url": "localhost"}}, "`url`"),
        ({"endpoint": {"url": "http://127.0.0.1:9/v1", "token_env": "HOME"}}, "`token_env`"),
        ({"top_logprobs": 0}, "`top_logprobs`"),
    ):
        with pytest.raises(ValueError) as caught:
            check("geneval2", options)
        assert key in str(caught.value), options
    check_prompts("geneval2", {}, ["a"], [LINE])
    for change in (
        {"skills": ["count"]},
        {"skills": ["count", "value"]},
        {"skills": [], "vqa_list": []},
        {"atom_count": "3"},
        {"vqa_list": [["How many dogs?", "many"], ["Is it?", "Yes"]]},
        {"vqa_list": [["Is it?"], ["Is it?", "Yes"]]},
        {"vqa_list": [[1, 2], ["Is it?", "Yes"]]},
        {"vqa_list": None},
    ):
        with pytest.raises(ValueError, match="flowalign data fetch geneval2"):
            check_prompts("geneval2", {}, ["a"], [LINE | change])
