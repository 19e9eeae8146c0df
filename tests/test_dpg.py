"""DPG-Bench: the official arithmetic on recorded answers, and its judges."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vlm import asked, serve  # noqa: F401

from flowalign.eval.scores import image_score
from flowalign.eval.stats import rows_of
from flowalign.rewards import RewardSpec, build, describe, score
from flowalign.rewards.dpg import with_dependencies
from flowalign.training.data import load_prompts
from flowalign.types import EvalImage, EvalRow, ImageScore, PromptBatch

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dpg.json").read_text())
BENCH: Any = SimpleNamespace(name="dpg", headline=None)


class Recorded:
    """In the place of mPLUG: the recorded answers; the brightness of an image is its number."""

    def __init__(self, device: str) -> None:
        self.asked: list[str] = []

    def vqa(self, image: Any, question: str) -> str:
        self.asked.append(question)
        return GOLDEN["answers"][question][image.getpixel((0, 0))[0]]


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PromptBatch:
    """The recorded prompts, each four times, for a judge that gives the recorded answers."""
    monkeypatch.setitem(sys.modules, "dpg_evaluator", SimpleNamespace(MPLUG=Recorded))
    (tmp_path / "dpg.csv").write_text(GOLDEN["csv"])
    prompts = load_prompts(tmp_path / "dpg.csv", "dpg")
    return prompts.select([row for row in range(len(prompts)) for _ in range(4)])


def judged(batch: PromptBatch, rule: str) -> tuple[list[ImageScore], dict[str, EvalRow]]:
    images = torch.arange(4.0).repeat(len(batch) // 4)[:, None, None, None].expand(-1, 3, 4, 4)
    reward = build("dpg", model="mplug", rule=rule)
    scores = score(reward, images / 255, batch.prompts, batch.metadata)
    found = []
    for row, prompt in enumerate(batch.prompts):
        image = EvalImage(row // 4, row % 4, prompt, batch.metadata[row])
        numbers = {"value": float(scores.value[row])}
        numbers |= {name: float(part[row]) for name, part in scores.parts.items()}
        found.append(image_score(image, numbers, None, reward.counts))
    return found, {row.metric: row for row in rows_of(BENCH, found)}


def test_the_official_rule_gives_the_official_numbers(batch: PromptBatch) -> None:
    images, rows = judged(batch, "official")
    expected = [math.nan] * 4 + [v for crops in GOLDEN["images"].values() for v in crops]
    found = [image.value for image in images]
    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
    assert rows["reward"].mean == pytest.approx(GOLDEN["score"], abs=1e-6)
    assert (rows["reward"].n, rows["reward"].total) == (4 * 13, 4 * 14)  # one prompt fell out
    for name, number in {**GOLDEN["l1"], **GOLDEN["l2"]}.items():
        assert rows[name].mean == pytest.approx(number, abs=1e-6), name


def test_a_question_that_is_left_out_has_no_weight(batch: PromptBatch) -> None:
    """The first row of the file, where no other needs it: the shares are of what was asked."""
    batch.metadata[:4] = [
        {**row, "questions": [[n, "0", *more] for n, _, *more in row["questions"]]}
        for row in batch.metadata[:4]
    ]
    answers: dict[str, list[bool]] = {}
    for metadata in batch.metadata[::4]:
        for _, _, about, text in metadata["questions"][bool(metadata.get("first_row")) :]:
            name = about.split("(")[0].strip()
            for key in {name, name.split("-")[0].strip()}:
                answers.setdefault(key, []).append(GOLDEN["answers"][text][3] == "yes")
    found = judged(batch, "official")[1]
    assert found["reward"].n == len(batch)
    for name, yes in answers.items():
        assert found[name].mean == pytest.approx(sum(yes) / len(yes), abs=1e-6), name
    assert set(found) == {"reward", *answers}


def by_hand(batch: PromptBatch) -> tuple[list[float], dict[str, float]]:
    """Per image the mean over questions whose ancestors are all yes; per category all answers."""
    values, answers = [], {}
    for row, metadata in enumerate(batch.metadata):
        yes, needs = {}, {}
        for number, dependency, about, text in metadata["questions"]:
            yes[int(number)] = GOLDEN["answers"][text][row % 4] == "yes"
            needs[int(number)] = {int(n) for n in dependency.split(",")} - {0}
            answers.setdefault(about.split("(")[0].strip(), []).append(yes[int(number)])

        def holds(number: int, seen: frozenset[int] = frozenset()) -> bool:
            over = needs[number] - seen  # noqa: B023
            return yes[number] and all(holds(n, seen | {number}) for n in over)  # noqa: B023

        values.append(sum(map(holds, yes)) / len(yes))
    return values, {name: sum(found) / len(found) for name, found in answers.items()}


def test_the_corrected_rule_has_no_quirk(batch: PromptBatch, monkeypatch) -> None:
    """All rows, all four images, and parents before children in whatever order they stand."""
    for question, answers in GOLDEN["answers"].items():  # it refuses what is neither
        plain = ["no" if answer == "maybe" else answer for answer in answers]
        monkeypatch.setitem(GOLDEN["answers"], question, plain)
    values, categories = by_hand(batch)
    images, rows = judged(batch, "corrected")
    assert [image.value for image in images] == pytest.approx(values, abs=1e-6)
    assert rows["reward"].mean == pytest.approx(sum(values) / len(values), abs=1e-6)
    for name, number in categories.items():
        assert rows[name].mean == pytest.approx(number, abs=1e-6), name
    official = judged(batch, "official")[1]
    assert official["entity"].mean != pytest.approx(rows["entity"].mean, abs=1e-3)
    assert rows["reward"].n == official["reward"].n + 4


def test_a_no_reaches_the_children_of_children_in_any_order() -> None:
    def after(parents: dict[int, list[int]], rule: str) -> list[float]:
        yes = {number: float(number != 3) for number in parents}
        return with_dependencies(
            yes, {number: (needs, "", "") for number, needs in parents.items()}, rule
        )

    chain: dict[int, list[int]] = {1: [2], 2: [3], 3: []}
    assert after(chain, "corrected") == [0, 0, 0]
    assert after(chain, "official") == [1, 0, 0]
    orphan = {1: [9], 2: []}  # 9 is no question
    assert after(orphan, "corrected") == [1, 1]
    with pytest.raises(KeyError, match="9"):
        after(orphan, "official")
    assert after({1: [2], 2: [1]}, "corrected") == [1, 1]


LINE = {
    "item_id": "a",
    "questions": [["1", "0", "entity - whole (cup)", "Is there a cup?"],
                  ["2", "1", "attribute - color (cup, red)", "Is the cup red?"]],
    "skills": ["entity - whole", "attribute - color"],
}  # fmt: skip


def test_an_endpoint_is_asked_every_question_and_its_yes_is_read(serve) -> None:  # noqa: F811
    judge = serve(lambda request: "Yes." if "there" in asked(request)[0] else " no\n")
    endpoint = {"url": judge.url, "model": "judge", "concurrency": 1, "retries": 0}
    reward = build("dpg", endpoint=endpoint)
    scores = score(reward, torch.rand(1, 3, 24, 40), ["a"], [LINE])
    assert scores.value.tolist() == [0.5]
    assert {name: float(part) for name, part in scores.parts.items()} == {
        "entity": 1, "entity - whole": 1, "attribute": 0, "attribute - color": 0,
    }  # fmt: skip
    assert [asked(request)[0] for request in judge.requests] == [
        "Is there a cup? Answer yes or no.", "Is the cup red? Answer yes or no.",
    ]  # fmt: skip
    assert asked(judge.requests[0])[1].shape == (24, 40, 3)
    said = describe(reward)
    assert (said["model"], said["rule"]) == ("judge", "corrected")
    judge.reply = lambda request: "It depends"
    unclear = score(reward, torch.rand(1, 3, 8, 8), ["a"], [LINE])
    assert not unclear.valid[0] and "It depends" in unclear.reasons[0]
    strict = build("dpg", endpoint=endpoint, rule="official")  # what is no yes is a no there
    assert score(strict, torch.rand(1, 3, 8, 8), ["a"], [LINE]).value.tolist() == [0]
    judge.reply = lambda request: (500, b"no")
    for each in (reward, strict):
        assert not score(each, torch.rand(1, 3, 8, 8), ["a"], [LINE]).valid[0]


def test_wrong_options_and_prompts_are_refused_before_anything_is_loaded() -> None:
    for options, key in (
        ({"rule": "sane"}, "`rule`"),
        ({"model": "no/such/model/here"}, "`model`"),
        ({"endpoint": {"url": "localhost"}}, "`url`"),
    ):
        with pytest.raises(ValueError) as caught:
            RewardSpec("dpg", options).check()
        assert key in str(caught.value), options
    RewardSpec("dpg").check_prompts(["a"], [LINE])
    first, second = LINE["questions"]
    wrong = [["2", "one", *second[2:]], second[:3]]
    for change in (
        *({"questions": [first, question]} for question in wrong),
        {"questions": []},
        {"questions": [first], "skills": []},
    ):
        with pytest.raises(ValueError, match="flowalign data fetch dpg_bench"):
            RewardSpec("dpg").check_prompts(["a"], [LINE | change])
    with pytest.raises(ValueError, match="flowalign data fetch dpg_bench"):
        RewardSpec("dpg").check_prompts(["a"], [{"item_id": "7"}])  # the folder of prompts
    assert RewardSpec("dpg", {"model": "mplug"}).missing_packages == ["dpg_evaluator"]
